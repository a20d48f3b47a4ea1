"""`rather verify`: a table of every file, good or damaged and why."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.test_checkpoint import flip_bit
from tests.commands.conftest import exits


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "output" / "whole", tmp_path / "whole"))


def test_a_good_run_and_its_parts(folder: Path, run: Path) -> None:
    whole = exits(0, "verify", run)
    for name in ("checkpoint-2/manifest.json", "checkpoint-6/optimizer-00001.safetensors", "LATEST", "reference.log",
                 "metrics.jsonl"):  # fmt: skip
        assert any(
            name in line and line.endswith("good") for line in map(str.rstrip, whole.splitlines())
        ), name
    assert "19 files, 0 damaged (checked every byte)" in whole
    one = exits(0, "verify", run / "checkpoint-4", "--quick")
    assert "5 files, 0 damaged (checked names, sizes and the state)" in one
    assert ".logps" in exits(0, "verify", folder / "output" / ".cache" / "reference")


def test_every_damaged_file_is_reported_not_only_the_first(run: Path) -> None:
    flip_bit(run / "checkpoint-4" / "model-00001.safetensors")
    os.truncate(run / "checkpoint-4" / "state.json", 10)
    (run / "checkpoint-4" / "rng-00001.safetensors").unlink()
    (run / "checkpoint-4" / "notes.txt").write_text("mine")
    found = exits(4, "verify", run)
    told = [line for line in found.splitlines() if "damaged:" in line]
    assert len(told) == 4
    for name, reason in {"model-00001": "SHA-256", "state.json": "10 bytes instead of", "rng-00001": "is missing",
                         "notes.txt": "is not part of the checkpoint"}.items():  # fmt: skip
        assert any(name in line and reason in line for line in told), name


def test_quick_does_not_read_tensors(run: Path) -> None:
    flip_bit(run / "checkpoint-4" / "model-00001.safetensors")
    exits(0, "verify", run, "--quick")
    exits(4, "verify", run)


def change_a_digit(metrics: Path) -> None:
    """The line stays a record."""
    text = metrics.read_text()
    metrics.write_text(text.replace('"step": 1,', '"step": 7,', 1))
    assert metrics.read_text() != text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: (run / "LATEST").write_text("checkpoint-9\n"), "names checkpoint-9, which does not exist"),
        (lambda run: os.truncate(run / "metrics.jsonl", 50), "line 1 is not a complete record"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "where checkpoint-6 was saved"),
        (lambda run: (run / "metrics.jsonl").unlink(), "cannot be read (No such file or directory)"),
        (lambda run: change_a_digit(run / "metrics.jsonl"), "have changed since checkpoint-"),
        (lambda run: flip_bit(run / "reference.log"), "bytes; their log-probs are computed again"),
    ],
)  # fmt: skip
def test_the_other_files_of_a_run(run: Path, change: object, reason: str) -> None:
    change(run)  # type: ignore[operator]
    found = exits(4, "verify", run)
    assert reason in found
    assert "1 damaged" in found


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert "not a checkpoint, run folder or reference cache" in exits(2, "verify", tmp_path)
