"""A signal to the driver of a Ray run, and to one process of several, ends all of them in a
complete checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint.checkpoint import newest_good
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.control import StopRequest
from tests.checkpoint.runs import steps
from tests.cluster.test_torchrun import torchrun
from tests.tiny import make_config, metrics
from tests.train.test_signals import config_of, folder, small_chunks

__all__ = ["folder", "small_chunks"]  # fixtures


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_on_ray_with_a_reference_that_runs_ahead(folder: Path) -> None:
    apart = {
        "reference__device_mapping": [1],
        "reference__cache__enabled": False,
    }
    worker = dict.fromkeys(
        ("actor_train__worker_cls", "reference__worker_cls"), "tests.cluster.workers.AsksDriver"
    )
    asks = {
        "RATHER_TEST_DRIVER": str(os.getpid()),
        "RATHER_TEST_CALL": "reference compute_log_probs 4",
        "RATHER_TEST_ONCE": str(folder / "ray-asked"),
    }
    config = config_of(folder, "ray", **apart, **worker, system_envs=asks)
    pipeline = DPOPipeline(config)
    with pipeline.folder.locked(is_main=True), StopRequest() as stop:
        stop.begin_training()  # otherwise so only when the first rank has said it
        assert pipeline.run(stop) == 143
    found = newest_good(config.run_dir)
    assert found is not None
    assert found.step < 6
    assert DPOPipeline(config).run() == 0
    assert_same_numbers(config, config_of(folder, "whole"))


def assert_same_numbers(one: DPOConfig, other: DPOConfig) -> None:
    kept = ("step", "loss", "grad_norm", "eval/loss", "pairs")
    first, second = (
        [{key: line.get(key) for key in kept} for line in metrics(each)] for each in (one, other)
    )
    assert first == second
    weights = [(each.run_dir / "model" / "model.safetensors").read_bytes() for each in (one, other)]
    assert weights[0] == weights[1]


class OneRankIsAsked(ActorWorker):
    """Of two processes only the second gets a signal, once."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.done = getattr(self, "done", 0) + 1
        if self.member.rank == 1 and self.done == 2 and os.environ.get("TEST_SIGNAL"):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_step(*args, **kwargs)


@pytest.mark.slow
def test_under_torchrun_all_stop_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = "tests.cluster.test_signals.OneRankIsAsked"
    asked = make_config(
        tmp_path, exp_name="asked", max_steps=3, train_batch_size=16, actor_train__device_mapping=[0, 1],
        actor_train__worker_cls=worker,
    )  # fmt: skip
    monkeypatch.setenv("TEST_SIGNAL", "1")
    done = torchrun(asked, 2)
    assert done.returncode != 0
    assert "exitcode  : 143" in done.stderr or "exitcode: 143" in done.stderr
    assert steps(asked.run_dir) == [2]
    monkeypatch.delenv("TEST_SIGNAL")
    done = torchrun(asked, 2)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(asked) if "loss" in line] == [1, 2, 3]
