"""Three machines, as namespaces, on Ray: one without devices, on which the driver runs, and two of
two CPU workers each. They train as one process does, and survive or report what breaks them."""

from __future__ import annotations

import random
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.compare import assert_close, assert_same
from tests.cluster.namespaces import ANSWERS, Machine, machines, wait_until
from tests.cluster.test_torchrun import config_of
from tests.faults import inject
from tests.runs import incidents

# Alone: with other tests beside them, the nodes do not start within the deadlines of Ray.
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.alone]

# As `ray start`, but with a port of an agent that is known before it starts, as
# rather.cluster.resources.known_ports does: a busy machine would miss Ray's deadline.
NODE = """
import inspect, sys
from ray import _raylet
from ray._private import services
from ray.scripts.scripts import main

start = services.start_raylet

def start_raylet(*args, **options):
    given = inspect.signature(start).bind(*args, **options).arguments
    place = given["session_dir"], given["node_id"], _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME
    _raylet.persist_port(*place, given["dashboard_agent_listen_port"])
    return start(*args, **options)

services.start_raylet = start_raylet
sys.argv[1:1] = [
    "start", "--block", "--num-cpus=0", "--object-store-memory=100000000",
    "--include-log-monitor=false",
]
main()
"""
# Each machine has a network of its own, so these are free.
PORTS = {
    "metrics-export-port": 20001, "dashboard-agent-grpc-port": 20002,
    "dashboard-agent-listen-port": 20003, "runtime-env-agent-port": 20004,
}  # fmt: skip
PATIENCE = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "400"}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
WHOLE: dict[str, Any] = {"actor_train__device_mapping": [0, 1, 2, 3]}
APART: dict[str, Any] = {
    "actor_train__device_mapping": [0, 1], "reference__device_mapping": [2, 3],
}  # fmt: skip
STEPS = 8
REPORTED = 60.0  # seconds in which a cut link is reported


class RayMachines:
    """A head without devices, on which drivers run, and machines of two CPU workers each."""

    def __init__(self, made: list[Machine]) -> None:
        self.head, *self.workers = made
        self.address = f"{self.head.address}:6379"
        self.broken: list[Machine] = []
        self.drivers: list[subprocess.Popen[str]] = []
        self.join(self.head)
        wait_until(self._head_is_there, ANSWERS)
        for each in self.workers:  # three that start at once may miss Ray's deadlines
            self.join(each)

    @property
    def names(self) -> list[list[str]]:
        return [[each.name] for each in self.workers]

    def join(self, machine: Machine) -> None:
        given = [f"--{name}={port}" for name, port in PORTS.items()]
        given += [f"--node-ip-address={machine.address}"]
        if machine is self.head:
            given += ["--head", "--port=6379", "--include-dashboard=false"]
            given += [f"--temp-dir={machine.private}/ray"]
        else:
            given += [f"--address={self.address}", '--resources={"rather_slot": 2}']
        until = ["sh", "-c", 'until "$@"; do :; done', "sh"]  # on a busy machine Ray may give up
        command = [*until, sys.executable, "-c", NODE, *given]
        machine.start(command, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **PATIENCE, **TOKEN)

    def _head_is_there(self) -> bool:
        raylet_log = f"{self.head.private}/ray/session_latest/logs/raylet.out"
        return self.head.start(["test", "-s", raylet_log]).wait() == 0

    def replace(self, machine: Machine) -> None:
        machine.power_off()
        machine.mend()
        machine.boot()
        self.join(machine)

    def train(self, config: DPOConfig, fault: str = "") -> subprocess.Popen[str]:
        file = Path(config.logging_dir).parent / f"{config.exp_name}.yaml"
        file.write_text(dump_yaml(config))
        command = [sys.executable, "-m", "rather", "train", str(file), "--address", self.address]
        if fault:
            command.append(f"--import={inject.plugin(fault, config.run_dir)}")
        self.drivers.append(self.head.start(command, **TOKEN))
        return self.drivers[-1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayMachines]:
    with machines(3) as made:
        yield RayMachines(made)


@pytest.fixture
def on(cluster: RayMachines) -> Iterator[RayMachines]:
    yield cluster
    for driver in cluster.drivers:
        driver.kill()  # if the test failed
    while cluster.broken:
        cluster.replace(cluster.broken.pop())


def run_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    on_ray: dict[str, Any] = {
        "num_nodes": 2, "num_gpus_per_node": 2, "timeouts": {"connect": 240.0},
        "failure_backoff": 0.0, "logging_steps": 1, "max_steps": STEPS,
    }  # fmt: skip
    return config_of(folder, name, **{**on_ray, **changes})


def finish(driver: subprocess.Popen[str]) -> str:
    said = str(driver.communicate(timeout=ANSWERS)[1])
    assert driver.returncode == 0, said
    return said


def refused(driver: subprocess.Popen[str], code: int) -> str:
    said = str(driver.communicate(timeout=ANSWERS)[1])
    assert driver.returncode == code, said
    (line,) = [line for line in said.splitlines() if line.startswith("rather: ")]
    return line


def at_fault(config: DPOConfig) -> bool:
    return any((config.run_dir / inject.MARKERS).glob("*kind=hang"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    """A run in one process."""
    config = config_of(tmp_path_factory.mktemp("alone"), "alone", max_steps=STEPS)
    assert DPOPipeline(config).run() == 0
    return config


@pytest.fixture(scope="module")
def clean(cluster: RayMachines, tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    """A run of four ranks that nothing breaks."""
    config = run_of(tmp_path_factory.mktemp("clean"), "clean", **WHOLE)
    said = finish(cluster.train(config))
    names = placed(said, "actor_train")
    assert names in (2 * one + 2 * other for one, other in permutations(cluster.names))
    return config


def placed(said: str, role: str) -> list[str]:
    """Return the machine of each device, as the driver reports it."""
    *_, line = re.findall(rf"{role}: .+; (device \d on .+)", said)
    return re.findall(r"device \d on ([^,]+)", line)


def test_two_machines_of_two_ranks_train_as_one_process(alone: DPOConfig, clean: DPOConfig) -> None:
    assert_close(alone, clean)


def test_roles_on_different_machines_train_as_one_process(
    on: RayMachines, alone: DPOConfig, tmp_path: Path
) -> None:
    apart = run_of(tmp_path, "apart", **APART)
    said = finish(on.train(apart))
    names = [placed(said, role) for role in ("actor_train", "reference")]
    assert sorted(names) == [2 * each for each in on.names]
    assert_close(alone, apart)


def like(clean: DPOConfig, name: str, **changes: Any) -> DPOConfig:
    """The same run in another folder."""
    return clean.model_copy(update={"exp_name": name, **changes})


def test_a_machine_that_is_lost_at_a_random_step_is_replaced_with_the_same_bits(
    on: RayMachines, clean: DPOConfig
) -> None:
    draw = random.Random(0)
    step, victim = draw.randint(2, STEPS), draw.choice(on.workers)
    struck = like(clean, "struck")
    driver = on.train(struck, f"step={step},phase=backward,role=actor_train,rank=0,kind=hang")
    wait_until(lambda: at_fault(struck), ANSWERS, driver)
    on.replace(victim)
    finish(driver)
    assert_same(clean, struck)
    [found] = incidents(struck)
    assert found["kind"] == "worker_lost"
    assert f"on {victim.name})" in found["cause"]


def test_a_cut_link_is_reported_within_a_minute_with_the_name_of_the_machine(
    on: RayMachines, clean: DPOConfig
) -> None:
    config, victim = like(clean, "cut", max_failures=0), on.workers[1]
    driver = on.train(config, "step=3,phase=backward,role=actor_train,rank=0,kind=hang")
    wait_until(lambda: at_fault(config), ANSWERS, driver)
    victim.cut()
    on.broken.append(victim)
    assert wait_until(lambda: incidents(config), 2 * REPORTED, driver) < REPORTED
    line = refused(driver, 5)
    # By the driver or by a rank, whoever is first.
    assert re.search(rf"{victim.name}\b.* has not answered for 30 s \(timeouts\.link\)", line)


def test_a_machine_whose_disk_is_full_is_named(on: RayMachines, clean: DPOConfig) -> None:
    """Ray's own files are on it: its processes do not start. What the run writes is shared."""
    full, victim = like(clean, "full"), on.workers[0]  # never replaced without a run after it
    on.broken.append(victim)
    fill = f"cat /dev/zero > {victim.private}/filler || true"
    victim.run("sh", "-c", fill)
    line = refused(on.train(full), 5)
    assert re.search(rf"device \d on {victim.name}: could not start .+ room for its logs", line)


def test_a_folder_that_a_machine_does_not_share_is_refused_with_its_name(
    on: RayMachines, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "output_dir": str(on.head.private / "output_dir"),
        "actor_train__data_args__cache_dir": str(tmp_path / "cache"),
    }
    line = refused(on.train(run_of(tmp_path, "apart", **WHOLE, **changes)), 2)
    assert "is not a folder that all machines share" in line
    # The first rank has made it on its machine, so the other one is named.
    assert sum(each.name in line for each in on.workers) == 1, line
