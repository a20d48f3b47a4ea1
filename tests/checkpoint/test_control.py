"""`rather stop` and `rather save-now` from another shell, and who holds a run folder."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.worker import ActorWorker
from rather.config.load import dump_yaml
from rather.errors import WorkerError
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder import control
from tests.checkpoint.runs import config_of
from tests.commands.conftest import exits
from tests.runs import saved_steps
from tests.tiny import _quietly, fork_context

LONG = 120.0  # seconds after which a test has failed
ENDLESS = {"max_steps": 100_000, "save_steps": None, "eval_steps": None, "logging_steps": 50}


def left(run_dir: Path) -> list[str]:
    """Return the files of requests that are left in a run folder."""
    return sorted(
        path.name for pattern in (".control*", ".taken*") for path in run_dir.glob(pattern)
    )


def _endless(folder: Path, begun: Event) -> int:
    step = ActorWorker.train_step

    def announcing(self: ActorWorker, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        return step(self, *args, **kwargs)

    ActorWorker.train_step = announcing  # type: ignore[method-assign] # of this process, which is made for it
    changes = {**ENDLESS, "actor_train__training_args__num_train_epochs": 1e5}
    return DPOPipeline(config_of(folder, "endless", **changes)).run()


@pytest.fixture
def running(folder: Path) -> Iterator[multiprocessing.Process]:
    """Start an endless run in a separate process; its first step has begun."""
    context = fork_context()
    begun = context.Event()
    child = context.Process(target=_quietly, args=(_endless, folder, begun))
    child.start()
    assert begun.wait(LONG)
    yield child  # type: ignore[misc]
    child.kill()
    child.join()


def test_a_run_saves_and_stops_on_request(folder: Path, running: multiprocessing.Process) -> None:
    config = config_of(folder, "endless")
    host = socket.gethostname()
    assert control.holder(config.run_dir) == f"process {running.pid} on {host}"
    saved = exits(0, "save-now", config.run_dir, "--timeout", LONG)
    (step,) = saved_steps(config.run_dir)
    assert open_checkpoint(config.run_dir / f"checkpoint-{step}").step == step
    assert (
        f"process {running.pid} on {socket.gethostname()}: waiting until it finishes its step"
        in saved
    )
    assert f"has saved and continues; its newest checkpoint is step {step}" in saved
    file = folder / "endless.yaml"
    file.write_text(dump_yaml(config))
    stopped = exits(0, "stop", file, "--timeout", LONG)
    running.join()
    assert running.exitcode == 143
    assert saved_steps(config.run_dir)[-1] > step
    assert f"has ended; its newest checkpoint is step {saved_steps(config.run_dir)[-1]}" in stopped
    assert not left(config.run_dir)


def test_no_run_and_no_active_run(folder: Path, tmp_path: Path) -> None:
    nothing = exits(2, "stop", tmp_path / "nothing")
    assert "no such run; pass its folder or its YAML file" in nothing
    ended = exits(2, "save-now", folder / "output" / "whole")
    assert "no run is active there; start it with rather train" in ended


def test_a_killed_run_is_not_active(tmp_path: Path) -> None:
    """Its lock is gone; its name in the file is not."""
    (tmp_path / ".lock").write_text(f"process 1 on {socket.gethostname()}\n")
    assert control.holder(tmp_path) is None


def test_a_run_on_another_machine_is_asked_through_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 7 on elsewhere\n")
    assert control.holder(tmp_path) == "process 7 on elsewhere"
    reported: list[str] = []
    with pytest.raises(
        WorkerError, match=r"not done within 0 s \(--timeout\).*process 7 on elsewhere"
    ):
        control.ask(tmp_path, control.STOP, timeout=0.0, report=reported.append)
    assert reported == ["process 7 on elsewhere: waiting until it finishes its step"]
    assert not left(tmp_path)


def test_a_run_that_dies_before_it_answers(tmp_path: Path) -> None:
    with control.lock(tmp_path):
        pass
    (tmp_path / ".lock").write_text("process 7 on elsewhere\n")
    with pytest.raises(WorkerError, match="process 7 on elsewhere ended before that"):
        control.ask(
            tmp_path,
            control.SAVE,
            timeout=LONG,
            report=lambda _: (tmp_path / ".lock").write_text(""),
        )


class Asker(threading.Thread):
    """Another shell, whose request is in the folder."""

    def __init__(self, run_dir: Path, word: str) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.word, self.asked, self.reported = run_dir, word, threading.Event(), ""
        self.start()
        assert self.asked.wait(LONG)

    def run(self) -> None:
        control.ask(self.run_dir, self.word, timeout=LONG, report=self.report)

    def report(self, text: str) -> None:
        self.reported = text
        self.asked.set()


def test_a_stop_request_during_a_save_is_not_lost(tmp_path: Path) -> None:
    with control.lock(tmp_path):
        saves = Asker(tmp_path, control.SAVE)
        assert control.take_requests(tmp_path, 1) == control.SAVE
        stops = Asker(tmp_path, control.STOP)
        (tmp_path / "LATEST").write_text("checkpoint-1\n")
        saves.join(LONG)
        assert saves.reported.endswith("has saved and continues; its newest checkpoint is step 1")
        assert control.take_requests(tmp_path, 2) == control.STOP
    stops.join(LONG)
    assert "has ended" in stops.reported
    assert not left(tmp_path)


def test_each_of_several_requests_at_once_is_answered(tmp_path: Path) -> None:
    """A stop also saves."""
    with control.lock(tmp_path):
        askers = [Asker(tmp_path, word) for word in (control.SAVE, control.STOP, control.SAVE)]
        assert control.take_requests(tmp_path, 4) == control.STOP
        assert control.take_requests(tmp_path, 4) is None
        (tmp_path / "LATEST").write_text("checkpoint-4\n")
    for asker in askers:
        asker.join(LONG)
        assert asker.reported.endswith("its newest checkpoint is step 4")
    assert not left(tmp_path)


def test_a_request_is_taken_once_and_an_unknown_one_never(tmp_path: Path) -> None:
    assert control.take_requests(tmp_path, 3) is None
    (tmp_path / ".control-save-1").touch()
    assert control.take_requests(tmp_path, 3) == control.SAVE
    assert left(tmp_path) == [".taken-1-3"]
    assert control.take_requests(tmp_path, 4) is None
    (tmp_path / ".control-explode").touch()
    assert control.take_requests(tmp_path, 5) is None


def test_a_request_for_a_run_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / ".control-stop-1").touch()
    (tmp_path / ".taken-2-7").touch()
    with control.lock(tmp_path):
        assert control.take_requests(tmp_path, 0) is None
        assert not left(tmp_path)
