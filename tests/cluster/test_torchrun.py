"""`torchrun -m rather train`: every process runs the loop, the first writes, the result is that of
one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.report.pairs import read_ledger
from tests.cluster.compare import assert_close, assert_same
from tests.house.source import ROOT
from tests.tiny import make_config

APART: dict[str, Any] = {"actor_train__device_mapping": [0], "reference__device_mapping": [1]}


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    own: dict[str, Any] = {
        "train_batch_size": 12,
        "max_steps": 4,
        "save_steps": 2,
        "actor_train__training_args": {
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "num_train_epochs": 3,
        },
        "actor_train__max_tokens_per_microbatch_in_train": 64,
    }
    return make_config(folder, exp_name=name, **{**own, **changes})


def torchrun(
    config: DPOConfig, processes: int, *overrides: str, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    file = Path(config.output_dir).parent / "dpo.yaml"
    file.write_text(dump_yaml(config))
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    launcher += [f"--max-restarts={restarts}"]
    command = [sys.executable, *launcher, "-m", "rather", "train", str(file), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_resume(tmp_path: Path) -> None:
    alone = config_of(tmp_path, "alone")
    assert DPOPipeline(alone).run() == 0
    both = config_of(tmp_path, "both", actor_train__device_mapping=[0, 1])
    for steps in (2, 4):  # the second start reads the first one's checkpoint
        done = torchrun(both, 2, f"max_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert "zero2 on 2 devices: dp 2" in done.stderr
    assert_close(alone, both, "grad_norm")
    rows, same = (read_ledger(each.run_dir).to_pydict() for each in (alone, both))
    assert same.pop("id") == rows.pop("id")
    for name, values in rows.items():
        assert same[name] == pytest.approx(values, rel=1e-6, abs=1e-6), name


@pytest.mark.slow
def test_a_wrong_number_of_processes_is_reported_once(
    tmp_path: Path,
) -> None:
    done = torchrun(config_of(tmp_path, "wrong", actor_train__device_mapping=[0, 1, 2]), 2)
    assert done.returncode != 0
    assert done.stderr.count("names 3 devices, and torchrun started 2 processes") == 1
    assert done.stderr.count("rather: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rank"),
    [({"actor_train__device_mapping": [0, 1]}, "1 of 2"), (APART, "0 of 1")],
    ids=["together", "apart"],
)
def test_the_first_cause_is_reported_once_and_no_echo(
    tmp_path: Path, devices: dict[str, Any], rank: str
) -> None:
    broken = config_of(
        tmp_path,
        "broken",
        **devices,
        reference__worker_cls="tests.cluster.workers.Breaks",
        system_envs={"RATHER_TEST_BREAK": "nonfinite"},
    )
    done = torchrun(broken, 2)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("rather: ")]
    assert re.fullmatch(rf"rather: reference rank {rank} \(on .+\): the loss is not finite", error)
    assert done.stderr.count("Traceback") == 1  # of torchrun itself
    assert "exitcode  : 6" in done.stderr


@pytest.mark.slow
def test_torchrun_restarts_the_ranks_from_the_checkpoint(tmp_path: Path) -> None:
    """A rank is killed in the third step; `--max-restarts` resumes to the bits of one start."""
    two = {"actor_train__device_mapping": [0, 1], "save_steps": 1}
    once = config_of(tmp_path, "once", **two)
    assert torchrun(once, 2).returncode == 0
    killed = config_of(
        tmp_path,
        "killed",
        **two,
        reference__worker_cls="tests.cluster.workers.DiesOnce",
        system_envs={"RATHER_TEST_ONCE": str(tmp_path / "1")},
    )
    done = torchrun(killed, 2, restarts=1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1").exists()
    assert "exitcode: -9" in done.stderr  # of torchrun, which may end the other rank at once
    assert_same(once, killed)


@pytest.mark.slow
def test_a_reference_on_devices_of_its_own_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    """Its process is killed in the third step; the same command resumes."""
    alone = config_of(tmp_path, "alone")
    assert DPOPipeline(alone).run() == 0
    killed = {"reference__worker_cls": "tests.cluster.workers.DiesOnce"}
    apart = config_of(
        tmp_path, "apart", **APART, **killed, system_envs={"RATHER_TEST_ONCE": str(tmp_path / "1")}
    )
    assert torchrun(apart, 2).returncode != 0
    done = torchrun(apart, 2)
    assert done.returncode == 0, done.stderr
    assert "on its own devices, one step ahead" in done.stderr
    assert_same(alone, apart)


@pytest.mark.slow
def test_roles_that_share_some_devices_take_turns(tmp_path: Path) -> None:
    """The reference has its own processes, and is asked for a step when the policy waits for it."""
    alone = config_of(tmp_path, "alone", max_steps=2)
    assert DPOPipeline(alone).run() == 0
    mapped = {"actor_train__device_mapping": [0], "reference__device_mapping": [0, 1]}
    shared = config_of(tmp_path, "shared", max_steps=2, **mapped)
    done = torchrun(shared, 3)
    assert done.returncode == 0, done.stderr
    assert "on the policy's devices, in turn" in done.stderr
    assert_close(alone, shared, "grad_norm")
