"""Any damage to any file of a checkpoint, of the run's own log-probs or of the reference cache: named, never used."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rather.checkpoint import checkpoint
from rather.cli import app
from rather.errors import CheckpointError
from rather.pipeline.pipeline import DPOPipeline
from rather.reference.logprob_cache import MAGIC
from tests.checkpoint.runs import config_of, copy_of_whole, finish
from tests.checkpoint.test_checkpoint import flip_bit, seal
from tests.runs import assert_equal, left

FILES = [
    *(f"{group}-00001.safetensors" for group in ("model", "optimizer", "rng")),
    "state.json",
    "manifest.json",
]


AFTER_TWO = ("checkpoint-4", "checkpoint-6", "model")  # what a run leaves after its second step


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def swap(file: Path) -> None:
    """With a file of the same kind: that of the checkpoint before, or the next one of a cache."""
    here = sorted(file.parent.glob("*.logps"))
    other = here[here.index(file) - 1] if here else file.parent.parent / "checkpoint-4" / file.name
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def edit(file: Path) -> None:
    """Same length, other content, as an editor or a careless script would leave it."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = b"RATHER!!"
    file.write_bytes(data)


def add_a_file(file: Path) -> None:
    shutil.copy(file, file.with_name(f"model-00009{file.suffix}"))


def link(file: Path) -> None:
    target = file.parent.parent / f"elsewhere-{file.name}"
    shutil.move(file, target)
    file.symlink_to(target)


def other_version(file: Path) -> None:
    if file.suffix == ".logps" or file.name == "reference.log":
        file.write_bytes(file.read_bytes().replace(MAGIC, MAGIC[:-1] + b"9"))
    else:
        seal(file.parent, schema=2)


DAMAGES: list[Callable[[Path], None]] = [
    flip_bit,
    truncate,
    lengthen,
    Path.unlink,
    swap,
    edit,
    add_a_file,
    link,
    other_version,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_an_older_one_used(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
) -> None:
    run = tmp_path / "whole"
    shutil.copytree(folder / "output" / "whole", run)
    if damage is swap and file.startswith(
        "rng"
    ):  # nothing draws numbers: with its like it would be the same
        os.replace(run / "checkpoint-4" / "state.json", run / "checkpoint-4" / file)
    damage(run / "checkpoint-6" / file)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest_good(run)
    assert found is not None
    assert found.step == (2 if damage is swap else 4)
    assert "DAMAGED CHECKPOINT, not used" in caplog.text
    told = {add_a_file: f"model-00009{Path(file).suffix}", other_version: "manifest.json"}.get(
        damage, file
    )
    assert f"checkpoint-6/{told}: " in caplog.text
    with pytest.raises(CheckpointError):
        checkpoint.open_checkpoint(run / "checkpoint-6")
    verified = CliRunner().invoke(app, ["verify", str(run)], env={"COLUMNS": "400"})
    assert verified.exit_code == 4
    assert any(
        "damaged" in line and f"checkpoint-6/{told}" in line
        for line in verified.output.splitlines()
    )


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_run_resumes_from_the_older_one_with_the_same_bits(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    config = copy_of_whole(folder, f"damaged-{damage.__name__}", "model")
    damage(config.run_dir / "checkpoint-6" / "model-00001.safetensors")
    with caplog.at_level(logging.WARNING):
        finish(folder, config)
    assert "checkpoint-6/model-00001.safetensors" in caplog.text
    assert "checkpoint-4 is used instead" in caplog.text


def test_a_size_check_misses_a_flipped_bit_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"max_steps": 7, "checkpoint_config__verify": "size"}
    config = copy_of_whole(folder, "by-size", **changes)
    newest = config.run_dir / "checkpoint-6"
    flip_bit(newest / "rng-00001.safetensors", -1)
    with pytest.raises(CheckpointError):
        checkpoint.open_checkpoint(newest)
    assert checkpoint.open_checkpoint(newest, full=False).step == 6
    flip_bit(newest / "state.json")  # what is small is always compared
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.open_checkpoint(newest, full=False)
    flip_bit(newest / "state.json")
    truncate(newest / "model-00001.safetensors")
    with caplog.at_level(logging.WARNING):
        assert DPOPipeline(config).run() == 0
    assert "checkpoint_config.verify: size: only names, sizes and state of " in caplog.text
    assert "checkpoint-4 are verified" in caplog.text


@pytest.fixture
def filled(folder: Path, tmp_path: Path) -> Path:
    """A reference cache of two segments."""
    cache = tmp_path / "cache"
    for number, steps in enumerate((2, 6)):
        name = f"fills-{tmp_path.name}-{number}"
        config = config_of(folder, name, max_steps=steps, reference__cache__path=str(cache))
        assert DPOPipeline(config).run() == 0
    assert len(list(cache.rglob("*.logps"))) == 2
    return cache


CACHE_DAMAGES = [flip_bit, truncate, Path.unlink, swap, edit, other_version]


@pytest.mark.parametrize("damage", CACHE_DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_entries_of_the_cache_are_computed_again(
    folder: Path, filled: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    segments = sorted(filled.rglob("*.logps"))
    for segment in segments if damage is not swap else segments[:1]:
        damage(segment)
    config = config_of(folder, f"cache-{damage.__name__}", reference__cache__path=str(filled))
    with caplog.at_level(logging.WARNING):
        finish(folder, config)
    if damage in (flip_bit, truncate, edit, other_version):
        assert all(f"{segment}: " in caplog.text for segment in segments)
        assert "bytes are damaged; the log-probs they held are computed again" in caplog.text
        verified = CliRunner().invoke(app, ["verify", str(filled)], env={"COLUMNS": "400"})
        assert verified.exit_code == 4
        assert verified.output.count("bytes; their log-probs are computed again") == 2
    used = json.loads((config.run_dir / "report.json").read_text())["reference"]
    assert (used["pairs_computed"] > 0) == (damage is not swap)  # it holds what it should


@pytest.mark.parametrize(
    "damage", [flip_bit, truncate, Path.unlink, edit, other_version], ids=lambda d: d.__name__
)
def test_damaged_log_probs_of_the_run_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """The values that its steps used: what is gone is computed again by the same model."""
    config = copy_of_whole(folder, f"log-{damage.__name__}", *AFTER_TWO)
    damage(config.run_dir / "reference.log")
    with caplog.at_level(logging.WARNING):
        finish(folder, config)
    assert damage is Path.unlink or "reference.log: " in caplog.text


def edit_first_line(metrics: Path) -> None:
    metrics.write_text(metrics.read_text().replace("1", "2", 1))


@pytest.mark.parametrize("damage", [edit_first_line, Path.unlink], ids=lambda d: d.__name__)
def test_a_lost_log_costs_the_log_and_not_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    config = copy_of_whole(folder, f"metrics-{damage.__name__}", *AFTER_TWO)
    damage(config.run_dir / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        assert DPOPipeline(config).run() == 0
    assert "metrics.jsonl: is not the file that the checkpoint was saved with" in caplog.text
    lines, tensors, files = left(config, 6)
    expected, *same = left(config_of(folder, "whole"), 6)
    assert lines == [line for line in expected if line["step"] > 2]
    assert_equal(tensors, same[0])
    assert files == same[1]
