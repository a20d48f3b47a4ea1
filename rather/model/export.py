"""Trained weights -> a folder that `from_pretrained` opens: sharded safetensors, config, tokenizer, model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rather.checkpoint.sharded_tensors import ShardedFiles, TensorStream, safetensors_file
from rather.config.paths import is_local
from rather.config.schema import ModelArgs
from rather.errors import DiskError
from rather.model.digest import model_folder
from rather.model.files import weight_files
from rather.model.policy import PolicyModel

LARGEST_FILE = 4_000_000_000  # bytes, as transformers' "4GB"


def export_model(
    policy: PolicyModel, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path, card: str
) -> None:
    """Writes `weights` (names as in the policy) in the dtype of the source model. Complete or not there at all."""
    publish(whole_model(policy, weights, tokenizer, folder), folder, card)


def whole_model(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    """The same, not yet published as `folder`, in files of at most so many bytes."""
    model = policy.causal_lm
    dtype = model.config.dtype
    with _made(folder) as temporary:
        try:
            with _any_generation_config(model, temporary / "generation_config.json"):
                state = _state(policy, weights, dtype)
                model.save_pretrained(temporary, state_dict=state, max_shard_size=largest or "4GB")
        finally:
            model.config.dtype = (
                dtype  # save_pretrained overwrites it with the dtype it was trained in
            )
        _name_dtype(temporary / "config.json", dtype)
        tokenizer.save_pretrained(temporary)
    return temporary


def export_stored(
    model: Any, stored: ShardedFiles, tokenizer: Any, folder: Path, card: str
) -> None:
    """The same from weights that several ranks have written to files; of `model` only its configs are read.

    They are streamed: no more than some rows of one weight are in memory.
    """
    dtype = model.config.dtype
    weights = {
        name.removeprefix("causal_lm."): stored.stream(name, dtype) for name in sorted(stored)
    }
    publish(_streamed(model, weights, tokenizer, folder), folder, card)


def export_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
    card: str,
) -> None:
    """The adapter as PEFT opens it, beside `folder`, and in `folder` the source's weights with it merged in."""
    name, args = source
    base, beside = model_folder(name, args.revision), adapter_beside(folder)
    assert base is not None
    publish(whole_adapter(model, weights, source, tokenizer, beside), beside, card)
    publish(merged_model(model, base, beside, tokenizer, folder), folder, card)


def whole_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
) -> Path:
    """The adapter alone, not yet published as `folder`."""
    from rather.model.adapters import adapter_files, config_of

    name, args = source
    config, base = config_of(model), model_folder(name, args.revision)
    assert config is not None
    assert base is not None
    with _made(folder) as temporary:
        named = str(base.absolute()) if is_local(name) else name
        adapter_files(temporary, config, weights, named, args.revision, args.quantization)
        tokenizer.save_pretrained(temporary)
    return temporary


def merged_model(
    model: Any, base: Path, adapter: Path, tokenizer: Any, folder: Path, largest: int | None = None
) -> Path:
    """The weights of a base with an adapter merged in, not yet published as `folder`; of `model` its configs are read."""
    from rather.model.adapters import merged

    weights = merged(ShardedFiles(weight_files(base)), adapter, model.config.dtype)
    return _streamed(model, weights, tokenizer, folder, largest)


def adapter_beside(folder: Path) -> Path:
    """model -> adapter, best_model -> best_adapter."""
    return folder.with_name(folder.name.replace("model", "adapter"))


def _streamed(
    model: Any,
    weights: Mapping[str, TensorStream],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
) -> Path:
    """All but the card, in a folder of another name."""
    with _made(folder) as temporary:
        model.config.save_pretrained(temporary)
        _name_dtype(temporary / "config.json", model.config.dtype)
        model.generation_config.to_json_file(temporary / "generation_config.json")
        _write_weights(temporary, weights, largest)
        tokenizer.save_pretrained(temporary)
    return temporary


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A new folder to be filled, which gets its name by `publish`."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    with _or_nothing(temporary, folder):
        temporary.mkdir(parents=True)
        yield temporary


@contextmanager
def _or_nothing(temporary: Path, folder: Path) -> Iterator[None]:
    """What goes wrong leaves nothing that takes room; an error of the disk is told as one."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(
            error, OSError | SafetensorError
        ):  # safetensors' own writer gives no OSError
            raise
        cause = getattr(error, "strerror", None) or error
        raise DiskError(
            f"{folder}: could not be written ({cause}). Make room on the disk and start the same command again; what "
            "was there before is untouched."
        ) from error


def _write_weights(folder: Path, weights: Mapping[str, TensorStream], largest: int | None) -> None:
    """One file, or several with the index that transformers reads."""
    shards: list[dict[str, TensorStream]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + weight.nbytes > (
            largest or LARGEST_FILE
        ):
            shards.append({})
        shards[-1][name] = weight
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        with open(folder / file, "xb") as out:
            for chunk in safetensors_file(shard, {}):
                out.write(chunk)
    if len(names) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {
            "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
            "weight_map": places,
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def publish(temporary: Path, folder: Path, card: str) -> None:
    """What was made under another name becomes `folder`, complete or not at all."""
    with _or_nothing(temporary, folder):
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        _replace(temporary, folder)


def _state(
    policy: PolicyModel, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The full state dict of the Hugging Face model; tied weights stay one tensor, so they are stored once."""
    trained: dict[int, Tensor] = {}
    for name, parameter in policy.named_parameters():
        trained[id(parameter)] = weights.get(name, parameter).detach().to(dtype).cpu()
    state: dict[str, Tensor] = dict(policy.causal_lm.state_dict())
    for name, parameter in policy.causal_lm.named_parameters(remove_duplicate=False):
        state[name] = trained[id(parameter)]
    return state


@contextmanager
def _any_generation_config(model: Any, file: Path) -> Iterator[None]:
    """Writes the source's own: save_pretrained refuses one that sets a temperature and does not sample, as many do."""
    own = model.generation_config
    model.generation_config = type(own)()
    try:
        yield
    finally:
        model.generation_config = own
    own.to_json_file(file)


def _name_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop(
        "quantization_config", None
    )  # how it was held in training; what is written is not quantised
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _replace(temporary: Path, folder: Path) -> None:
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
