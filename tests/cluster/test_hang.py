"""A call that does not end: the rank that holds the others up is named, and all processes end, in
time."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rather.cluster.cluster import Cluster
from rather.cluster.health import Limit, Pulse, StackSnapshot, blame, hang_error
from rather.cluster.resources import ResourceManager
from rather.cluster.supervision import (
    CHECK_EVERY,
    PAUSE,
    Supervision,
    Watchdog,
    report_first_failure,
)
from rather.config.run_config import DPOConfig
from rather.config.schema import Timeouts
from rather.errors import HangError
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.layout import Incidents
from tests.cluster.test_orphans import wait_for
from tests.cluster.test_torchrun import config_of, torchrun
from tests.cluster.workers import stand_still
from tests.tiny import fork_context, make_config, metrics

DEADLINE = 2.0  # seconds
AT_ONCE = Timeouts(start=DEADLINE, first_step=1.0, step=1.0, eval=1.0, save=1.0)
HERE = r"workers.py:\d+, stand_still"
WHY = {
    "stop": r"its process does not answer at all: it is stopped, or stuck outside Python",
    "sleep": rf"it is in {HERE}, and others wait for it in all_reduce \({HERE}\)",
    "mismatch": rf"it is in recv \({HERE}\), others in all_reduce \({HERE}\)",
}


# --- who it is ---


def doing(place: str, collective: str | None = None) -> StackSnapshot:
    return StackSnapshot("actor_train.train_step", 9.0, place, collective, "")


def named(*snapshots: StackSnapshot | None) -> tuple[str, str]:
    return blame({str(rank): snapshot for rank, snapshot in enumerate(snapshots)})


def test_the_blamed_rank_is_unresponsive_or_outside_the_collective_or_alone() -> None:
    reduces, gathers, sleeps = doing("a", "all_reduce"), doing("b", "all_gather"), doing("c")
    assert named(reduces, sleeps, None)[0] == "2"
    assert named(reduces, sleeps, gathers) == (
        "1",
        "it is in c, and others wait for it in all_reduce (a)",
    )
    assert named(gathers, reduces, reduces) == (
        "0",
        "it is in all_gather (b), others in all_reduce (a)",
    )
    assert named(reduces, gathers) == ("1", "it is in all_gather (b), others in all_reduce (a)")
    assert named(doing("a"), doing("a"), doing("c")) == ("2", "it is in c, others in a")
    assert named(reduces, reduces)[1] == "it is in all_reduce (a), and so are all 2 ranks"
    assert named(sleeps) == ("0", "it is in c")


def test_a_snapshot_names_the_call_the_line_and_the_collective() -> None:
    pulse = Pulse()
    seen: list[StackSnapshot] = []

    def from_another_thread() -> None:
        seen.append(pulse.snapshot())

    with pulse.during("reference.plan"):
        other = threading.Thread(target=from_another_thread)
        other.start()
        other.join()
    assert (seen[0].call, seen[0].collective) == ("reference.plan", None)
    assert re.fullmatch(r"test_hang.py:\d+, test_a_snapshot_names_.+", seen[0].place)
    assert "thread MainThread (works):\n" in seen[0].stacks
    assert "in test_a_snapshot_names_" in seen[0].stacks
    assert pulse.call == "nothing"


def test_the_report_makes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    error = hang_error({"actor_train rank 0": None}, {}, Limit(1.0, "step"), folder)
    assert str(next(folder.glob("hang-*.txt"))) in str(error)


# --- on Ray ---


@pytest.fixture
def manager() -> Iterator[ResourceManager]:
    made = ResourceManager(1, 3, timeouts=Timeouts(start=120.0))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_on_ray_it_is_named_and_all_processes_end(manager: ResourceManager, tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        actor_train__device_mapping=[0, 1],
        reference__device_mapping=[2],
        system_envs={"RATHER_TEST_HANG": "stop"},
    )
    path = "tests.cluster.workers.StandsStill"
    Cluster("reference", path, manager, config.reference, pipeline_config=config)
    policy = Cluster("actor_train", path, manager, config.actor_train, pipeline_config=config)
    processes = [seat.process for seats in manager.named.values() for seat in seats]
    manager.timeouts = AT_ONCE
    with pytest.raises(HangError) as hang:
        policy.initialize(1)
    assert all(process.is_gone for process in processes)
    said = re.fullmatch(
        rf"actor_train rank 1 of 2 \(device 1 on .+\): no answer within 2 s \(timeouts.start\): {WHY['stop']}. "
        r"The stacks of all ranks are in (.+)\.",
        str(hang.value),
    )
    assert said, hang.value
    stacks = Path(said[1]).read_text()
    assert Path(said[1]).parent == config.log_dir
    assert re.search(
        r"== actor_train rank 0 of 2 .+: actor_train.initialize for \d+ s\nthread .+\(works\)",
        stacks,
    )
    assert re.search(r"== reference rank 0 of 1 .+: nothing for \d+ s", stacks)
    assert "dist.all_reduce(torch.ones(1))" in stacks


# --- under torchrun ---


def in_a_rank(
    config: DPOConfig, rank: int, port: int, how: str, meeting: Path, stderr: Path
) -> None:
    """One of two processes that torchrun might have started; the test holds torchrun's store."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT="0"
    )
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    sys.stderr = stderr.open("w")
    report_first_failure(lambda: held_up(config, rank, how, meeting, stderr))


def held_up(config: DPOConfig, rank: int, how: str, meeting: Path, stderr: Path) -> int:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    supervision = Supervision(config.run_dir, 3, 10.0, Incidents(config.run_dir).add, lambda: 5)
    watchdog = Watchdog(config.timeouts, config.log_dir, 2, supervision)
    watchdog.start()
    with watchdog.during("actor_train.train_step", "step"):
        stand_still(how, rank, 2)
    return 0


def started(*args: Any) -> Any:
    context = fork_context()
    child = context.Process(target=in_a_rank, args=args, daemon=True)
    child.start()
    return child


@pytest.mark.parametrize("how", ["sleep", "mismatch"])
def test_under_torchrun_one_watchdog_names_it_and_all_processes_end(
    tmp_path: Path, how: str
) -> None:
    config = make_config(tmp_path, timeouts={"step": DEADLINE})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = [tmp_path / f"stderr-{rank}" for rank in range(2)]
    children = [
        started(config, rank, store.port, how, tmp_path / "meeting", said[rank])
        for rank in range(2)
    ]
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [7, 7]
    (told,) = [line for file in said for line in file.read_text().splitlines()]
    where = r"rather: actor_train rank 1 of 2 \(on .+\): no answer within 2 s \(timeouts.step\)"
    assert re.match(rf"{where}: {WHY[how]}. The stacks of all ranks are in ", told), told
    (incident,) = map(json.loads, (config.run_dir / "incidents.jsonl").read_text().splitlines())
    assert (incident["kind"], incident["step"]) == ("hang", 5)


@pytest.mark.wide
@pytest.mark.slow
def test_under_torchrun_the_same_command_resumes_after_a_hang(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "again",
        actor_train__device_mapping=[0, 1],
        actor_train__worker_cls="tests.cluster.workers.StopsOnce",
        timeouts={"step": 5.0},
    )
    done = torchrun(config, 2)
    assert done.returncode != 0
    assert done.stderr.count("rather: actor_train rank 1 of 2 ") == 1
    assert WHY["stop"] in done.stderr
    assert "forcefully exiting" not in done.stderr  # torchrun would wait for half a minute
    done = torchrun(config, 2)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-2 from step 2 of 4" in done.stderr
    assert [line["step"] for line in metrics(config) if "loss" in line] == [1, 2, 3, 4]


# --- in one process ---


def alone(config: DPOConfig, stderr: Path) -> int:
    sys.stderr = stderr.open("w")
    pipeline = DPOPipeline(config)
    pipeline.roles.watch()
    return pipeline.run()


def test_one_process_ends_with_its_stacks_and_resumes(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        max_steps=3,
        save_steps=2,
        actor_train__worker_cls="tests.cluster.workers.SleepsLater",
        timeouts={"step": DEADLINE},
    )
    context = fork_context()
    child = context.Process(target=alone, args=(config, tmp_path / "stderr"), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == HangError.exit_code
    said = (tmp_path / "stderr").read_text()
    late = r"rather: actor_train.train_step: no answer within 2 s \(timeouts.step\): "
    assert re.match(late + r"it is in workers.py:\d+, before\.", said), said
    assert "threading.Event().wait()" in said
    assert len(list(config.log_dir.glob("hang-*.txt"))) == 1
    plain = make_config(tmp_path, max_steps=3, save_steps=2)
    assert DPOPipeline(plain).run() == 0
    assert [line["step"] for line in metrics(plain) if "loss" in line] == [1, 2, 3]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_neither_a_breakpoint_nor_a_process_that_was_stopped_is_a_hang(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    os.mkfifo(keys)
    typed = os.open(keys, os.O_RDWR)  # so that nobody waits for the other to open it
    config = make_config(
        tmp_path,
        max_steps=3,
        actor_train__worker_cls="tests.cluster.workers.Paused",
        timeouts={"step": DEADLINE},
        system_envs={"RATHER_TEST_KEYS": str(keys)},
    )
    context = fork_context()
    child = context.Process(target=alone, args=(config, tmp_path / "stderr"), daemon=True)
    child.start()
    screen = tmp_path / "screen"
    assert wait_for(lambda: screen.exists() and "(Pdb)" in screen.read_text(), 60)
    child.join(DEADLINE + 3 * CHECK_EVERY)  # the watchdog has looked when it was late
    assert child.is_alive()
    os.write(typed, b"continue\n")
    assert wait_for(lambda: state(child.pid) == "T", 60)
    child.join(PAUSE + 2 * CHECK_EVERY)
    os.kill(child.pid, signal.SIGCONT)
    child.join(60)
    os.close(typed)
    assert child.exitcode == 0, (tmp_path / "stderr").read_text()
    assert not (config.run_dir / "incidents.jsonl").exists()
