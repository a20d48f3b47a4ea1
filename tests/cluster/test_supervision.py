"""If ranks are lost the job starts again, and ends as if nothing had happened; what would come
again ends it."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from rather import errors
from rather.checkpoint.checkpoint import LATEST
from rather.cluster import supervision
from rather.cluster.health import Failure, Limit, StackSnapshot
from rather.cluster.launch import Roles, launch
from rather.cluster.process import Process
from rather.cluster.rank_warnings import RankWarnings
from rather.cluster.supervision import Peers, Supervision, Watchdog
from rather.cluster.worker import ActorWorker
from rather.commands.terminal import guarded
from rather.config.run_config import DPOConfig
from rather.config.schema import Timeouts
from rather.errors import DataError, HangError, RatherError, WorkerError, WorkerLost
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.compare import assert_same
from tests.cluster.test_orphans import SOON, holding, of_the_run, started, wait_for
from tests.faults import inject
from tests.runs import incidents
from tests.tiny import make_config

# --- torchrun's store ---


class CountedStore:
    """Counts the requests of torchrun's store, which answers one after the other."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def served_store(monkeypatch: pytest.MonkeyPatch, world: int) -> Any:
    """Return the server of a store as torchrun has it, for this process as rank 0 of `world`."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**place, "WORLD_SIZE": str(world), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which a test may kill; its end is not collected before the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7592: Connection reset by peer."


@pytest.mark.defect("U17")
def test_a_killed_rank_is_the_first_cause_under_torchrun(
    other: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other rank only notices that a connection broke."""
    _server = served_store(monkeypatch, 2)
    monkeypatch.setattr(supervision, "end_with_others", lambda: None)
    monkeypatch.setattr(supervision, "GRACE", 0.5)
    peers = Peers(10.0)
    peers.rank, here = 1, Process.this()
    peers.write("process", asdict(replace(here, pid=other.pid, started=started_at(other.pid))))

    def step() -> int:
        other.kill()
        assert wait_for(lambda: stat_of(other.pid)[0] == "Z", 10)
        raise RuntimeError(GLOO)

    with pytest.raises(SystemExit) as ended:
        supervision.report_first_failure(step)
    assert ended.value.code == WorkerError.exit_code
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"rather: rank 1 of 2 (on {here.machine}): its process died (signal 9).")


def test_warnings_of_other_ranks_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _server = served_store(monkeypatch, 4)
    own, *others = (RankWarnings(Peers(10.0).store, rank, 4) for rank in range(4))

    def warn(handler: RankWarnings, text: str, level: int = logging.WARNING) -> None:
        handler.handle(logging.LogRecord("rather.x", level, "", 0, text, (), None))

    for handler in others:
        warn(handler, "slow disk")
        warn(handler, "said by all")
    warn(own, "said by all")
    caplog.set_level("INFO", "rather")
    own.log_those_of_others()
    warn(others[2], "memory is short")
    own.log_those_of_others()
    own.log_those_of_others()
    assert caplog.messages == ["rank 1 of 4: slow disk", "rank 3 of 4: memory is short"]


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def started_at(pid: int) -> str:
    return stat_of(pid)[19]


@pytest.mark.defect("X18")
def test_a_rank_ends_with_torchrun_before_it_has_imported_anything() -> None:
    """Importing torch takes up to a minute on a busy machine; the kernel does not wait for it."""
    rank = "import rather.__main__ as m, sys, time; m.end_with_torchrun(); print('ready', flush=True); time.sleep(60)"
    agent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {rank!r}]); print(p.pid, flush=True); p.wait()"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True, env=environment
    ) as torchrun:
        assert torchrun.stdout
        lines = [torchrun.stdout.readline(), torchrun.stdout.readline()]
        assert "ready\n" in lines
        pid = next(int(line) for line in lines if line.strip().isdigit())
        torchrun.kill()
    assert wait_for(lambda: not Path(f"/proc/{pid}").exists(), SOON)


def test_a_process_of_a_device_ends_with_the_driver(other: subprocess.Popen[bytes]) -> None:
    """Also if the driver is killed: nothing may hold a device."""
    code = (
        "import sys, time; from rather.cluster.process import Process, end_with_others; "
        "end_with_others(Process(*sys.argv[1:2], int(sys.argv[2]), *sys.argv[3:])); "
        "print('ready', flush=True); time.sleep(60)"
    )
    driver = replace(Process.this(), pid=other.pid, started=started_at(other.pid))
    given = [driver.machine, str(driver.pid), driver.started, driver.kernel]
    with subprocess.Popen(
        [sys.executable, "-c", code, *given], stdout=subprocess.PIPE, text=True
    ) as device:
        assert device.stdout
        assert device.stdout.readline() == "ready\n"
        assert device.poll() is None
        other.kill()
        assert device.wait(SOON) == 1


@pytest.mark.defect("R6")
def test_a_hang_report_takes_a_few_requests_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait 6 s for it; with requests for each pair of processes 1,024 took 464 s."""
    world = 24
    _server = served_store(monkeypatch, world)
    peers = Peers(10.0)
    there = asdict(Process("machine", 1 << 30, "never", "another kernel"))
    waits = asdict(StackSnapshot("actor_train.train_step", 99.0, "a.py:1", None, ""))
    for rank in reversed(range(world)):
        peers.rank = rank
        peers.write("process", there)
        peers.write("snapshot", waits)
    counted = CountedStore(peers.store)
    peers.store = counted
    watchdog = Watchdog(Timeouts(), tmp_path, world, None, peers=peers)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        watchdog.end(Limit(1.0, "step"), "actor_train")
    assert f"actor_train rank 0 of {world} (on machine): no answer" in capsys.readouterr().err
    assert counted.requests < 2 * world


# --- the count ---


class Losses:
    """A supervision whose pauses and incidents are kept, in a run folder whose checkpoints a test
    makes."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.pauses: list[float] = []
        self.noted: list[tuple[Any, ...]] = []
        self.config = make_config(folder, **changes)
        self.counted = Supervision(
            self.config.run_dir,
            self.config.max_failures,
            self.config.failure_backoff,
            self._note,
            lambda: 7,
            self.pauses.append,
        )

    def _note(self, *known: Any, **_: Any) -> None:
        self.noted.append(known)

    def lose(self, error: WorkerError | HangError) -> None:
        self.counted.survive(error, "worker_lost", "all start again")

    def save(self, number: int) -> None:
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        (self.config.run_dir / LATEST).write_text(f"checkpoint-{number}\n")
        os.utime(self.config.run_dir / LATEST, ns=(number, number))


def test_failures_in_a_row_are_survived_up_to_max_failures_with_doubled_pauses(
    tmp_path: Path,
) -> None:
    run = Losses(tmp_path, max_failures=2, failure_backoff=3.0)
    run.lose(WorkerLost("gone"))
    run.lose(HangError("late"))
    with pytest.raises(WorkerLost, match="gone again"):
        run.lose(WorkerLost("gone again"))
    assert run.pauses == [3.0, 6.0]
    assert run.noted == [("worker_lost", 7), ("hang", 7), ("worker_lost", 7)]


def test_a_new_checkpoint_resets_the_count(tmp_path: Path) -> None:
    run = Losses(tmp_path, max_failures=1, failure_backoff=1.0)
    for number in range(1, 4):
        run.lose(WorkerLost("gone"))
        run.save(number)
    run.lose(WorkerLost("gone"))
    assert run.pauses == [1.0] * 4
    with pytest.raises(WorkerLost):
        run.lose(WorkerLost("gone"))


@pytest.mark.parametrize("given", [True, False, "auto", "elsewhere/checkpoint-3"])
def test_a_run_resumes_from_its_own_checkpoint_and_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: bool | str
) -> None:
    run = Losses(tmp_path, resume_from_checkpoint=given, overwrite=given is False)
    named = given == "elsewhere/checkpoint-3"
    resumed = run.config.resumed(has_saved=run.counted.has_saved)
    assert resumed.resume_from_checkpoint == (given if named else "auto")
    assert not resumed.overwrite
    run.save(1)
    resumed = run.config.resumed(has_saved=run.counted.has_saved)
    assert resumed.resume_from_checkpoint == "auto"


KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RatherError)
]
FINAL = [kind for kind in KINDS if kind not in (WorkerLost, HangError)]


def test_only_lost_processes_and_connections_are_lost_workers() -> None:
    def kind(error: Exception) -> type[Exception]:
        return type(Failure.of(error).error(""))

    assert kind(RuntimeError("[gloo] Connection closed by peer")) is WorkerLost
    assert kind(TypeError("f() takes no arguments")) is WorkerError
    assert not issubclass(kind(torch.OutOfMemoryError("CUDA out of memory.")), WorkerLost)
    assert [kind(each("told by a worker")) for each in KINDS] == KINDS


# --- the run ---


class Lossy(ActorWorker):
    """Is lost in its third step, as often as is left."""

    left: ClassVar[list[Exception]] = []
    signals: ClassVar[list[int]] = []  # that come before
    steps = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.left and self.steps == 3:
            for number in self.signals:
                os.kill(os.getpid(), number)
            raise self.left.pop()
        return super().train_step(*args, **kwargs)


class RanksHere:
    """In the place of ranks on Ray: the program runs in this process."""

    is_running = False

    def run(self, program: Any, stop: Any) -> int:
        self.is_running = True
        try:
            return int(program(stop))
        finally:
            self.is_running = False

    def restart(self) -> None: ...


@pytest.fixture
def replaceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trains can be started again, as ranks on Ray can."""
    ranks: Any = RanksHere()

    def launched(config: DPOConfig, **options: Any) -> Roles:
        roles = launch(config, **options)
        if not ranks.is_running:
            roles.ranks = ranks
        return roles

    monkeypatch.setattr("rather.pipeline.pipeline.launch", launched)
    monkeypatch.setattr(Lossy, "left", [])
    monkeypatch.setattr(Lossy, "signals", [])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, pairs and tokens for many short runs."""
    return tmp_path_factory.mktemp("prepared")


def lossy(folder: Path, name: str, **changes: Any) -> DPOConfig:
    given = {"max_steps": 6, "save_steps": 4, "logging_steps": 3, "failure_backoff": 0.0, **changes}
    return make_config(folder, exp_name=name, actor_train__worker_cls=f"{__name__}.Lossy", **given)


@pytest.mark.usefixtures("replaceable")
def test_a_run_with_lost_workers_ends_as_one_without(tmp_path: Path) -> None:
    clean, struck = lossy(tmp_path, "clean"), lossy(tmp_path, "struck", overwrite=True)
    assert DPOPipeline(clean).run() == 0
    Lossy.left.extend([WorkerLost("once"), HangError("twice"), WorkerLost("thrice")])
    assert DPOPipeline(struck).run() == 0
    assert [(each["kind"], each["step"], each["loss"]) for each in incidents(struck)] == [
        ("worker_lost", 0, 1),  # before the first checkpoint
        ("hang", 0, 2),
        ("worker_lost", 0, 3),
    ]
    assert_same(clean, struck)


@pytest.mark.usefixtures("replaceable")
def test_one_lost_worker_too_many_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    Lossy.left.extend([WorkerLost("second"), WorkerLost("first")])
    config = lossy(tmp_path, "ended", max_failures=1)
    with pytest.raises(WorkerLost, match="second") as lost:
        DPOPipeline(config).run()
    assert lost.value.exit_code == 5
    assert [each["cause"] for each in incidents(config)] == ["first", "second"]


@pytest.mark.usefixtures("replaceable")
@pytest.mark.parametrize("kind", [DataError, WorkerError])
def test_failures_that_would_recur_end_the_run_at_once(
    prepared: Path, kind: type[RatherError]
) -> None:
    Lossy.left.extend([kind("it would come again")] * 2)
    config = lossy(prepared, kind.__name__)
    with pytest.raises(kind, match="it would come again"):
        DPOPipeline(config).run()
    assert len(Lossy.left) == 1
    assert not (config.run_dir / "incidents.jsonl").exists()


@pytest.mark.usefixtures("replaceable")
def test_workers_are_not_replaced_after_a_stop_request(tmp_path: Path) -> None:
    Lossy.left.extend([WorkerLost("gone")] * 2)
    Lossy.signals.append(signal.SIGTERM)
    with pytest.raises(WorkerLost, match="gone"):
        DPOPipeline(lossy(tmp_path, "stopped")).run()
    assert len(Lossy.left) == 1


# --- on Ray ---

KILL = "step=3,phase=forward,role=reference,kind=kill"
MORE_FAULTS = (
    "step=2,phase=backward,role=actor_train,kind=hang;"
    "step=4,phase=optimizer,role=actor_train,kind=kill"
)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("faults", [KILL, pytest.param(MORE_FAULTS, marks=pytest.mark.wide)])
def test_after_a_lost_rank_the_job_restarts_and_the_result_has_the_same_bits(
    tmp_path: Path, faults: str
) -> None:
    changes: dict[str, Any] = {
        "max_steps": 5,
        "save_steps": 2,
        "logging_steps": 3,
        "failure_backoff": 0.0,
    }
    changes |= {"timeouts": {"step": 20.0}, "reference__cache": {"enabled": False}}
    clean = make_config(tmp_path, exp_name="clean", **changes)
    assert DPOPipeline(clean).run() == 0
    struck = make_config(
        tmp_path, exp_name="struck", reference__device_mapping=[1], overwrite=True, **changes
    )
    with inject.attached(faults, struck.run_dir, ray=True):
        assert DPOPipeline(struck).run() == 0
    found = [(each["kind"], each["step"], each["loss"]) for each in incidents(struck)]
    causes = [each["cause"] for each in incidents(struck)]
    if faults == KILL:
        assert found == [("worker_lost", 2, 1)]
        assert re.match(r"rank 1 of 2 \(device 1 on .+\): its process died", causes[0])
    else:
        assert found == [("hang", 0, 1), ("worker_lost", 2, 1)]
        assert "no answer within 20 s (timeouts.step): " in causes[0]
        assert re.match(r"rank 0 of 2 \(device 0 on .+\): its process died", causes[1])
    assert_same(clean, struck)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_bad_data_that_a_worker_finds_ends_the_run_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = "tests.cluster.workers.FindsBadData"
    config = make_config(tmp_path, reference__device_mapping=[1], actor_train__worker_cls=worker)
    assert guarded(lambda: DPOPipeline(config).run()) == DataError.exit_code
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"rather: actor_train rank 0 of 1 \(.+\): pair 7 has no token that is scored", told
    )
    assert not (config.run_dir / "incidents.jsonl").exists()


GONE = {
    "gcs_server": "rather: Ray is gone: its server at 127.0.0.1:",
    "raylet": "rather: lost workers cannot be replaced: ",
}


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("part", GONE)
def test_a_run_that_lost_ray_reports_it_and_resumes(tmp_path: Path, part: str) -> None:
    clean = make_config(tmp_path, exp_name="clean", max_steps=5, save_steps=2, logging_steps=1)
    assert DPOPipeline(clean).run() == 0
    marker, struck = f"gone-{part}-{os.getpid()}", make_config(tmp_path)
    fault = inject.plugin("step=5,phase=backward,role=actor_train,kind=hang", struck.run_dir)
    steps = ("max_steps=5", "save_steps=2")
    driver = started(tmp_path, marker, "ray", *steps, f"--import={fault}")

    def stands_still() -> bool:
        return (
            any(struck.run_dir.glob(".faults/*kind=hang"))
            and (struck.run_dir / "checkpoint-4").exists()
        )

    assert wait_for(lambda: stands_still() or driver.poll() is not None, 200)
    assert driver.poll() is None, driver.stderr and driver.stderr.read()
    (pid,) = [pid for pid, line in of_the_run(marker).items() if line.split()[0].endswith(part)]
    os.kill(pid, signal.SIGKILL)
    _, said = driver.communicate(timeout=100)
    (told,) = [line for line in said.splitlines() if line.startswith("rather: ")]
    assert told.startswith(GONE[part])
    assert driver.returncode == 5, said
    assert wait_for(lambda: not holding(marker), SOON), holding(marker)
    again = started(tmp_path, marker, "ray", "max_steps=5", "save_steps=2")
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert "checkpoint-4 from step 4 of 5" in said
    assert_same(clean, struck)
