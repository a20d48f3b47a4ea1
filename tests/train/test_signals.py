"""SIGTERM and SIGINT end in a complete checkpoint, and the resumed run has the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rather.checkpoint.checkpoint import newest_good, open_checkpoint
from rather.cluster.worker import ActorWorker
from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.errors import Ended
from rather.pipeline.hook import Hooks
from rather.pipeline.hooks import EndRun, SaveCheckpoints
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.progress import Progress, RunState
from rather.pipeline.requests import Requests
from rather.pipeline.steps import Step
from rather.pipeline.timeline import Timeline
from rather.run_folder.control import STOPS, StopRequest
from rather.tracking.run import NoTracker
from tests.runs import assert_same, saved_steps, steps
from tests.tiny import in_child, make_config, metrics

POLICY = "actor_train"
RUN: dict[str, Any] = {
    "max_steps": 6,
    "save_steps": 5,
    "eval_steps": 4,  # and at 0, after an epoch of five steps, and at the end: three chunks each
    "logging_steps": 3,
    "actor_train__training_args__num_train_epochs": 2.0,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, no_self_check: None) -> None:
    monkeypatch.setattr("rather.pipeline.evaluation.EVALUATION_CHUNK", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("signals")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("rather.pipeline.evaluation.EVALUATION_CHUNK", 4)
        assert DPOPipeline(config_of(found, "whole")).run() == 0
    return found


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return make_config(folder, exp_name=name, **{**RUN, **changes})


def ask_in(
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    method: str,
    call: int,
    number: int,
    cls: type = ActorWorker,
) -> None:
    """The given call of a worker's method sends this process a signal before it does its work."""
    original, calls = getattr(cls, method), iter(range(1, 1000))

    def asking(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.role == role and next(calls) == call:
            os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, method, asking)


def run_asked(config: DPOConfig, method: str, call: int, number: int, role: str = POLICY) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        ask_in(monkeypatch, role, method, call, number)
        return DPOPipeline(config).run()


PHASES = {
    "evaluation before the first step": (POLICY, "compute_log_probs", 2, 0),
    "evaluation": (POLICY, "compute_log_probs", 5, 4),
    "last evaluation": (POLICY, "compute_log_probs", 11, 6),
    "reference": ("reference", "compute_log_probs", 5, 2),
    "reference in an evaluation": ("reference", "compute_log_probs", 2, 0),
    "training": (POLICY, "train_step", 3, 3),
    "saving": (POLICY, "write_state", 1, 6),
    "last save": (POLICY, "write_state", 2, 6),
}


CASES = [(phase, signal.SIGTERM) for phase in PHASES] + [
    (phase, signal.SIGINT) for phase in ("evaluation", "training")
]


@pytest.mark.parametrize(("phase", "number"), CASES)
def test_a_signal_ends_in_a_checkpoint(folder: Path, phase: str, number: signal.Signals) -> None:
    role, method, call, step = PHASES[phase]
    name = f"{phase}-{number}".replace(" ", "-")
    config = config_of(folder, name, reference__cache__path=str(folder / "caches" / name))
    assert run_asked(config, method, call, number, role) == 128 + number
    assert saved_steps(config.run_dir)[-1] == step
    assert open_checkpoint(config.run_dir / f"checkpoint-{step}").step == step
    assert not (config.run_dir / "model").exists()
    assert DPOPipeline(config).run() == 0
    assert_same(config, config_of(folder, "whole"))


def test_an_evaluation_stops_at_its_next_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, chunks = config_of(folder, "prompt"), iter(range(100))
    original = ActorWorker.compute_log_probs

    def counted(self: ActorWorker, *args: Any) -> Any:
        if self.role == "actor_train" and next(chunks) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(ActorWorker, "compute_log_probs", counted)
    assert DPOPipeline(config).run() == 143
    assert next(chunks) == 1
    assert metrics(config) == []


def test_early_stopping_by_an_interrupted_evaluation(folder: Path) -> None:
    """The open log line is written after it, with numbers of the step before the signal."""
    constant = {"early_stopping_patience": 1, "metric_for_best_model": "eval/pairs"}
    whole, config = (config_of(folder, name, **constant) for name in ("early-whole", "early"))
    assert DPOPipeline(whole).run() == 0
    assert [line["step"] for line in steps(whole)] == [3, 4]
    assert run_asked(config, "compute_log_probs", 5, signal.SIGTERM) == 143
    assert DPOPipeline(config).run() == 0
    kept = ("step", "loss", "grad_norm", "lr", "pairs", "tokens", "eval/loss", "skipped_iter")
    first, second = (
        [{key: line.get(key) for key in kept} for line in metrics(each)] for each in (whole, config)
    )
    assert first == second
    weights = [
        (each.run_dir / "model" / "model.safetensors").read_bytes() for each in (whole, config)
    ]
    assert weights[0] == weights[1]


def test_a_signal_during_the_export_comes_after_the_end(folder: Path) -> None:
    config = config_of(folder, "export")
    assert run_asked(config, "save_model", 1, signal.SIGTERM) == 143
    assert_same(config, config_of(folder, "whole"))
    assert DPOPipeline(config).run() == 0


def test_sigusr1_saves_and_continues(folder: Path) -> None:
    config = config_of(folder, "usr1")
    assert run_asked(config, "train_step", 2, signal.SIGUSR1) == 0
    assert saved_steps(config.run_dir) == [2, 5, 6]
    assert_same(config, config_of(folder, "whole"))


def _twice(folder: Path, first: int, second: int) -> int:
    step = ActorWorker.train_step

    def asking(self: ActorWorker, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        self.done = getattr(self, "done", 0) + 1
        if self.done == 6:  # after the checkpoint of step 5
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), second)
        return result

    ActorWorker.train_step = asking  # type: ignore[method-assign] # of this process, which ends here
    with (folder / "twice.err").open("w") as told:
        os.dup2(told.fileno(), 2)
        sys.stderr = told
        name = f"twice-{first}-{second}"
        return DPOPipeline(config_of(folder, name, checkpoint_config__async_save="off")).run()


@pytest.mark.parametrize(("first", "second"), [(15, 15), (15, 2), (2, 15), (2, 2)])
def test_a_second_signal_quits_immediately(folder: Path, first: int, second: int) -> None:
    assert in_child(_twice, folder, first, second) == 128 + second
    assert (
        "second signal: quitting immediately; the last checkpoint is step 5"
        in (folder / "twice.err").read_text()
    )
    assert saved_steps(folder / "output" / f"twice-{first}-{second}") == [5]


def _before(folder: Path, place: str, number: int) -> int:
    from rather import cli
    from rather.commands.terminal import guarded
    from rather.data import prepare
    from rather.pipeline import pipeline
    from rather.run_folder import control

    places = {
        "data": (prepare._Builder, "_address"),
        "told": (pipeline, "print_report"),
        "model": (ActorWorker, "initialize"),
    }
    owner, name = places[place]
    original = getattr(owner, name)

    def asking(*args: Any) -> Any:
        (folder / "holder").write_text(str(control.holder(config.run_dir)))
        os.kill(os.getpid(), number)
        return original(*args)

    setattr(owner, name, asking)
    file = folder / "before.yaml"
    config = config_of(
        folder,
        f"before-{place}-{int(number)}",
        actor_train__data_args__cache_dir=str(folder / place),
    )
    file.write_text(dump_yaml(config))
    with (folder / "before.err").open("w") as told:
        os.dup2(told.fileno(), 2)
        return guarded(lambda: cli.train_from_config(file, []))


ENDS = [("data", signal.SIGTERM), ("told", signal.SIGTERM), ("model", signal.SIGINT)]


@pytest.mark.parametrize(("place", "number"), ENDS)
def test_a_signal_before_loading_keeps_the_prepared_data(
    folder: Path, place: str, number: int
) -> None:
    assert in_child(_before, folder, place, number) == 128 + number
    told = (folder / "before.err").read_text()
    assert "stopped before training began. Prepared pairs are kept in the data cache" in told
    assert "Traceback" not in told
    assert newest_good(folder / "output" / f"before-{place}-{int(number)}") is None
    assert bool(list((folder / place).glob("*.arrow"))) == (
        place != "data"
    )  # the pairs in hand are read again


@pytest.mark.parametrize("place", ["data", "told", "model"])
def test_a_save_requested_before_training_follows_the_first_step(folder: Path, place: str) -> None:
    """And the folder belongs to the run meanwhile: other shells can speak to it."""
    assert in_child(_before, folder, place, signal.SIGUSR1) == 0
    assert saved_steps(folder / "output" / f"before-{place}-{int(signal.SIGUSR1)}")[0] == 1
    assert "process" in (folder / "holder").read_text()


def test_a_signal_between_two_agreements_waits_for_the_next() -> None:
    """Else one of several processes would stop while the others go on."""
    stop = StopRequest()
    with stop:
        stop.begin_training()
        asked = stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        stop.agree(asked)
        assert not stop.stops
        assert stop.exit_code == 0
        stop.agree(stop.asked)
        assert (stop.stops, stop.saves, stop.exit_code) == (True, True, 143)
    other = StopRequest()
    other.agree(stop.asked)
    assert (other.signal, other.exit_code) == (signal.SIGTERM, 143)


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequest():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_an_interrupt_forwarded_by_torchrun_is_not_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        stop.begin_training()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == signal.SIGINT


def test_a_signal_already_known_from_other_ranks_is_not_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(
        "rather.run_folder.control.os._exit", lambda code: pytest.fail(f"ended at once with {code}")
    )
    with StopRequest() as stop:
        stop.begin_training()
        stop.agree(STOPS + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 143


def test_two_interrupts_before_training_leave_one_timer() -> None:
    stop, timers = StopRequest(), []

    def interrupted_twice() -> None:
        with stop:
            for _ in range(2):
                with suppress(Ended):
                    os.kill(os.getpid(), signal.SIGINT)
                timers.append(stop._leaving)

    with pytest.raises(Ended):
        interrupted_twice()
    assert timers[0] is timers[1] is not None


class Swallowing:
    """As a library's own object: what is raised while it is taken down reaches nobody."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        signal.getsignal(signal.SIGINT)  # a moment in which the handler runs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("training", [False, True])
def test_an_exit_swallowed_by_a_library_still_happens(training: bool) -> None:
    reached = []

    def run() -> None:
        with StopRequest() as stop:
            Swallowing()
            reached.append("swallowed")
            if training:
                stop.begin_training()
                reached.append("training")

    with pytest.raises(Ended, match="before training began"):
        run()
    assert reached == ["swallowed"]


def test_a_library_that_blocks_forever_does_not_prevent_the_exit() -> None:
    code = "import threading; from rather.run_folder.control import leave_within; leave_within(0.1, 130); threading.Event().wait()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 130


def test_the_exit_timer_stops_if_the_exit_is_caught() -> None:
    with pytest.raises(Ended), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop._leaving is not None
    stop._leaving.join(60)
    assert stop._leaving.finished.is_set()


def compiled_code_that_is_stopped() -> None:
    with StopRequest(patience=None):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Ended as error:
            raise SystemError("returned a result with an exception set") from error


def test_an_error_that_compiled_code_makes_of_a_stop_is_the_stop() -> None:
    """As Ray's does, if a signal comes while it waits."""
    with pytest.raises(Ended) as ended:
        compiled_code_that_is_stopped()
    assert ended.value.exit_code == 143


def while_ray_starts() -> None:
    with StopRequest(patience=None):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_while_ray_starts_is_a_stop() -> None:
    with pytest.raises(Ended, match="SIGTERM: stopped before training began") as ended:
        while_ray_starts()
    assert ended.value.exit_code == 143


@pytest.mark.parametrize(("step", "saves"), [(0, 0), (3, 1)])
def test_a_save_that_another_process_was_asked_for_is_made_by_all(step: int, saves: int) -> None:
    """Before the first step there is nothing to save."""
    taken: list[int] = []
    state = RunState(Progress(step))
    roles: Any = SimpleNamespace(is_main=False, drivers=2)
    result: Any = SimpleNamespace(requests=[1, 0, 0])  # of another rank, from the step's numbers
    saving: Any = SimpleNamespace(save=lambda _state, number, _sync: taken.append(number))
    packing: Any = SimpleNamespace(state=dict)
    stream: Any = SimpleNamespace(keep=lambda: None)
    requests = Requests(None, roles, state)
    timeline, hooks = Timeline(in_turn=True), Hooks()
    hooks.append(EndRun(state, requests, None))
    hooks.append(
        SaveCheckpoints(
            saving, None, state, packing, timeline, requests, stream, NoTracker(), hooks
        )
    )
    hooks.call("after_step", Step([], [], [], number=step), result)
    assert not state.is_over
    assert taken == [step] * saves


def test_of_several_requests_in_one_step_the_largest_applies_to_all() -> None:
    saves, stops, idle = StopRequest(), StopRequest(), StopRequest()
    saves.save_now = True
    stops.end(signal.SIGINT)
    processes = (saves, stops, idle)
    counts = [sum(column) for column in zip(*(each.flags for each in processes), strict=True)]
    assert counts == [1, 0, 1]
    for process in processes:
        process.agree_on(counts)
    assert [each.signal for each in processes] == [signal.SIGINT] * 3
    assert all(each.stops and each.saves for each in processes)
    idle.agree_on([0, 0, 0])
    assert not idle.stops
