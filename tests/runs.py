"""Runs of a tiny model, trained in this process, and what they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rather.checkpoint.checkpoint import MANIFEST, open_checkpoint
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config, metrics, untimed

Left = tuple[list[dict[str, Any]], dict[str, Tensor], list[bytes]]


def trained(folder: Path, name: str, **changes: Any) -> DPOConfig:
    """Train a run to its end; return its config."""
    config = make_config(folder, exp_name=name, **changes)
    assert DPOPipeline(config).run() == 0
    return config


def run(folder: Path, name: str, **changes: Any) -> tuple[DPOConfig, list[dict[str, Any]]]:
    """Train a run to its end; return its config and metrics."""
    config = trained(folder, name, **changes)
    return config, metrics(config)


def steps(config: DPOConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about training, without those of evaluations."""
    return [line for line in metrics(config) if "lr" in line]


def evaluations(config: DPOConfig) -> list[dict[str, Any]]:
    return [line for line in metrics(config) if "eval/pairs" in line]


def exported(config: DPOConfig, folder: str = "model") -> dict[str, Tensor]:
    return load_file(config.run_dir / folder / "model.safetensors")


def saved(config: DPOConfig, step: int, *groups: str) -> dict[str, Tensor]:
    """The tensors of some groups of a checkpoint, by default of the model and its optimizer."""
    found = open_checkpoint(config.run_dir / f"checkpoint-{step}")
    return {
        f"{group}/{name}": tensor
        for group in groups or ("model", "optimizer")
        for name, tensor in found.tensors(group).items()
    }


def assert_resumes(config: DPOConfig, after: int) -> None:
    """A run without its checkpoints beyond a step reads the one left: same bits and metrics again."""
    assert DPOPipeline(config).run() == 0
    last = saved_steps(config.run_dir)[-1]
    first = left(config, last)
    for step in range(after + 1, last + 1):
        shutil.rmtree(config.run_dir / f"checkpoint-{step}", ignore_errors=True)
    shutil.rmtree(config.run_dir / "model")
    manifest = config.run_dir / f"checkpoint-{after}" / MANIFEST
    written = manifest.stat().st_mtime_ns
    assert DPOPipeline(config).run() == 0
    assert manifest.stat().st_mtime_ns == written
    assert_left(config, last, first)


def left(config: DPOConfig, step: int) -> Left:
    """Metrics without times, tensors of a checkpoint, exported files and the ledger."""
    tensors = saved(config, step, "model", "optimizer", "rng")
    files = sorted(config.run_dir.glob("*/*model.safetensors"))
    files += config.run_dir.glob("ledger.arrows")
    return untimed(metrics(config)), tensors, [file.read_bytes() for file in files]


def assert_left(config: DPOConfig, step: int, expected: Left) -> None:
    """A run has left the same as another one, or as itself before, to the bit."""
    lines, tensors, files = left(config, step)
    assert lines == expected[0]
    assert_equal(tensors, expected[1])
    assert files == expected[2]


def assert_same(one: DPOConfig, other: DPOConfig) -> None:
    """Two runs have left the same at their last step."""
    step = one.max_steps
    assert step
    assert_left(one, step, left(other, step))


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*"))


def incidents(config: DPOConfig) -> list[dict[str, Any]]:
    file = config.run_dir / "incidents.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, types and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
