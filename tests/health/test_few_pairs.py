"""Rules that need no window of 256 pairs: a wrecked run of 16 pairs is found, and named first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rather.errors import RatherError
from rather.tracking.health import (
    HEALTH,
    Health,
    HealthFinding,
    read_findings,
    record_end,
    urgency,
)
from rather.tracking.json_lines import append_line
from tests.commands.conftest import told

Record = dict[str, Any]


def line(step: int, pairs: int = 8, **values: float) -> Record:
    usual = {"loss": 0.69, "rewards/ties": 0.0, "lengths/chosen": 20.0, "lengths/rejected": 20.0}
    record = {name.replace("__", "/"): value for name, value in values.items()}
    return {"step": step, "pairs": pairs, **usual, **record}


def lines(**values: Iterable[float]) -> list[Record]:
    """Lines from step 1 on, with these values one after another."""
    rows = zip(*values.values(), strict=True)
    return [line(step, **dict(zip(values, row, strict=True))) for step, row in enumerate(rows, 1)]


def evaluated(step: int, pairs: int = 16, **values: float) -> Record:
    record = {f"eval/{name.replace('__', '/')}": value for name, value in values.items()}
    return {"step": step, "eval/loss": 0.69, "eval/pairs": pairs, **record}


def found_in(records: Iterable[Record], steps: int, unit: str = "pairs") -> list[HealthFinding]:
    health = Health(steps, unit)
    return [one for record in records for one in health.look(record)]


def names_in(records: Iterable[Record], steps: int, unit: str = "pairs") -> list[str]:
    return [one.name for one in found_in(records, steps, unit)]


@pytest.mark.defect("U3")
def test_chosen_answers_lost_in_two_steps() -> None:
    """What was seen: sft_loss 0.21 -> 27 on 16 pairs, and nothing was reported."""
    (one,) = found_in(lines(sft_loss=[0.21, 27.0]), 2)
    assert (one.name, one.severity, one.step) == ("model_wrecked", "serious", 2)
    assert one.number == pytest.approx(26.79)


@pytest.mark.defect("U25")
def test_advice_for_single_answers_names_keys_that_their_losses_take() -> None:
    """KTO refuses rpo_alpha, pref_ftx and ld_alpha, and its rows are not pairs."""
    answers = {"eval/answers/policy/repetition": 0.9, "eval/answers/reference/repetition": 0.0}
    answers |= {"eval/answers/policy/tokens": 90.0, "eval/answers/reference/tokens": 9.0}
    below = {"logps__chosen_below_reference": 0.9}
    records = [evaluated(0, sft_loss=0.2), evaluated(1, sft_loss=0.9, **below)]
    records += [evaluated(2, sft_loss=0.9, **below), evaluated(3, sft_loss=2.9) | answers]
    found = found_in(records, 100, "answers")
    expected = {"chosen_falling", "answers_repeat", "answers_longer"}
    assert expected <= {one.name for one in found}
    texts = " ".join(f"{one.text} {one.advice}" for one in found)
    for word in ("rpo_alpha", "pref_ftx", "ld_alpha", "simpo", "Pairs", "chosen"):
        assert word not in texts


# --- records, steps of the run, and the finding ---

WRECKED, UNLIKELY, STUCK = "model_wrecked", "answers_unlikely", "accuracy_stuck"
FALLING, NO_END, NOTHING = "chosen_falling", "warmup_never_ends", "nothing_learned"
START = evaluated(0, sft_loss=0.9, drift=0.0)
RISING = lines(lr=[step * 1e-5 for step in range(1, 9)])
FALLS = [evaluated(0, sft_loss=0.5), evaluated(7, sft_loss=1.2, logps__chosen_below_reference=1.0)]
FAR = [evaluated(step, sft_loss=1.0, drift=5.0) for step in (0, 4, 8)]


def stuck_at(pairs: int) -> list[Record]:
    return [evaluated(step, pairs, rewards__accuracies=0.55) for step in range(0, 12, 3)]


def with_ties(share: float) -> list[Record]:
    """Updates that rounding discards, as those of learning rate 1e-9."""
    return lines(rewards__ties=[1.0, *[share] * 7])


def held_out_ties(share: float) -> list[Record]:
    return [with_ties(1.0)[0], *(evaluated(i, rewards__ties=(1.0, share)[i]) for i in (0, 1))]


CASES: dict[str, list[tuple[list[Record], int, str]]] = {
    "U3": [
        # With a large logging_steps there is no earlier line to compare with.
        ([line(4, 32, sft_loss=9.0, kl=-100.0)], 4, WRECKED),
        ([line(4, 32, sft_loss=9.0, kl=-15.0)], 4, ""),
        ([START, evaluated(5, sft_loss=3.0, drift=0.5)], 100, WRECKED),
        ([START, evaluated(5, sft_loss=1.1, drift=24.0)], 100, WRECKED),
        # One evaluation follows the first one if a run has one epoch.
        (FALLS, 7, FALLING),
        (FALLS, 8, ""),
        # Answers that are no text to the reference.
        (lines(sft_loss=[10.4, 10.4, 10.2]), 100, UNLIKELY),
        (lines(sft_loss=[10.4, 10.4, 4.0]), 100, ""),
        (lines(sft_loss=[5.0, 5.0, 5.0]), 100, ""),
    ],
    "X6": [
        (RISING, 8, NO_END),
        (RISING, 9, ""),  # it may still end
        ([*RISING[:7], line(8, lr=7e-5)], 8, ""),
        (RISING[:3], 3, ""),  # three steps have no schedule
        (lines(lr=[9, 5, 1, 3, 5, 7, 8, 8.5]), 8, ""),
        (with_ties(1.0), 8, NOTHING),
        (with_ties(1.0), 9, ""),
        (held_out_ties(1.0), 1, NOTHING),
    ],
    "": [
        (with_ties(0.5), 8, ""),
        (held_out_ties(0.5), 1, ""),
        # One spike is no wreck.
        (lines(sft_loss=[0.2, 27.0, 27.0]), 100, WRECKED),
        (lines(sft_loss=[0.2, 27.0, 0.3]), 100, ""),
        (lines(sft_loss=[0.2, 2.0, 2.0]), 100, ""),
        (lines(sft_loss=[0.2, 2.3, 2.3]), 100, WRECKED),
        (lines(sft_loss=[0.2, *[9.0] * 7]), 100, WRECKED),  # not repeated
        ([START, evaluated(5, sft_loss=1.1, drift=1.7)], 100, ""),
        # Held-out accuracy needs a hundred pairs.
        (stuck_at(99), 12, ""),
        (stuck_at(100), 12, STUCK),
        # The batch differs, not the policy from its reference.
        (lines(sft_loss=[3.0, 6.0, 6.0], kl=[0.0, -8.0, -8.0]), 3, ""),
        (lines(sft_loss=[3.0, 6.0, 6.0], kl=[0.0, -50.0, -50.0]), 3, WRECKED),
        # Lines of one pair are not believed one by one.
        ([line(step, 1, sft_loss=4.0 if step % 5 else 1.0) for step in range(1, 60)], 100, ""),
        # A reference of another model.
        ([FAR[0], *lines(sft_loss=[1.0] * 8, kl=[-100.0] * 8), *FAR[1:]], 8, ""),
        # A run of unknown length has no end.
        (lines(lr=[1e-5, 2e-5, 3e-5, 4e-5], sft_loss=[2.0, 3.0, 4.0, 1.0]), 0, ""),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("records", "steps", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.defect(defect)] if defect else [])
        for defect, cases in CASES.items()
        for case in cases
    ],
)
def test_what_is_found_in_a_short_run(records: list[Record], steps: int, name: str) -> None:
    assert names_in(records, steps) == [name] * bool(name)


def test_a_wrecked_model_is_not_told_to_raise_its_learning_rate() -> None:
    right = {"rewards/accuracies": 0.5}
    records = [line(1, sft_loss=0.2, **right)]
    records += [line(step, 64, sft_loss=9.0, **right) for step in range(2, 20)]
    assert names_in(records, 20) == [WRECKED, FALLING]
    assert names_in([record | {"sft_loss": 0.2} for record in records], 20) == [STUCK]


# --- labels ---


def right(step: int, share: float, pairs: int) -> Record:
    """Held-out pairs of which half are right only if all are ties, before anything is learned."""
    ties = float(share == 0.5)
    return evaluated(step, pairs, rewards__accuracies=share * (1 - ties), rewards__ties=ties)


@pytest.mark.parametrize(
    ("before", "after", "pairs", "found"),
    [
        pytest.param(0.5, 0.0, 16, True, marks=pytest.mark.defect("U3")),
        (0.5, 0.25, 16, False),  # chance
        pytest.param(0.5, 0.30, 100, True, marks=pytest.mark.defect("U3")),
        (0.5, 0.45, 100, False),
        (0.25, 0.25, 100, False),  # a loss without a reference, whose model began like this
    ],
)
def test_fewer_right_pairs_than_by_chance(
    before: float, after: float, pairs: int, found: bool
) -> None:
    held_out = [right(0, before, pairs), right(9, after, pairs)]
    records = [held_out[0], line(9, rewards__accuracies=0.9), held_out[1]]
    assert names_in(records, 9) == ["labels_reversed"] * found
    assert names_in(records, 9, unit="answers") == []
    assert names_in(held_out, 9) == [], "nothing is learned, not even the opposite"


@pytest.mark.parametrize(("pairs", "middle", "end"), [(200, 0.1, 0.1), (48, 0.3125, 0.1875)])
def test_reversed_labels_are_found_once_and_by_their_worst(
    pairs: int, middle: float, end: float
) -> None:
    """They are not called stuck as well; a milder earlier evaluation does not hide them."""
    learned = line(4, rewards__accuracies=0.8)
    records = [right(0, 0.5, pairs), learned, right(5, middle, pairs), right(9, end, pairs)]
    assert names_in(records, 9) == ["labels_reversed"]


# --- the end of a run ---


OUTCOME = {"steps": 8, "updates": 8, "skipped_steps": 0, "changed_masters": 1.0}


@pytest.mark.defect("X6")
@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (0.1, 0.0, True),
        (0.1, 1e-12, True),
        (0.0, 0.0, True),
        (0.1, 0.05, False),
        (0.1, 9.0, False),
    ],
)
def test_weights_that_vanish(tmp_path: Path, before: float, after: float, found: bool) -> None:
    record_end(tmp_path, {**OUTCOME, "weight_size_before": before, "weight_size": after}, None)
    names = [one.name for one in read_findings(tmp_path)]
    assert names == ["weights_vanished"] * found


@pytest.mark.defect("U22")
def test_only_files_that_exist_are_named(tmp_path: Path) -> None:
    record_end(tmp_path, OUTCOME, RatherError("out of luck"))
    (tmp_path / "incidents.jsonl").write_text("{}\n")
    record_end(tmp_path, OUTCOME, RatherError("out of luck"))
    without, with_file = read_findings(tmp_path)
    assert "incidents.jsonl" not in without.advice
    assert "incidents.jsonl" in with_file.advice


# --- order ---


@pytest.mark.defect("U3")
def test_the_model_comes_before_its_data(tmp_path: Path) -> None:
    written = [
        ("data/length_bias", "serious"), ("chosen_falling", "warning"),
        ("learning_rate_too_high", "serious"), ("model_wrecked", "serious"),
        ("run_failed", "serious"),
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("")
    for name, severity in written:
        one = HealthFinding(1, name, severity, "Text.", 1.0, "Advice.")  # type: ignore[arg-type]
        append_line(tmp_path / HEALTH, asdict(one))
    shown = told("health", tmp_path)
    assert [one["name"] for one in shown] == [
        "run_failed", "model_wrecked", "learning_rate_too_high", "data/length_bias",
        "chosen_falling",
    ]  # fmt: skip
    assert sorted(written, key=lambda one: urgency(*one))[0] == ("run_failed", "serious")
