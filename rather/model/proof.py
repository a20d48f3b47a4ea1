"""Prove that an export can be opened, before it gets its name: by names and shapes alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.errors import ConfigError
from rather.model.files import weight_files
from rather.model.names import Names, empty_like

SHOWN = 3
Shapes = Mapping[str, tuple[int, ...]]


def prove_export(folder: Path, model: Any, names: Names, *, has_source: bool) -> None:
    """Refuse an export that differs from its source in names or shapes, or that would not open.

    Intended: a reward model has a new head instead of what its class lacks.
    """
    files = ShardedFiles(weight_files(folder))
    shapes = {name: files.shape(name) for name in files}
    if has_source:
        expected = dict(names.shapes)
        if hasattr(model, "score"):
            expected = {name: expected[name] for name in expected.keys() - names.unknown}
            expected |= {name: shapes[name] for name in shapes.keys() & {"score.weight"}}
        _compare(folder, "the source", shapes, expected)
    model_class = type(names.model)
    config = type(model.config).from_pretrained(folder)
    empty = {
        name: torch.empty(shape, dtype=files.dtype(name), device="meta")
        for name, shape in shapes.items()
    }
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # its report is raised below
    hf_logging.disable_progress_bar()
    _, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=empty,
        dtype=model.config.dtype,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    hf_logging.set_verbosity(verbosity)
    _refuse(folder, "are missing for transformers", info["missing_keys"])
    _refuse(folder, "have other shapes than the model", info["mismatched_keys"])
    unexpected = set(info["unexpected_keys"]) - set(names.unknown)
    _refuse(folder, "are unknown to transformers", unexpected)


def prove_adapter(folder: Path, model: Any) -> None:
    """Refuse an adapter whose tensors are not those that PEFT adds to the model by its config."""
    from rather.model.adapters import peft_shapes  # PEFT takes seconds to import

    expected = peft_shapes(folder, empty_like(model))
    files = ShardedFiles([folder / "adapter_model.safetensors"])
    _compare(folder, "the model", {name: files.shape(name) for name in files}, expected)


def _compare(folder: Path, other: str, shapes: Shapes, expected: Shapes) -> None:
    _refuse(folder, "are missing", expected.keys() - shapes.keys())
    _refuse(folder, f"are not in {other}", shapes.keys() - expected.keys())
    changed = [name for name in shapes if shapes[name] != expected[name]]
    _refuse(folder, f"have other shapes than in {other}", changed)


def _refuse(folder: Path, problem: str, names: Collection[Any]) -> None:
    if names:
        shown = ", ".join(sorted(map(str, names))[:SHOWN])
        target = folder.with_name(folder.name.removeprefix(".tmp-"))
        raise ConfigError(
            f"{target}: not written: {len(names)} tensors {problem}: {shown}. An earlier export and "
            "the run's checkpoints are unchanged; `rather export` them with another transformers."
        )
