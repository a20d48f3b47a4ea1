"""Bits and checkpoints of older commits (see before_after.py); and the comparison itself finds
differences.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.same import before_after


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not before_after.has_base():
        pytest.skip(f"the git history here does not contain commit {before_after.BASE}")
    return tmp_path_factory.mktemp("base")


@pytest.mark.wide
@pytest.mark.slow
def test_bits_are_those_of_the_commit_before(keep: Path, tmp_path: Path) -> None:
    """Two rows; `python -m tests.same.before_after` runs all of them."""
    outcomes = before_after.check(["float32", "zero3"], keep, tmp_path)
    assert not {what: each.differences for what, each in outcomes.items() if each.differences}


def make_run(folder: Path) -> Path:
    last = folder / f"checkpoint-{before_after.COMMON['max_steps']}"
    last.mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "time/train": 1.0}\n')
    (last / "state.json").write_text(json.dumps({"identity": {"loss": 1}, "metrics_bytes": 7}))
    for path in (last / "model-00001.safetensors", folder / "model" / "model.safetensors"):
        save_file({"w": torch.tensor([0.0, 1.0])}, path)
    return folder


def test_the_comparison_names_what_differs(tmp_path: Path) -> None:
    expected = make_run(tmp_path / "expected")
    same = shutil.copytree(expected, tmp_path / "same")
    line = '{"step": 1, "loss": 0.5, "time/train": 9.0}\n'
    (same / "metrics.jsonl").write_text(line)
    assert before_after.compare(same, expected) == []
    for file, change in {
        "metrics.jsonl": line.replace("0.5", "0.5000000001"),
        "checkpoint-5/state.json": '{"identity": {"losses": 1}, "metrics_bytes": 7}',
    }.items():
        other = shutil.copytree(expected, tmp_path / file.replace("/", "-"))
        (other / file).write_text(change)
        assert before_after.compare(other, expected), file
    for file in ("checkpoint-5/model-00001.safetensors", "model/model.safetensors"):
        other = shutil.copytree(expected, tmp_path / file.replace("/", "-"))
        save_file({"w": torch.tensor([-0.0, 1.0])}, other / file)
        (found,) = before_after.compare(other, expected)
        assert "1 tensors differ (w)" in found
