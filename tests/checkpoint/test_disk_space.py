"""A full disk costs a checkpoint, not the run, unless it costs too many or the last one."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint import checkpoint
from rather.commands.terminal import guarded
from rather.config.load import dump_yaml
from rather.errors import DiskError
from rather.pipeline.pipeline import DPOPipeline
from tests.at_step import AtStep
from tests.checkpoint.runs import config_of, fill_disk, finish, train
from tests.house.source import ROOT
from tests.runs import assert_same, incidents, saved_steps
from tests.train.test_signals import ask_in


@pytest.mark.parametrize("file", ["optimizer-00001.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("way", ["on", "off"])
def test_a_missed_save_is_logged_and_the_next_one_tried(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    file: str,
) -> None:
    config = config_of(folder, f"missed-{way}-{file}", checkpoint_config__async_save=way)
    fill_disk(monkeypatch, f"*checkpoint-2-*/{file}")
    with caplog.at_level(logging.WARNING):
        finish(folder, config)
    (missed,) = incidents(config)
    assert (missed["kind"], missed["step"], missed["in_a_row"]) == ("missed_save", 2, 1)
    assert "No space left on device" in missed["reason"]
    assert "MISSED SAVE at step 2, 1 in a row of at most 3" in caplog.text
    assert " bytes and " in caplog.text
    assert saved_steps(config.run_dir) == [4, 6]
    assert not list(config.run_dir.glob(".tmp*"))


@pytest.mark.parametrize("way", ["on", "off"])
def test_too_many_in_a_row_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    changes = {
        "checkpoint_config__max_missed_saves": 2,
        "checkpoint_config__async_save": way,
        "save_steps": 1,
    }
    config = config_of(folder, f"too-many-{way}", **changes)
    fill_disk(monkeypatch, "*checkpoint-[!1]-*/state.json")
    with pytest.raises(
        DiskError, match=r"checkpoint-3: could not be written \(No space left on device\)"
    ):
        DPOPipeline(config).run()
    assert [line["in_a_row"] for line in incidents(config)] == [1, 2]
    assert saved_steps(config.run_dir) == [1]
    monkeypatch.undo()
    finish(folder, config)  # with room again it goes on from what was saved


def test_the_last_save_must_not_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, "last")
    fill_disk(monkeypatch, "*checkpoint-6-*/manifest.json")
    with pytest.raises(DiskError, match="checkpoint-6"):
        DPOPipeline(config).run()
    assert saved_steps(config.run_dir) == [2, 4]
    assert not (config.run_dir / "model").exists()


def test_the_save_of_a_signal_must_not_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, "asked")
    with monkeypatch.context() as patched:
        fill_disk(patched, "*checkpoint-3-*/state.json")
        ask_in(patched, "actor_train", "train_step", 3, signal.SIGTERM)
        assert guarded(DPOPipeline(config).run) == 9
    assert [(line["kind"], line["step"]) for line in incidents(config)] == [("missed_save", 3)]
    assert saved_steps(config.run_dir) == [2]
    finish(folder, config)


def test_too_little_disk_space_is_found_before_the_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size of the checkpoint before, nothing is begun that cannot end well."""
    config = config_of(folder, "before")
    usage, begun, needs = shutil.disk_usage(folder), checkpoint.Draft, list[int]()

    def begin(run_dir: Path, step: int, needed: int) -> Any:
        needs.append(needed + (1 << 20))
        free = usage.free if step != 4 else needs[-1] - 1
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        return begun(run_dir, step, needed)

    monkeypatch.setattr(checkpoint, "Draft", begin)
    assert DPOPipeline(config).run() == 0
    (missed,) = incidents(config)
    assert missed["step"] == 4
    assert "the disk is too full" in missed["reason"]
    assert f"needs {needs[1]:,} bytes and {needs[1] - 1:,} are free" in missed["reason"]
    assert saved_steps(config.run_dir) == [2, 6]


def test_a_copy_that_fails_does_not_touch_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = folder / "copies" / "copied"
    config = config_of(folder, "copied", checkpoint_config__output_dir=str(folder / "copies"))
    fill_disk(monkeypatch, f"{copies}/*checkpoint-4-*")
    finish(folder, config)
    (missed,) = incidents(config)
    assert (missed["step"], missed["folder"]) == (4, str(copies))
    assert (saved_steps(config.run_dir), saved_steps(copies)) == ([2, 4, 6], [2, 6])
    assert not list(copies.glob(".tmp*"))


def test_metrics_waiting_for_disk_space_prevent_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rather.tracking.json_lines import MetricsFile

    config, position = config_of(folder, "waiting"), MetricsFile.position

    def full(file: MetricsFile) -> int:
        if (file.path.parent / "checkpoint-4").exists() or not (
            file.path.parent / "checkpoint-2"
        ).exists():
            return position(file)
        if incidents(config):
            return position(file)
        raise DiskError("metrics.jsonl: cannot be written (No space left on device)")

    monkeypatch.setattr(MetricsFile, "position", full)
    assert train(folder, "waiting") == 0
    assert [line["step"] for line in incidents(config)] == [4]
    assert saved_steps(config.run_dir) == [2, 6]


SMALL_DISK = """
import sys, torch
from pathlib import Path
from rather.checkpoint import checkpoint
from rather.errors import DiskError
from tests.checkpoint.saving import save_checkpoint
run = Path(sys.argv[1]) / "run"
save_checkpoint(run, 1, {"model": {"w": torch.ones(1 << 20)}}, {})
for needed in (30 << 20, 0):  # seen before the first byte, and not seen
    try:
        draft = checkpoint.Draft(run, 2, needed)
        draft.complete(lambda: checkpoint.write_groups(draft.folder, {"model": {"w": torch.ones(8 << 20)}}), {})
    except DiskError as error:
        print(error)
found = checkpoint.newest_good(run)
print(found.step, sorted(path.name for path in run.iterdir()))
"""


def on_a_small_disk(disk: Path, command: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A shell command, in a namespace where the folder is a disk of twenty megabytes."""
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=20m none {disk}"
    unshare = shutil.which("unshare")
    if (
        not unshare
        or subprocess.run(
            [unshare, "-Urm", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this machine lets nobody mount a file system of their own")
    whole = [unshare, "-Urm", "sh", "-c", f"{mount} && {command}", sys.executable, *args]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_disk_of_twenty_megabytes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = on_a_small_disk(disk, f'exec "$0" -c "$1" {disk}', SMALL_DISK)
    assert done.returncode == 0, done.stderr
    before, during, left = done.stdout.splitlines()
    assert "checkpoint-2: could not be written (the disk is too full)" in before
    assert "checkpoint-2: could not be written (No space left on device)" in during
    assert left == "1 ['LATEST', 'checkpoint-1']"


class Filling(AtStep):
    """Somebody else fills the disk of the run in step 2, and removes it all in step 5."""

    def before(self, step: int) -> None:
        filler = Path(self.config.output_dir) / "filler"
        if step == 2:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if step == 5:
            filler.unlink()


def test_a_whole_run_whose_disk_is_full_for_a_while(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    own = {"output_dir": str(disk), "logging_dir": str(disk / "logs"), "track_with": "tensorboard"}
    own["actor_train__worker_cls"] = "tests.checkpoint.test_disk_space.Filling"
    config = config_of(folder, "crowded", **own)
    file = tmp_path / "crowded.yaml"
    file.write_text(dump_yaml(config))
    command = f'"$0" -m rather train {file}; code=$?; cp -r {disk} {tmp_path / "after"}; exit $code'
    done = on_a_small_disk(disk, command)
    assert done.returncode == 0, done.stderr
    failed = "metrics.jsonl: cannot be written (No space left on device)"
    assert f"{failed}; new lines are kept in memory" in done.stderr
    after = config_of(folder, "crowded", output_dir=str(tmp_path / "after"))
    assert saved_steps(after.run_dir) == [6]
    assert_same(after, config_of(folder, "whole"))
