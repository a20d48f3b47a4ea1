"""Checkpoints that two ranks have written, damaged: the file is named, and the same command ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.test_checkpoint import flip_bit
from tests.faults.world import World

ALL = {"max_ckpt_to_keep": 0}


def swap(file: Path) -> None:
    """With that of the other rank."""
    other = file.with_name(file.name.replace("-00001-", "-00000-"))
    mine, theirs = file.read_bytes(), other.read_bytes()
    assert mine != theirs
    file.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (flip_bit, "model-00001-00001", "model-00001-00001.safetensors: is damaged: its SHA-256"),
        (swap, "optimizer-00001-00001", "optimizer-00000-00001.safetensors: is damaged"),
    ],
)
def test_a_file_of_one_of_two_ranks(
    world: World, damage: Callable[[Path], None], file: str, message: str
) -> None:
    clean = world.clean("dp2", ALL)
    run = world.ended("dp2", ALL)
    damage(run.config.run_dir / "checkpoint-6" / f"{file}.safetensors")
    assert run.start() == [0, 0], run.output()
    assert f"checkpoint-6/{message}" in run.output()
    assert "checkpoint-4 is used instead: the newest good checkpoint, step 4" in run.output()
    run.assert_like(clean)
