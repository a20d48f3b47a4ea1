"""Kill it after any step, run the same command, get the same bits."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.worker import ActorWorker
from rather.errors import CheckpointError, ConfigError
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.tiny import in_child, make_config

TIMES = {"pairs_per_second", "tokens_per_second", "time/reference", "time/train", "time/wait"}
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


def train(folder: Path, changes: dict[str, Any], kill_after: str = "", number: str = "9") -> int:
    os.environ.update(TEST_KILL_AFTER=kill_after, TEST_SIGNAL=number)
    config = make_config(
        folder, actor_train__worker_cls="tests.train.test_resume.Killed", **changes
    )
    return DPOPipeline(config).run()


def outcome(folder: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], bytes]:
    """Metrics without times, every tensor of the last checkpoint, exported weights and ledger."""
    run = folder / "output" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = open_checkpoint(run / "checkpoint-12")
    tensors = {
        f"{g}/{k}": v for g in ("model", "optimizer", "rng") for k, v in last.tensors(g).items()
    }
    plain = [{k: v for k, v in line.items() if k not in TIMES} for line in lines]
    files = ("model/model.safetensors", "ledger.arrows")
    return plain, tensors, b"".join((run / name).read_bytes() for name in files)


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][key], other[1][key]) for key in one[1])
    assert one[2] == other[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, and the model, pairs and data cache that the others share."""
    folder = tmp_path_factory.mktemp("resume")
    make_config(folder)
    assert train(folder, {**RUN, "exp_name": "whole"}) == 0
    lines = outcome(folder, "whole")[0]
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 4, 5, 8, 10, 12]
    return folder


# Before the first checkpoint, with one, between two, and after the last step.
@pytest.mark.parametrize("step", cells([1], [5, 8, 12]))
def test_killed_after_any_step(folder: Path, step: int) -> None:
    changes = {**RUN, "exp_name": f"killed-{step}"}
    assert in_child(train, folder, changes, str(step)) == -signal.SIGKILL
    assert in_child(train, folder, changes) == 0
    assert_same(outcome(folder, f"killed-{step}"), outcome(folder, "whole"))


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
    assert_same(outcome(folder, f"asked-{code}"), outcome(folder, "whole"))


def test_a_finished_run_is_reported_and_a_longer_one_continues(folder: Path) -> None:
    name = {"exp_name": "longer"}
    assert DPOPipeline(make_config(folder, **{**RUN, **name, "max_steps": 6})).run() == 0
    before = (folder / "output" / "longer" / "metrics.jsonl").read_bytes()
    assert DPOPipeline(make_config(folder, **{**RUN, **name, "max_steps": 6})).run() == 0
    assert (folder / "output" / "longer" / "metrics.jsonl").read_bytes() == before
    assert DPOPipeline(make_config(folder, **{**RUN, **name})).run() == 0
    lines = outcome(folder, "longer")[0]
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]


def test_what_false_a_path_and_overwrite_mean(folder: Path) -> None:
    again = {**RUN, "exp_name": "ways"}
    assert DPOPipeline(make_config(folder, **again)).run() == 0
    with pytest.raises(ConfigError, match=r"auto.*exp_name.*--overwrite"):
        DPOPipeline(make_config(folder, **again, resume_from_checkpoint=False)).run()
    checkpoint = str(folder / "output" / "ways" / "checkpoint-5")
    elsewhere = make_config(
        folder, **{**again, "exp_name": "from-a-path"}, resume_from_checkpoint=checkpoint
    )
    assert DPOPipeline(elsewhere).run() == 0
    one, other = (outcome(folder, name)[1] for name in ("from-a-path", "whole"))
    assert all(torch.equal(one[key], other[key]) for key in other)
    note = folder / "output" / "ways" / "my notes.txt"
    note.write_text("not written by a run")
    assert DPOPipeline(make_config(folder, **again, overwrite=True)).run() == 0
    assert (
        note.read_text() == "not written by a run"
    )  # starting anew deletes what runs write, nothing else
    assert_same(outcome(folder, "ways"), outcome(folder, "whole"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beta": 0.5}, "loss.sigmoid.beta"),
        ({"seed": 7}, "seed"),
        ({"sequence_length": 32}, "data.pairs"),
        ({"actor_train__training_args__per_device_train_batch_size": 4}, "global batch"),
    ],
)
def test_another_run_is_not_continued(folder: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)belongs to another run.*{named}: .*then.*now"):
        DPOPipeline(
            make_config(folder, **{**RUN, "exp_name": "whole", "max_steps": 20, **change})
        ).run()


def test_another_precision_resumes_and_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = "actor_train__model_args__dtype"
    changes = {**RUN, "exp_name": "precision", dtype: "fp32"}
    assert DPOPipeline(make_config(folder, **{**changes, "max_steps": 6})).run() == 0
    with caplog.at_level(logging.INFO):
        assert DPOPipeline(make_config(folder, **{**changes, dtype: "bf16"})).run() == 0
    assert "dtype was fp32 until now and is bf16 from here on" in caplog.text
    lines, whole = (outcome(folder, name)[0] for name in ("precision", "whole"))
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]
    assert lines[-1]["eval/loss"] == pytest.approx(whole[-1]["eval/loss"], rel=0.05)
    tensors = outcome(folder, "precision")[1]
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model/")} == {
        torch.float32
    }


def test_killed_between_the_last_checkpoint_and_the_export(folder: Path) -> None:
    """The old model of a shorter run must not pass for the result of the longer one."""
    name = {"exp_name": "unexported"}
    assert DPOPipeline(make_config(folder, **{**RUN, **name, "max_steps": 6})).run() == 0

    class Dies(ActorWorker):
        def save_model(self, *args: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DPOPipeline(make_config(folder, **{**RUN, **name}, actor_train__worker_cls=Dies)).run()
    before = (folder / "output" / "unexported" / "model" / "model.safetensors").read_bytes()
    assert DPOPipeline(make_config(folder, **{**RUN, **name})).run() == 0
    assert (folder / "output" / "unexported" / "model" / "model.safetensors").read_bytes() != before


def test_resuming_from_a_copy_keeps_the_metrics(folder: Path) -> None:
    copies = {"checkpoint_config__output_dir": str(folder / "copies"), "exp_name": "copied"}
    assert DPOPipeline(make_config(folder, **{**RUN, **copies})).run() == 0
    copy = str(folder / "copies" / "copied" / "checkpoint-5")
    assert (
        DPOPipeline(make_config(folder, **{**RUN, **copies}, resume_from_checkpoint=copy)).run()
        == 0
    )
    assert_same(outcome(folder, "copied"), outcome(folder, "whole"))


def test_other_mixing_weights_are_another_run(folder: Path) -> None:
    changes = {
        **RUN,
        "exp_name": "whole",
        "max_steps": 20,
        "actor_train__data_args__weights": [0.5],
    }
    with pytest.raises(CheckpointError, match=r"(?s)belongs to another run.*data.parts: "):
        DPOPipeline(make_config(folder, **changes)).run()
