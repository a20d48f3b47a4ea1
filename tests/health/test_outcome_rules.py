"""Health rules about the outcome of a run: the optimum, drift without gain, forgetting."""

from __future__ import annotations

from typing import Any

import pytest

from rather.tracking.health import Health

Record = dict[str, Any]


def evaluation(step: int, loss: float, right: float, drift: float, **more: float) -> Record:
    held_out = {"loss": loss, "rewards/accuracies": right, "drift": drift, "pairs": 500.0}
    return {"step": step, **{f"eval/{key}": value for key, value in held_out.items()}, **more}


def findings(*records: Record) -> dict[str, float]:
    health = Health(total_steps=30)
    found = [one for record in records for one in health.look(record)]
    assert all(one.text.endswith(".") and one.advice.endswith(".") for one in found)
    return {one.name: one.number for one in found}


START = evaluation(0, 0.6931, 0.0, 0.0)


def test_training_that_passes_the_held_out_optimum() -> None:
    """0.648 after one epoch, 0.798 after three: lower than nothing, then higher."""
    passed = findings(START, evaluation(10, 0.648, 0.66, 0.2), evaluation(30, 0.668, 0.68, 0.4))
    assert passed == {"optimum_passed": pytest.approx(0.02)}
    assert not findings(START, evaluation(10, 0.648, 0.66, 0.2), evaluation(30, 0.650, 0.68, 0.4))
    # In the middle of a run it may still improve.
    assert not findings(START, evaluation(10, 0.648, 0.66, 0.2), evaluation(20, 0.7, 0.68, 0.4))


@pytest.mark.parametrize(
    ("right", "drift", "is_too_much"),
    [
        (0.706, 1.64, True),
        (0.706, 1.0, False),
        (1.0, 2.4, False),
        (0.52, 0.6, True),
        (0.5, 0.4, False),
    ],
)
def test_drift_beyond_what_accuracy_justifies(
    right: float, drift: float, is_too_much: bool
) -> None:
    names = findings(START, evaluation(30, 0.6, right, drift))
    assert ("drift_without_gain" in names) == is_too_much


@pytest.mark.parametrize(
    ("loss", "kept", "chance", "is_forgotten"),
    [
        (3.0, 1.0, 0.5, False),
        (3.14, 0.96, 0.02, False),
        (3.16, 1.0, 0.5, True),
        (3.0, 0.9, 0.02, True),
        (3.0, 0.9, 0.2, False),
        (2.0, 1.0, 0.5, False),
    ],
)
def test_forgetting(loss: float, kept: float, chance: float, is_forgotten: bool) -> None:
    first = START | {"eval/forgetting/loss": 3.0, "eval/forgetting/kept": 1.0}
    last = evaluation(30, 0.6, 0.7, 0.3) | {
        "eval/forgetting/loss": loss,
        "eval/forgetting/kept": kept,
        "eval/forgetting/chance": chance,
    }
    assert ("forgetting" in findings(first, last)) == is_forgotten
    assert "forgetting" not in findings(first)
