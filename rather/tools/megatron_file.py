"""A model folder as a `torch_dist` checkpoint for Megatron-Core, written with torch alone."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig

from rather.checkpoint.torch_dist import FORMAT
from rather.errors import ConfigError
from rather.model.files import ModelFiles, weight_files
from rather.model.megatron import FAMILIES, LATEST, MegatronFiles, weight_rows

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COPIED = ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "README.md")

log = logging.getLogger(__name__)


def write_megatron(folder: Path, out: Path, _name: str) -> None:
    """Write a model folder as the checkpoint `out`, and compare every weight bit for bit."""
    config = AutoConfig.from_pretrained(folder).get_text_config()  # local  # nosec B615
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"--format megatron: model family '{config.model_type}' is not one of "
            f"{', '.join(FAMILIES)}."
        )
    files = ModelFiles(weight_files(folder))
    temporary = out.with_name(f".tmp-{out.name}-megatron")
    shutil.rmtree(temporary, ignore_errors=True)
    release = temporary / "release"
    release.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            writer = FileSystemWriter(str(release), overwrite=False)
            save(megatron_tensors(files, config), storage_writer=writer, no_dist=True)
        (release / FORMAT).write_text(json.dumps(BACKENDS), "utf-8")
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, release / "common.pt")
        (temporary / LATEST).write_text("release", "utf-8")
        for pattern in COPIED:
            for file in folder.glob(pattern):
                shutil.copyfile(file, temporary / file.name)
        written = MegatronFiles(release, config)
        for name in written:
            if not torch.equal(written[name], files[name]):
                raise ConfigError(f"{out}: not written: {name} differs from the model")
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info(
        "%s: Megatron-LM loads it with --load, --ckpt-format torch_dist and "
        "--dist-ckpt-strictness log_all",
        out,
    )


def megatron_tensors(files: ModelFiles, config: object) -> dict[str, Tensor]:
    """Return the weights of a model under Megatron's names, with layers stacked."""
    pieces_by_layer: dict[str, dict[int | None, list[tuple[Tensor | None, Tensor]]]] = {}
    for name, key, layer, rows in weight_rows(config):
        if name in files:
            pieces_by_layer.setdefault(key, {}).setdefault(layer, []).append((rows, files[name]))
    tensors = {}
    for key, layers in pieces_by_layer.items():
        joined = [_joined(pieces) for pieces in layers.values()]
        tensors[key] = joined[0] if None in layers else torch.stack(joined)
    return tensors


def _joined(pieces: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    """Put the rows of several weights into one tensor."""
    first = pieces[0][1]
    joined = first.new_empty(sum(len(weight) for _, weight in pieces), *first.shape[1:])
    for rows, weight in pieces:
        joined[torch.arange(len(weight)) if rows is None else rows] = weight
    return joined
