"""Every rank on Ray runs the whole program; the driver starts and watches."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rather.cluster.health import Failure
from rather.cluster.memory import Room
from rather.cluster.process import Process
from rather.cluster.rank_output import BEGINS, LOG, STDOUT, RankOutput, pass_on
from rather.cluster.ray_ranks import RayRanks
from rather.cluster.resources import ResourceManager, Seat
from rather.config import plugins
from rather.config.schema import Timeouts
from rather.data.formats import FORMATS
from rather.errors import ConfigError, HangError, WorkerError, WorkerLost
from rather.losses.losses import LOSSES
from rather.losses.own import METRICS
from rather.pipeline.callbacks import CALLBACKS
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.control import StopRequest
from rather.tracking.run import DrawnProgress
from tests.cluster.compare import assert_same
from tests.cluster.test_torchrun import config_of

KERNEL = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
Rank = Callable[[dict[str, str]], int]


class Stub:
    """In the place of Ray and its manager: ranks answer at once, and calls are counted."""

    kind = "cpu"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: Rank, ranks: int = 2) -> None:
        self.calls: Counter[str] = Counter()
        self.asked: list[int] = []
        self.timeouts, self.cut_off, self.stopped = Timeouts(), set[str](), False
        self.output = RankOutput()
        self.mapping = list(range(ranks))
        handle = SimpleNamespace(
            run=SimpleNamespace(remote=lambda *given: Pending(partial(rank, given[0]))),
        )
        here = Process.this()
        self._seats = [
            Seat(handle, "node", "127.0.0.1", here, d, Room("here", d, 1, 0)) for d in self.mapping
        ]
        answered = SimpleNamespace(
            wait=lambda refs, **_: (refs, []),
            get=lambda ref, **_: ref.work() if isinstance(ref, Pending) else ref,
            exceptions=SimpleNamespace(RayError=OSError),
        )
        monkeypatch.setitem(sys.modules, "ray", answered)

    def ask(self, seats: list[Seat], method: str, *args: int) -> list[Any]:
        self.calls[method] += 1
        self.asked += args * len(seats)
        return [self.output.take()]

    def seats(self, *_: Any) -> list[Seat]:
        return self._seats

    def open_store(self, *_: Any) -> tuple[Any, str, int]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return store, store.host, store.port

    def stop(self) -> None:
        self.stopped = True

    def forget_groups(self) -> None: ...
    def refuse_without_ray(self) -> None: ...


class Pending:
    """A result on its way; not compared, as Ray's references are not."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work


def run(stub: Any, stop: StopRequest | None = None) -> int:
    cluster = SimpleNamespace(mapping=stub.mapping, seats=stub.seats())
    ranks = RayRanks(stub, lambda: [cluster])
    return ranks.run(lambda _stop: 0, stop or StopRequest())


def test_ranks_get_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    stub = Stub(monkeypatch, lambda environment: seen.append(environment) or 0)
    assert run(stub) == 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [[each[name] for name in names] for each in seen] == [list("0202"), list("1212")]
    assert len({each["MASTER_PORT"] for each in seen}) == 1
    # One call per job and rank, and one a second for what the first rank logs.
    assert len(seen) == 2
    assert stub.calls["take_output"] <= 3


def agree(environment: dict[str, str], error: Exception, where: str = "") -> None:
    """Store the first cause, as the ranks do."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), wait_for_workers=False
    )
    peers = dist.PrefixStore(f"rather/{environment['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    peers.set("cause", json.dumps([asdict(Failure.of(error)), where]))


def test_the_first_cause_comes_from_the_store_that_outlives_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(environment: dict[str, str]) -> int:
        agree(environment, HangError("rank 1 sleeps"))
        return 7

    stub = Stub(monkeypatch, rank)
    with pytest.raises(HangError, match="rank 1 sleeps"):
        run(stub)
    assert stub.stopped


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray raises is the loss of a rank, and the others have little time to say why."""
    failure = Failure.of(WorkerLost("its process died"))
    monkeypatch.setattr("rather.cluster.resources.failure_of", lambda _: failure)
    monkeypatch.setattr("rather.cluster.ray_ranks.LAST_WORDS", 0.1)


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("noticed", [False, True], ids=["in silence", "another notices"])
def test_the_lost_rank_is_named(monkeypatch: pytest.MonkeyPatch, noticed: bool) -> None:
    def rank(environment: dict[str, str]) -> int:
        if environment["RANK"] == "1":
            raise OSError("killed")
        if noticed:
            agree(environment, RuntimeError("gloo: Connection reset by peer"), "rank 0 of 2")
        return 1

    with pytest.raises(WorkerLost, match=r"^rank 1 of 2 \(device 1 on .+\): its process died"):
        run(Stub(monkeypatch, rank))


@pytest.mark.usefixtures("lost")
@pytest.mark.defect("U17")
@pytest.mark.skipif(KERNEL < (6, 15), reason="this kernel does not keep the exit status")
def test_the_signal_that_ended_a_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray collects the dead process, and its own account has no signal."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])

    def rank(environment: dict[str, str]) -> int:
        if environment["RANK"] == "1":
            other.kill()
            other.wait()
            raise OSError("a connection error code 2. End of file.")
        return 1

    stub = Stub(monkeypatch, rank)
    process = replace(Process.this(), pid=other.pid)
    stub._seats[1] = replace(stub._seats[1], process=process)
    with pytest.raises(
        WorkerLost, match=r"^rank 1 of 2 \(device 1 on .+\): its process died \(signal 9\)\. It"
    ):
        run(stub)


def test_a_signal_is_sent_to_every_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    stop.begin_training()
    stop.end(15)
    stub = Stub(monkeypatch, lambda _: 143)
    assert run(stub, stop) == 143
    assert stub.asked == [15, 15]


def test_a_stopped_run_ends_with_the_code_of_its_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reference apart is asked to end, and knows of no signal."""
    stub = Stub(monkeypatch, lambda environment: 143 if environment["RANK"] == "0" else 0)
    assert run(stub) == 143
    stub = Stub(monkeypatch, lambda environment: 5 if environment["RANK"] == "1" else 0)
    with pytest.raises(WorkerError, match="some ranks ended"):
        run(stub)


def test_what_a_rank_logs_and_prints_arrives_in_order(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rather")
    output = RankOutput()
    output.add(LOG, "rather.x", logging.INFO, "logged")
    print("printed", file=output.stream(STDOUT))
    draw = DrawnProgress().draw
    assert pass_on(output.take(), draw) is False
    output.add(BEGINS)
    assert pass_on(output.take(), draw) is True
    assert capsys.readouterr().out == "printed\n"
    assert "logged" in caplog.text
    assert output.take() == []


@pytest.mark.parametrize("registry", [CALLBACKS, METRICS, LOSSES, FORMATS], ids=lambda it: it.kind)
def test_what_a_script_defines_is_refused_where_ranks_cannot_import_it(
    monkeypatch: pytest.MonkeyPatch, registry: Any
) -> None:
    loss = "mine" if registry is LOSSES else "sigmoid"
    data = SimpleNamespace(data_args=SimpleNamespace(format="mine"))
    used = SimpleNamespace(
        config=SimpleNamespace(actor_train=data, validation=data),
        objective=SimpleNamespace(terms=[SimpleNamespace(name=loss)]),
    )
    refuse: Any = DPOPipeline._refuse_what_cannot_travel
    monkeypatch.setitem(registry._entries, "mine", None)
    monkeypatch.setitem(registry._modules, "mine", "__main__")
    with pytest.raises(ConfigError, match=f"{registry.kind} mine: .* __main__, .+ --import"):
        refuse(used)
    monkeypatch.setattr(plugins, "_loaded", [plugins.ImportedFile("__main__", "")])
    refuse(used)


NAMES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")
STAYS = "MY_DATABASE_PASSWORD"


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Secrets in the environment of this process."""
    values = {name: f"canary-of-{name}" for name in (*NAMES, STAYS)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_listed_secrets_travel_as_an_argument_and_in_no_option(
    canaries: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray shows options, such as runtime_env, to everybody who can read its state."""
    options: list[Any] = []
    arguments: list[Any] = []
    handle = SimpleNamespace(describe=SimpleNamespace(remote=lambda *_: None))
    actor = SimpleNamespace(remote=lambda *given: arguments.append(given) or handle)
    made = SimpleNamespace(options=lambda **given: options.append(given) or actor)
    manager: Any = ResourceManager.__new__(ResourceManager)
    manager.num_gpus_per_node, manager.kind, manager._placed = 2, "cpu", None
    manager.timeouts = Timeouts()
    manager._ray = SimpleNamespace(
        nodes=list, remote=lambda **given: options.append(given) or (lambda _cls: made)
    )
    placed = import_module("ray.util.placement_group")  # a function has the same name
    monkeypatch.setattr(placed, "placement_group_table", lambda _: {"bundles_to_node_id": {}})
    monkeypatch.setattr(manager, "_all", lambda *_: [])
    with pytest.raises(ValueError, match="shorter"):  # nobody has answered
        manager._start((0, 1), {})
    assert len(arguments) == 2
    for environment, *more in arguments:
        sent = {name: value for name, value in environment.items() if "canary" in value}
        assert sent == {name: canaries[name] for name in NAMES}
        assert "canary" not in repr(more)
    assert "canary" not in repr(options)


def test_no_secret_is_in_what_a_rank_sends_to_others(canaries: dict[str, str]) -> None:
    text = f"the environment: {dict(os.environ)}"
    record = logging.LogRecord("rather.x", logging.WARNING, "", 0, text, (), None)
    output = RankOutput()
    output.emit(record)
    print(text, file=output.stream(STDOUT))
    sent = repr((output.take(), Failure.of(ValueError(text))))
    assert sent.count("the environment") > 3
    for value in canaries.values():
        assert value not in sent


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.usefixtures("local_ray")
def test_a_killed_rank_restarts_the_job_from_the_checkpoint(tmp_path: Path) -> None:
    """The reference on its own device is killed in the third step; the bits are those of one."""
    alone = config_of(tmp_path, "alone")
    assert DPOPipeline(alone).run() == 0
    apart = config_of(
        tmp_path,
        "apart",
        actor_train__device_mapping=[0],
        reference__device_mapping=[1],
        reference__worker_cls="tests.cluster.workers.DiesOnce",
        system_envs={"RATHER_TEST_ONCE": str(tmp_path / "once")},
        failure_backoff=0,
    )
    assert DPOPipeline(apart).run() == 0
    assert (tmp_path / "once").exists()
    incidents = (apart.run_dir / "incidents.jsonl").read_text()
    assert "worker_lost" in incidents
    assert_same(alone, apart)
