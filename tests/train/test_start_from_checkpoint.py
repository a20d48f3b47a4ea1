"""Runs that start from another run's checkpoint, or from an earlier one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint.checkpoint import latest_name
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.checkpoint.runs import assert_same, incidents, steps
from tests.faults import inject
from tests.tiny import make_config, metrics

RUN: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "max_ckpt_to_keep": 9}
RUN["actor_train__training_args__num_train_epochs"] = 2.0  # of five steps


@pytest.fixture(autouse=True)
def no_checks_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_family", "check_model"):  # half the time of a tiny run
        monkeypatch.setattr(f"rather.parallel.load.{name}", lambda _: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("elsewhere")
    assert DPOPipeline(config_of(found, "first")).run() == 0
    return found


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return make_config(folder, exp_name=name, **{**RUN, **changes})


def broken_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step with this number, of all that this process trains, ends in an error."""
    original, numbers = ActorWorker.train_step, iter(range(1, 1000))

    def train_step(self: ActorWorker, *args: Any, **options: Any) -> Any:
        if next(numbers) == step:
            raise RuntimeError("broken")
        return original(self, *args, **options)

    monkeypatch.setattr(ActorWorker, "train_step", train_step)


def not_a_number_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's answer for one step is no number, once."""
    original, numbers = ActorWorker.compute_log_probs, iter(range(1, 1000))

    def compute_log_probs(self: ActorWorker, *args: Any) -> Any:
        found = original(self, *args)
        if self.role == "reference" and next(numbers) == step:
            found = {name: column.clone() for name, column in found.items()}
            found["sum"][0, 0] = torch.nan
        return found

    monkeypatch.setattr(ActorWorker, "compute_log_probs", compute_log_probs)


def test_interrupted_before_its_first_checkpoint_it_starts_there_again(folder: Path) -> None:
    begun = {
        "resume_from_checkpoint": str(folder / "output" / "first" / "checkpoint-2"),
        "save_steps": 50,
    }
    whole, config = (config_of(folder, name, **begun) for name in ("other-whole", "other"))
    assert DPOPipeline(whole).run() == 0
    assert [line["step"] for line in metrics(whole) if "loss" in line] == [3, 4, 5, 6]
    with pytest.MonkeyPatch.context() as monkeypatch:
        broken_at(4, monkeypatch)
        with pytest.raises(RuntimeError, match="broken"):
            DPOPipeline(config).run()
    assert [line["step"] for line in metrics(config) if "loss" in line] == [3, 4, 5]
    assert DPOPipeline(config).run() == 0
    assert_same(config, whole)


def test_from_an_earlier_checkpoint_it_never_rolls_back_to_a_later_one(folder: Path) -> None:
    config = config_of(folder, "back", on_nonfinite="rollback")
    assert DPOPipeline(config).run() == 0
    named = config.model_copy(
        update={"resume_from_checkpoint": str(config.run_dir / "checkpoint-2")}
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        broken_at(1, monkeypatch)
        with pytest.raises(RuntimeError):
            DPOPipeline(named).run()
    assert latest_name(config.run_dir) == "checkpoint-2"
    with inject.attached("step=4,phase=backward,kind=nan", config.run_dir):
        assert DPOPipeline(named).run() == 0
    assert [each["to"] for each in incidents(config) if each["kind"] == "rollback"] == [2]


def test_from_another_runs_checkpoint_it_can_roll_back_to_that_step(folder: Path) -> None:
    begun = str(folder / "output" / "first" / "checkpoint-2")
    config = config_of(folder, "foreign", on_nonfinite="rollback", resume_from_checkpoint=begun)
    with inject.attached("step=3,phase=backward,kind=nan", config.run_dir):
        assert DPOPipeline(config).run() == 0
    assert [each["to"] for each in incidents(config) if each["kind"] == "rollback"] == [2]


def test_the_checkpoint_that_the_config_names_is_kept(folder: Path) -> None:
    config = config_of(folder, "named")
    assert DPOPipeline(config).run() == 0
    named = config_of(
        folder,
        "named",
        resume_from_checkpoint=str(config.run_dir / "checkpoint-2"),
        max_ckpt_to_keep=1,
    )
    assert DPOPipeline(named).run() == 0
    assert steps(config.run_dir) == [2, 6]
    assert DPOPipeline(named).run() == 0


def test_a_nonfinite_log_prob_is_not_cached(folder: Path) -> None:
    """A passing fault of one forward must not reach the runs that share the cache."""
    cache = {"reference__cache__path": str(folder / "own cache"), "on_nonfinite": "skip"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        not_a_number_at(2, monkeypatch)
        config = config_of(folder, "nan", **cache)
        assert DPOPipeline(config).run() == 0
    assert [each["kind"] for each in incidents(config)] == ["nonfinite"]
    healthy = config_of(folder, "healthy", **cache)
    assert DPOPipeline(healthy).run() == 0
    assert incidents(healthy) == []
    assert_same(healthy, config_of(folder, "first"))
