"""Health rules about the outcome of a run: the optimum, drift without gain, forgetting."""

from __future__ import annotations

from typing import Any

import pytest

from rather.outcome.habits import habit_metrics
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


@pytest.mark.defect("A8")
def test_a_held_out_loss_that_only_rises() -> None:
    """As reward regression on scores of 1e30."""
    assert findings(evaluation(0, 2.155, 0.5, 0.0), evaluation(30, 24.95, 0.5, 0.0)) == {
        "optimum_passed": pytest.approx(22.795)
    }
    assert not findings(evaluation(0, 2.155, 0.5, 0.0), evaluation(30, 2.19, 0.5, 0.0))


@pytest.mark.defect("A8")
@pytest.mark.parametrize("habit", ["repeats", "starts_within"])
@pytest.mark.parametrize("prefix", ["eval/answers/", "eval/forgetting/"])
@pytest.mark.parametrize(
    ("share", "usual", "chance", "is_more"),
    [(0.2, 0.05, 0.03, True), (0.2, 0.05, 0.06, False), (0.2, 0.15, 0.01, False)],
)
def test_habits_that_answers_took_up(
    habit: str, prefix: str, share: float, usual: float, chance: float, is_more: bool
) -> None:
    values = {f"policy/{habit}": share, f"usual/{habit}": usual, f"{habit}_chance": chance}
    record = evaluation(30, 0.6, 0.7, 0.3, **{prefix + name: each for name, each in values.items()})
    names = {"repeats": "sentences_repeat", "starts_within": "starts_lost"}
    assert findings(START, record) == ({names[habit]: share} if is_more else {})


BASE = ["What a lovely question! You will find the coffee here."] * 4
LOST = ["question! You will find the coffee here."] * 4
AGAIN = ["You will find it here. It is good.\nYou will find it here!"] * 4
CODE = ["def two():\n    return 2\n\n\ndef three():\n    return 2"] * 4
LISTS = ["- yes\n- no\n- yes"] * 2 + ["1. yes\n2. no\n3. yes"] * 2
CHINESE = ["咖啡在这里。茶在那里。"] * 4


@pytest.mark.defect("A8")
@pytest.mark.parametrize(
    ("answers", "chosen", "more"),
    [
        (LOST, BASE, {"starts_within"}),
        ([", w" + BASE[0][1:]] * 4, BASE, {"starts_within"}),
        (AGAIN, BASE, {"repeats"}),
        (["咖啡在这个架子的上面一层。" * 2] * 4, CHINESE, {"repeats"}),
        (LOST[:3] + BASE[:1], BASE, set()),  # chance
        (LISTS, BASE, set()),
        (CHINESE, BASE, set()),
        (CODE, CODE, set()),  # as the chosen answers
        (["yes, here."] * 4, ["no, there."] * 4, set()),
        (BASE, BASE, set()),
    ],
)
def test_habits_of_answers(answers: list[str], chosen: list[str], more: set[str]) -> None:
    """Compared with four answers of the base, of which all must change."""
    values = habit_metrics("eval/answers/", BASE, answers, chosen)
    names = {"sentences_repeat": "repeats", "starts_lost": "starts_within"}
    record = evaluation(30, 0.6, 0.7, 0.3, **values)
    assert {names[name] for name in findings(START, record)} == more


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
