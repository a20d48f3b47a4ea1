"""Checkpoints are written in the background: same bits, and a kill costs one save at most."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, ShardSpec
from rather.cluster import writer
from rather.errors import DiskError, NonFiniteError
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.saving import Saving
from tests.at_step import AtStep
from tests.checkpoint.runs import config_of, fill_disk, finish
from tests.runs import saved_steps

LONG = 60.0  # seconds after which a test has failed


class Gate:
    """Holds every writer of checkpoint-2 back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.in_time = True
        leave = checkpoint.leave_note

        def leave_note(folder: Path, *args: Any) -> None:
            if "checkpoint-2-" in folder.name:
                self.reached.set()
                self.in_time = self.opened.wait(LONG)
            leave(folder, *args)

        monkeypatch.setattr(checkpoint, "leave_note", leave_note)


def test_training_continues_during_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer waits for the fourth step, which could not come if training waited for the writer."""
    gate = Gate(monkeypatch)

    class Opens(AtStep):
        def before(self, step: int) -> None:
            if step == 4:
                assert gate.reached.wait(LONG)
                assert not (self.config.run_dir / "checkpoint-2").exists()
                gate.opened.set()

    changes = {"checkpoint_config__async_save": "on", "actor_train__worker_cls": Opens}
    config = config_of(folder, "beside", **changes)
    finish(folder, config)
    assert gate.in_time
    assert saved_steps(config.run_dir) == [2, 4, 6]


def test_off_blocks_during_a_save(folder: Path) -> None:
    class Looks(AtStep):
        def before(self, step: int) -> None:
            if step == 3:
                assert (self.config.run_dir / "checkpoint-2" / "manifest.json").exists()

    changes = {"checkpoint_config__async_save": "off", "actor_train__worker_cls": Looks}
    finish(folder, config_of(folder, "off", **changes))


@pytest.mark.parametrize(("free", "way"), [(1 << 20, "off"), (1 << 40, "on")])
def test_auto_depends_on_host_memory(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    way: str,
) -> None:
    monkeypatch.setattr(writer, "free_memory", lambda: free)
    with caplog.at_level(logging.INFO):
        finish(folder, config_of(folder, f"auto-{way}"))
    assert caplog.text.count(f"async_save: auto is {way}") == 1


def test_a_moving_reference_is_saved_as_it_was(folder: Path) -> None:
    """Both models write at the same time, and the reference moves right after the save was begun."""
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    key = "checkpoint_config__async_save"
    ways = {
        way: config_of(folder, f"moving-{way}", **{key: way}, **moving) for way in ("on", "off")
    }
    for config in ways.values():
        assert DPOPipeline(config).run() == 0
    for step in (2, 4, 6):
        one, other = (
            checkpoint.open_checkpoint(each.run_dir / f"checkpoint-{step}")
            for each in ways.values()
        )
        for group in ("model", "optimizer", "reference"):
            first, second = one.tensors(group), other.tensors(group)
            assert first.keys() == second.keys()
            assert all(first[key].equal(second[key]) for key in first)


class Fails(AtStep):
    """Its third step goes wrong."""

    def before(self, step: int) -> None:
        if step == 3:
            raise NonFiniteError("no number")


def test_a_run_that_fails_finishes_its_save(folder: Path) -> None:
    config = config_of(
        folder, "fails", checkpoint_config__async_save="on", actor_train__worker_cls=Fails
    )
    with pytest.raises(NonFiniteError):
        DPOPipeline(config).run()
    assert checkpoint.open_checkpoint(config.run_dir / "checkpoint-2").step == 2


def test_a_bug_in_the_thread_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(checkpoint, "prune", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        DPOPipeline(config_of(folder, "bug", checkpoint_config__async_save="on")).run()


@pytest.mark.parametrize("way", ["on", "off"])
def test_a_writer_that_cannot_even_leave_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The disk has become read-only: nobody waits for the note until timeouts.save."""
    is_over, answers = Saving._is_over, list[bool]()

    def asked(saving: Saving) -> bool:
        answers.append(is_over(saving))
        return answers[-1]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint, "write_groups", refuse)
    monkeypatch.setattr(checkpoint, "leave_note", refuse)
    monkeypatch.setattr(Saving, "_is_over", asked)
    changes = {"checkpoint_config__async_save": way, "timeouts": {"save": LONG}}
    config = config_of(folder, f"mute-{way}", **changes)
    with pytest.raises(DiskError, match="actor_train-00000 has not written its part"):
        DPOPipeline(config).run()
    assert answers[-1], "the deadline ended it"


def test_silent_writers_are_named(tmp_path: Path) -> None:
    checkpoint.leave_note(tmp_path, "actor_train-00000", {"a": (1, "b")})
    with pytest.raises(OSError, match="actor_train-00001 has not written its part"):
        checkpoint.collect_parts(
            tmp_path, ["actor_train-00000", "actor_train-00001"], 0.1, lambda: False
        )


def two_writers(draft: checkpoint.Draft, way: str) -> checkpoint.Written:
    """Each writes half of a tensor, which is changed as soon as the writer has taken it."""
    for rank in range(2):
        half = torch.full((4,), float(rank))
        own = writer.Writer("actor_train", rank, 2, way, logging.getLogger("test"))
        own.write(draft.folder, {"model": {"w": Shard(half, ShardSpec((8,), (4 * rank,), (4,)))}})
        half.fill_(9.0)
    return checkpoint.collect_parts(
        draft.folder, ["actor_train-00000", "actor_train-00001"], LONG, lambda: False
    )


@pytest.mark.parametrize("way", ["on", "off"])
def test_ranks_write_their_shards_and_notes(tmp_path: Path, way: str) -> None:
    draft = checkpoint.Draft(tmp_path, 1, 0)
    path = draft.complete(lambda: two_writers(draft, way), {})
    names = {
        "manifest.json",
        "state.json",
        "model-00000-00001.safetensors",
        "model-00001-00001.safetensors",
    }
    assert {file.name for file in path.iterdir()} == names
    assert checkpoint.open_checkpoint(path).tensors("model")["w"].tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("way", ["on", "off"])
def test_a_rank_with_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fill_disk(monkeypatch, "*/model-00001-00001.safetensors")
    draft = checkpoint.Draft(tmp_path, 1, 0)
    with pytest.raises(
        DiskError, match=r"could not be written \(actor_train-00001: No space left on device\)"
    ):
        draft.complete(lambda: two_writers(draft, way), {})
    assert not list(tmp_path.iterdir())
