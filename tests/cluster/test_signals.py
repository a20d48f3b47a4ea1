"""A signal to the driver of a Ray run, and to one process of several, ends all of them in a
complete checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rather.checkpoint.checkpoint import newest_good
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.control import StopRequest
from tests.at_step import AtStep
from tests.cluster.compare import assert_same, series
from tests.cluster.test_torchrun import torchrun
from tests.runs import saved_steps
from tests.tiny import make_config
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
    assert_same(config_of(folder, "whole"), config)


class OneRankIsAsked(AtStep):
    """Of two processes only the second gets a signal, once."""

    def before(self, step: int) -> None:
        if self.is_last and step == 2 and os.environ.get("TEST_SIGNAL"):
            os.kill(os.getpid(), signal.SIGTERM)


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
    assert saved_steps(asked.run_dir) == [2]
    monkeypatch.delenv("TEST_SIGNAL")
    done = torchrun(asked, 2)
    assert done.returncode == 0, done.stderr
    assert len(series(asked, "loss")) == 3
