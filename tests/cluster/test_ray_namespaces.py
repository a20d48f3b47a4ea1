"""Three machines, as namespaces, on Ray: a driver without devices, the policy's and the reference's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from rather.config.schema import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.namespaces import Machine, machines, why_not
from tests.house.source import ROOT
from tests.tiny import make_config, metrics

pytestmark = [pytest.mark.wide, pytest.mark.slow]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Each machine has a network of its own, so these are free. Ray would wait 15 s for agents to
# choose them, which a busy machine misses.
PORTS = {
    "metrics-export-port": 20001, "dashboard-agent-grpc-port": 20002,
    "dashboard-agent-listen-port": 20003, "runtime-env-agent-port": 20004,
}  # fmt: skip
ON_RAY: dict[str, Any] = {
    "num_nodes": 2,
    "num_gpus_per_node": 2,
    "actor_train__device_mapping": [0, 1],
    "reference__device_mapping": [2, 3],
    "timeouts": {"connect": 90.0},
}
REPORTED = 60.0  # seconds in which a cut link is reported


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    values: dict[str, Any] = {
        "train_batch_size": 12,
        "max_steps": 4,
        "save_steps": 2,
        "actor_train__training_args": {
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "num_train_epochs": 100_000,
        },
        "actor_train__max_tokens_per_microbatch_in_train": 64,
    }
    return make_config(folder, exp_name=name, **{**values, **changes})


class RayMachines:
    """A head without devices, on which drivers run, and machines of two CPU workers each."""

    def __init__(self, made: list[Machine]) -> None:
        self.head, *self.workers = made
        self.address = f"{self.head.address}:6379"
        self.nodes: dict[str, subprocess.Popen[str]] = {}

    def start(self, machine: Machine) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        command += [f"--node-ip-address={machine.address}", "--object-store-memory=100000000"]
        command += [f"--{name}={port}" for name, port in PORTS.items()]
        if machine is self.head:
            command += ["--head", "--port=6379", "--include-dashboard=false"]
            command += [f"--temp-dir={machine.private}/ray"]
        else:
            command += [f"--address={self.address}", '--resources={"rather_slot": 2}']
        self.nodes[machine.name] = machine.start(command, ENVIRONMENT, ROOT)

    def kill(self, machine: Machine) -> None:
        node = self.nodes.pop(machine.name)
        node.kill()
        node.wait(30)

    def train(self, config: DPOConfig, folder: Path) -> subprocess.Popen[str]:
        file = folder / f"{config.exp_name}.yaml"
        file.write_text(dump_yaml(config))
        command = [sys.executable, "-m", "rather", "train", str(file), "--address", self.address]
        return self.head.start(command, ENVIRONMENT, ROOT)


@contextmanager
def ray_machines() -> Iterator[RayMachines]:
    if reason := why_not():
        pytest.skip(reason)
    private = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # the path of a socket must be short
    try:
        with machines(3, private) as made:
            found = RayMachines(made)
            try:
                for each in made:
                    found.start(each)
                yield found
            finally:
                for node in found.nodes.values():
                    node.kill()
    finally:
        shutil.rmtree(private, ignore_errors=True)


def wait_for(
    condition: Callable[[], object], seconds: float, driver: subprocess.Popen[str]
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < end, f"nothing within {seconds} s"
        time.sleep(0.1)


def losses(config: DPOConfig) -> list[float]:
    file = config.run_dir / "metrics.jsonl"
    return [line["loss"] for line in metrics(config) if "loss" in line] if file.exists() else []


def finish(driver: subprocess.Popen[str], seconds: float = 400) -> str:
    said = driver.communicate(timeout=seconds)[1]
    assert driver.returncode == 0, said
    return str(said)


def test_machines_train_as_one_process_and_a_killed_one_is_replaced_with_the_same_bits(
    tmp_path: Path,
) -> None:
    alone, whole = config_of(tmp_path, "alone"), config_of(tmp_path, "whole", **ON_RAY)
    long: dict[str, Any] = {"max_steps": 12, "save_steps": 2, **ON_RAY}
    calm, broken = (config_of(tmp_path, name, **long) for name in ("calm", "broken"))
    assert DPOPipeline(alone).run() == 0
    with ray_machines() as machine:
        finish(machine.train(whole, tmp_path))
        assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
        finish(machine.train(calm, tmp_path))
        driver = machine.train(broken, tmp_path)
        wait_for(lambda: len(losses(broken)) >= 5, 300, driver)
        victim = machine.workers[0]
        machine.kill(victim)
        machine.start(victim)
        finish(driver)
    assert losses(broken) == losses(calm)
    incidents = (broken.run_dir / "incidents.jsonl").read_text()
    assert "_lost" in incidents
    one, other = (
        (config.run_dir / "model" / "model.safetensors").read_bytes() for config in (calm, broken)
    )
    assert one == other


def test_a_cut_link_is_reported_within_a_minute_with_the_name_of_the_machine(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "cut", max_steps=100_000, **ON_RAY)
    with ray_machines() as machine:
        driver = machine.train(config, tmp_path)
        wait_for(lambda: len(losses(config)) >= 3, 300, driver)
        victim = machine.workers[0]
        victim.cut()
        began = time.monotonic()
        incidents = config.run_dir / "incidents.jsonl"
        wait_for(incidents.exists, 2 * REPORTED, driver)
        assert time.monotonic() - began < REPORTED
        assert victim.name in incidents.read_text()
        driver.kill()
