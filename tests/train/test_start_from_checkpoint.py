"""Runs that start from another run's checkpoint, or from an earlier one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint.checkpoint import latest_name
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from tests.faults import inject
from tests.runs import assert_same, incidents, saved_steps, steps, trained
from tests.tiny import make_config

RUN: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "max_ckpt_to_keep": 9}
RUN["actor_train__training_args__num_train_epochs"] = 2.0  # of five steps


pytestmark = pytest.mark.usefixtures("no_self_check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("elsewhere")
    finish(found, "first")
    return found


def config_of(folder: Path, name: str) -> DPOConfig:
    return make_config(folder, exp_name=name, **RUN)


def finish(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return trained(folder, name, **{**RUN, **changes})


def step_2(config: DPOConfig) -> dict[str, str]:
    """The key that starts a run from the checkpoint of another."""
    return {"resume_from_checkpoint": str(config.run_dir / "checkpoint-2")}


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
    begun = {**step_2(config_of(folder, "first")), "save_steps": 50}
    whole = finish(folder, "other-whole", **begun)
    assert [line["step"] for line in steps(whole)] == [3, 4, 5, 6]
    with pytest.MonkeyPatch.context() as monkeypatch:
        broken_at(4, monkeypatch)
        with pytest.raises(RuntimeError, match="broken"):
            finish(folder, "other", **begun)
    assert [line["step"] for line in steps(config_of(folder, "other"))] == [3, 4, 5]
    assert_same(finish(folder, "other", **begun), whole)


def test_from_an_earlier_checkpoint_it_never_rolls_back_to_a_later_one(folder: Path) -> None:
    config = finish(folder, "back", on_nonfinite="rollback")
    named = {**step_2(config), "on_nonfinite": "rollback"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        broken_at(1, monkeypatch)
        with pytest.raises(RuntimeError):
            finish(folder, "back", **named)
    assert latest_name(config.run_dir) == "checkpoint-2"
    with inject.attached("step=4,phase=backward,kind=nan", config.run_dir):
        finish(folder, "back", **named)
    assert [each["to"] for each in incidents(config) if each["kind"] == "rollback"] == [2]


def test_from_another_runs_checkpoint_it_can_roll_back_to_that_step(folder: Path) -> None:
    begun = step_2(config_of(folder, "first"))
    with inject.attached("step=3,phase=backward,kind=nan", folder / "output" / "foreign"):
        config = finish(folder, "foreign", on_nonfinite="rollback", **begun)
    assert [each["to"] for each in incidents(config) if each["kind"] == "rollback"] == [2]


def test_the_checkpoint_that_the_config_names_is_kept(folder: Path) -> None:
    config = finish(folder, "named")
    named = {**step_2(config), "max_ckpt_to_keep": 1}
    finish(folder, "named", **named)
    assert saved_steps(config.run_dir) == [2, 6]
    finish(folder, "named", **named)


def test_a_nonfinite_log_prob_is_not_cached(folder: Path) -> None:
    """A passing fault of one forward must not reach the runs that share the cache."""
    cache = {"reference__cache__path": str(folder / "own cache"), "on_nonfinite": "skip"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        not_a_number_at(2, monkeypatch)
        config = finish(folder, "nan", **cache)
    assert [each["kind"] for each in incidents(config)] == ["nonfinite"]
    healthy = finish(folder, "healthy", **cache)
    assert incidents(healthy) == []
    assert_same(healthy, config_of(folder, "first"))
