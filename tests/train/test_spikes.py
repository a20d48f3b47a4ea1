"""The spike rule: what counts as a spike, and that it is logged, skipped or rolled back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.config.schema import SpikeArgs
from rather.pipeline.progress import SpikeHistory
from rather.train.nonfinite import StepLimits
from tests.faults import inject
from tests.runs import assert_equal, incidents, saved, steps, trained

SPIKE = 6
pytestmark = pytest.mark.usefixtures("no_self_check")


# --- what a spike is ---


def test_limits_are_deviations_above_the_mean() -> None:
    history, rule = SpikeHistory(), SpikeArgs(window=4, sigma=2.0)
    for loss, norm in ((1.0, 10.0), (3.0, 10.0)):
        assert history.limits(rule) == StepLimits()  # half a window must be there
        history.add(loss, norm, rule.window)
    limits = history.limits(rule)
    assert limits.loss == pytest.approx(2.0 + 2.0 * 1.0)
    assert limits.grad_norm == math.inf  # what does not vary sets no limit
    assert not limits.exceeded(4.0, 1e9)
    assert limits.exceeded(4.01, 0.0)
    assert not limits.exceeded(-1e9, -1e9)


def test_a_history_is_as_long_as_its_window_and_holds_numbers_only() -> None:
    history = SpikeHistory()
    for loss in range(7):
        history.add(float(loss), 1.0, 4)
    history.add(math.nan, 1.0, 4)
    history.add(1.0, math.inf, 4)
    assert (history.losses, history.norms) == ([3.0, 4.0, 5.0, 6.0], [1.0] * 4)


def test_a_level_that_stays_high_stops_being_a_spike() -> None:
    history, rule = SpikeHistory(), SpikeArgs(window=8, sigma=3.0)
    for i in range(8):
        history.add(1.0 + 0.01 * (i % 2), 1.0, rule.window)
    spikes = []
    for _ in range(6):
        spikes.append(history.limits(rule).exceeded(5.0, 1.0))
        history.add(5.0, 1.0, rule.window)
    assert spikes == [True] + [False] * 5


# --- in a run ---


class Spiking(ActorWorker):
    """One step has a loss a thousand times that of the others."""

    def build_loss(self) -> Any:
        return lambda x: -x.policy[:, 0] * (1e3 if inject.step() == SPIKE else 1.0)


@pytest.fixture(autouse=True)
def _steps_are_counted() -> Iterator[None]:
    inject.arm("")
    yield
    inject.detach()


def run(
    folder: Path, name: str, action: str | None, **changes: Any
) -> tuple[DPOConfig, list[dict[str, Any]]]:
    spike = {"spike": {"window": 8, "sigma": 40.0, "action": action}} if action else {}
    changes = {"max_steps": 8, "save_steps": 1, "max_ckpt_to_keep": 0, **spike, **changes}
    training = {"num_train_epochs": 2.0, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    training |= {"per_device_train_batch_size": 8}
    roles = {"actor_train__training_args": training, "actor_train__worker_cls": Spiking}
    config = trained(folder, name, **roles, **changes)
    return config, steps(config)


def test_a_spike_is_logged_and_the_step_applied(shared: Path) -> None:
    plain, _ = run(shared, "spike-no-rule", None)
    config, lines = run(shared, "spike-log", "log")
    (told,) = incidents(config)
    assert (told["kind"], told["step"], told["action"]) == ("spike", SPIKE, "log")
    assert told["loss"] > told["loss_limit"]
    assert told["loss"] == lines[SPIKE - 1]["loss"]
    assert [line["skipped_iter"] for line in lines] == [0] * 8
    assert_equal(saved(plain, 8), saved(config, 8))
    assert not (plain.run_dir / "incidents.jsonl").exists()


def test_a_spike_is_skipped_and_a_resumed_run_skips_it_too(shared: Path) -> None:
    config, lines = run(shared, "spike-skip", "skip")
    assert_equal(saved(config, SPIKE - 1), saved(config, SPIKE))
    assert [line["skipped_iter"] for line in lines] == [0] * 5 + [1, 0, 0]
    assert lines[SPIKE - 1]["loss"] > 100 * lines[0]["loss"]  # it is shown as it was
    run(shared, "spike-skip-parts", "skip", max_steps=SPIKE - 1)
    resumed, again = run(shared, "spike-skip-parts", "skip")
    assert_equal(saved(config, 8), saved(resumed, 8))
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    states = [
        open_checkpoint(each.run_dir / "checkpoint-8").state["progress"]
        for each in (config, resumed)
    ]
    assert states[0]["history"] == states[1]["history"]
    assert len(states[0]["history"]["losses"]) == 8


def test_a_spike_is_rolled_back(shared: Path) -> None:
    skipped, _ = run(shared, "spike-back-skip", "skip")
    config, lines = run(shared, "spike-back", "rollback", save_steps=4)
    assert_equal(saved(skipped, 8), saved(config, 8))
    assert [line["skipped_iter"] for line in lines] == [0] * 5 + [1, 0, 0]
    assert [(each["kind"], each["step"]) for each in incidents(config)] == [
        ("spike", SPIKE),
        ("rollback", SPIKE),
    ]
    assert incidents(config)[1]["to"] == 4
