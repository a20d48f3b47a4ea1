"""Kill it after any step, run the same command, get the same bits."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.errors import CheckpointError, ConfigError
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.checkpoint.runs import assert_same
from tests.runs import assert_equal, evaluations, exported, saved, steps, trained
from tests.tiny import in_child, make_config, metrics

RUN: dict[str, Any] = {
    "max_steps": 12,
    "logging_steps": 3,
    "save_steps": 5,
    "eval_steps": 4,
    "early_stopping_patience": 50,
    "actor_train__training_args__num_train_epochs": 3.0,  # 5 steps an epoch, the last one smaller
    "actor_train__training_args__per_device_train_batch_size": 9,
    "actor_train__training_args__lr_scheduler_type": "cosine",
    "actor_train__training_args__warmup_steps": 3,
}


class Killed(ActorWorker):
    """Dies without a word when as many steps are done as the environment says."""

    def train_step(self, *args: Any, **options: Any) -> Any:
        result = super().train_step(*args, **options)
        self.done = getattr(self, "done", 0) + 1
        if str(self.done) == os.environ.get("TEST_KILL_AFTER"):
            os.kill(os.getpid(), int(os.environ.get("TEST_SIGNAL", signal.SIGKILL)))
        return result


KILLED = {"actor_train__worker_cls": "tests.train.test_resume.Killed"}


def train_killed(config: DPOConfig, after: str = "", number: str = "9") -> int:
    """Train with a worker of KILLED, in a process of its own if it dies after so many steps."""
    os.environ.update(TEST_KILL_AFTER=after, TEST_SIGNAL=number)
    return DPOPipeline(config).run()


def train(folder: Path, changes: dict[str, Any], kill_after: str = "", number: str = "9") -> int:
    return train_killed(make_config(folder, **KILLED, **changes), kill_after, number)


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return make_config(folder, exp_name=name, **{**RUN, **changes})


def finish(folder: Path, name: str, **changes: Any) -> DPOConfig:
    """Train or resume this run, without a kill."""
    return trained(folder, name, **{**RUN, **changes})


def assert_whole(folder: Path, name: str) -> None:
    """A run has left what the one without a kill left."""
    assert_same(config_of(folder, name), config_of(folder, "whole"))


def logged(config: DPOConfig) -> list[int]:
    return [line["step"] for line in steps(config)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, and the model, pairs and data cache that the others share."""
    folder = tmp_path_factory.mktemp("resume")
    make_config(folder)
    assert train(folder, {**RUN, "exp_name": "whole"}) == 0
    whole = config_of(folder, "whole")
    assert logged(whole) == [3, 6, 9, 12]
    assert [line["step"] for line in evaluations(whole)] == [0, 4, 5, 8, 10, 12]
    return folder


# Before the first checkpoint, with one, between two, and after the last step.
@pytest.mark.parametrize("step", cells([1], [5, 8, 12]))
def test_killed_after_any_step(folder: Path, step: int) -> None:
    changes = {**RUN, "exp_name": f"killed-{step}"}
    assert in_child(train, folder, changes, str(step)) == -signal.SIGKILL
    assert in_child(train, folder, changes) == 0
    assert_whole(folder, f"killed-{step}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_in_a_complete_checkpoint(
    folder: Path, number: signal.Signals, code: int
) -> None:
    changes = {**RUN, "exp_name": f"asked-{code}"}
    assert in_child(train, folder, changes, "7", str(int(number))) == code
    run = folder / "output" / f"asked-{code}"
    assert open_checkpoint(run / "checkpoint-7").step == 7
    assert not (run / "model").exists()
    assert in_child(train, folder, changes) == 0
    assert_whole(folder, f"asked-{code}")


def test_a_finished_run_is_reported_and_a_longer_one_continues(folder: Path) -> None:
    config = finish(folder, "longer", max_steps=6)
    before = (config.run_dir / "metrics.jsonl").read_bytes()
    finish(folder, "longer", max_steps=6)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == before
    assert logged(finish(folder, "longer")) == [3, 6, 9, 12]


def test_what_false_a_path_and_overwrite_mean(folder: Path) -> None:
    run_dir = finish(folder, "ways").run_dir
    with pytest.raises(ConfigError, match=r"auto.*exp_name.*--overwrite"):
        finish(folder, "ways", resume_from_checkpoint=False)
    checkpoint = str(run_dir / "checkpoint-5")
    elsewhere = finish(folder, "from-a-path", resume_from_checkpoint=checkpoint)
    assert_equal(saved(elsewhere, 12), saved(config_of(folder, "whole"), 12))
    note = run_dir / "my notes.txt"
    note.write_text("not written by a run")
    finish(folder, "ways", overwrite=True)
    assert note.exists()  # starting anew deletes what runs write, nothing else
    assert_whole(folder, "ways")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beta": 0.5}, "loss.sigmoid.beta"),
        ({"seed": 7}, "seed"),
        ({"sequence_length": 32}, "data.pairs"),
        ({"actor_train__training_args__per_device_train_batch_size": 4}, "global batch"),
        ({"actor_train__data_args__weights": [0.5]}, "data.parts"),
    ],
)
def test_another_run_is_not_continued(folder: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)belongs to another run.*{named}: .*then.*now"):
        finish(folder, "whole", max_steps=20, **change)


def test_another_precision_resumes_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = "actor_train__model_args__dtype"
    finish(folder, "precision", max_steps=6, **{dtype: "fp32"})
    with caplog.at_level(logging.INFO):
        config = finish(folder, "precision", **{dtype: "bf16"})
    assert "dtype was fp32 until now and is bf16 from here on" in caplog.text
    assert logged(config) == [3, 6, 9, 12]
    last, whole = (metrics(each)[-1] for each in (config, config_of(folder, "whole")))
    assert last["eval/loss"] == pytest.approx(whole["eval/loss"], rel=0.05)
    assert {tensor.dtype for tensor in saved(config, 12, "model").values()} == {torch.float32}


def test_killed_between_the_last_checkpoint_and_the_export(folder: Path) -> None:
    """The old model of a shorter run must not pass for the result of the longer one."""
    before = exported(finish(folder, "unexported", max_steps=6))

    class Dies(ActorWorker):
        def save_model(self, *args: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(folder, "unexported", actor_train__worker_cls=Dies)
    after = exported(finish(folder, "unexported"))
    assert not any(torch.equal(after[name], weight) for name, weight in before.items())


def test_resuming_from_a_copy_keeps_the_metrics(folder: Path) -> None:
    copies = {"checkpoint_config__output_dir": str(folder / "copies")}
    finish(folder, "copied", **copies)
    copy = str(folder / "copies" / "copied" / "checkpoint-5")
    finish(folder, "copied", **copies, resume_from_checkpoint=copy)
    assert_whole(folder, "copied")
