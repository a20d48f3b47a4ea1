"""However a run ends, nothing that holds a model, a device or a port outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rather.config.load import dump_yaml
from tests.house.source import ROOT
from tests.tiny import make_config

pytestmark = pytest.mark.slow

SOON, AT_LAST = 15, 90  # seconds; Ray's own agents linger for up to a minute
AGENTS = ("DashboardAgent", "RuntimeEnvAgent", "dashboard/agent.py", "runtime_env/agent")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
ON_RAY = ["reference.device_mapping=[1]"]
LAUNCHERS = ["ray", "torchrun"]


def of_the_run(marker: str) -> dict[int, str]:
    """Processes whose environment carries the marker of this run: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (
                marker.encode() in (entry / "environ").read_bytes()
                and (entry / "stat").read_text().split()[2] != "Z"
            ):
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        except OSError:
            continue  # it has just ended
    return found


def holding(marker: str) -> dict[int, str]:
    return {
        pid: line
        for pid, line in of_the_run(marker).items()
        if not any(agent in line for agent in AGENTS)
    }


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.2)
    return True


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, float]]:
    """When each run ended. 90 seconds later nothing at all is left of it: looked at together, after
    the last one."""
    moments: dict[str, float] = {}
    yield moments
    for marker, moment in moments.items():
        left = moment + AT_LAST - time.monotonic()
        assert wait_for(lambda marker=marker: not of_the_run(marker), left), of_the_run(marker)


def assert_nothing_holds(marker: str, ended: dict[str, float]) -> None:
    ended[marker] = time.monotonic()
    assert wait_for(lambda: not holding(marker), SOON), holding(marker)


def started(folder: Path, marker: str, launcher: str, *overrides: str) -> subprocess.Popen[str]:
    config = make_config(folder, max_steps=100_000, logging_steps=1)
    file = folder / "dpo.yaml"
    file.write_text(dump_yaml(config))
    own = (
        ON_RAY
        if launcher == "ray"
        else ["actor_train.device_mapping=[0,1]", "reference.device_mapping=[0,1]"]
    )
    given = [*own, "actor_train.training_args.num_train_epochs=100000", *overrides]
    environment = {**os.environ, "RATHER_TEST_MARKER": marker, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *(TORCHRUN if launcher == "torchrun" else []), "rather", "train", str(file), *given],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # Ignored in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def is_training(folder: Path) -> bool:
    file = folder / "output" / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return any(json.loads(line).get("step", 0) >= 3 for line in lines[:-1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_outlives_a_killed_driver(
    tmp_path: Path, ended: dict[str, float], launcher: str
) -> None:
    marker = f"killed-{launcher}-{os.getpid()}"
    driver = started(tmp_path, marker, launcher)
    assert wait_for(lambda: is_training(tmp_path) or driver.poll() is not None, 200)
    assert driver.poll() is None, driver.stderr and driver.stderr.read()
    assert len(holding(marker)) >= (5 if launcher == "ray" else 3)  # driver, two workers, Ray's own
    driver.kill()
    driver.wait()
    assert_nothing_holds(marker, ended)


MOMENTS = {"workers": "ray::Host", "torchrun": " -u -m rather train"}


@pytest.mark.wide
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_outlives_an_interrupt_during_the_start(
    tmp_path: Path, ended: dict[str, float], moment: str
) -> None:
    marker = f"interrupted-{moment}-{os.getpid()}"
    driver = started(tmp_path, marker, "torchrun" if moment == "torchrun" else "ray")
    assert wait_for(
        lambda: any(MOMENTS[moment] in line for line in of_the_run(marker).values()), 200
    )
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
    _, said = driver.communicate(timeout=100)
    assert_nothing_holds(marker, ended)
    assert driver.returncode == 130 or moment == "torchrun", said  # which has codes of its own


def test_nothing_outlives_an_exception_in_one_rank(tmp_path: Path, ended: dict[str, float]) -> None:
    marker = f"raised-{os.getpid()}"
    driver = started(
        tmp_path, marker, "torchrun", "actor_train.worker_cls=tests.cluster.workers.BreaksLater"
    )
    _, said = driver.communicate(timeout=200)
    assert driver.returncode == 1, said  # torchrun's own
    assert_nothing_holds(marker, ended)
    (told,) = [line for line in said.splitlines() if line.startswith("rather: ")]
    assert told.startswith("rather: actor_train rank 1 of 2 (")
    assert told.endswith("ValueError: boom at step 3")
