"""Rules that need no window of 256 pairs: a wrecked run of 16 pairs is found, and named first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rather.cli import app
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

Record = dict[str, Any]
U3, X6 = pytest.mark.defect("U3"), pytest.mark.defect("X6")


def line(step: int, pairs: int = 8, **values: float) -> Record:
    usual = {"loss": 0.69, "rewards/ties": 0.0, "lengths/chosen": 20.0, "lengths/rejected": 20.0}
    return {"step": step, "pairs": pairs, **usual, **values}


def evaluated(step: int, pairs: int = 16, **values: float) -> Record:
    record = {f"eval/{name.replace('__', '/')}": value for name, value in values.items()}
    return {"step": step, "eval/loss": 0.69, "eval/pairs": pairs, **record}


def found_in(records: Iterable[Record], steps: int, unit: str = "pairs") -> list[HealthFinding]:
    health = Health(steps, unit)
    return [one for record in records for one in health.look(record)]


def names_in(records: Iterable[Record], steps: int, unit: str = "pairs") -> list[str]:
    return [one.name for one in found_in(records, steps, unit)]


# --- a wrecked model ---


@pytest.mark.defect("U3")
def test_chosen_answers_lost_in_two_steps() -> None:
    """What was seen: sft_loss 0.21 -> 27 on 16 pairs, and nothing was reported."""
    (one,) = found_in([line(1, sft_loss=0.21), line(2, sft_loss=27.0)], 2)
    assert (one.name, one.severity, one.step) == ("model_wrecked", "serious", 2)
    assert one.number == pytest.approx(26.79)


@pytest.mark.parametrize(
    ("last", "found"),
    [([27.0, 27.0], True), ([27.0, 0.3], False), ([2.0, 2.0], False), ([2.3, 2.3], True)],
)
def test_one_spike_is_no_wreck(last: list[float], found: bool) -> None:
    records = [line(1, sft_loss=0.2), *(line(2 + i, sft_loss=x) for i, x in enumerate(last))]
    assert names_in(records, 100) == ["model_wrecked"] * found


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


def test_a_wrecked_model_is_not_told_to_raise_its_learning_rate() -> None:
    right = {"rewards/accuracies": 0.5}
    records = [line(1, sft_loss=0.2, **right)]
    records += [line(step, 64, sft_loss=9.0, **right) for step in range(2, 20)]
    assert names_in(records, 20) == ["model_wrecked", "chosen_falling"]
    unharmed = [record | {"sft_loss": 0.2} for record in records]
    assert names_in(unharmed, 20) == ["accuracy_stuck"]


@pytest.mark.parametrize(("pairs", "found"), [(99, []), (100, ["accuracy_stuck"])])
def test_stuck_held_out_accuracy_needs_a_hundred_pairs(pairs: int, found: list[str]) -> None:
    records = [evaluated(step, pairs, rewards__accuracies=0.55) for step in range(0, 12, 3)]
    assert names_in(records, 12) == found


def test_pairs_that_are_hard_to_say_are_no_wreck() -> None:
    """The batch differs, not the policy from its reference."""
    records = [line(1, sft_loss=3.0), *(line(step, sft_loss=6.0, kl=-8.0) for step in (2, 3))]
    assert names_in(records, 3) == []
    fallen = [line(step, sft_loss=6.0, kl=-50.0) for step in (2, 3)]
    assert names_in([records[0], *fallen], 3) == ["model_wrecked"]


def test_lines_of_one_pair_are_not_believed_one_by_one() -> None:
    records = [line(1, pairs=1, sft_loss=0.5)]
    records += [line(step, pairs=1, sft_loss=4.0 if step % 5 else 1.0) for step in range(2, 60)]
    assert names_in(records, 100) == []


@pytest.mark.defect("U3")
def test_one_log_line_at_the_end_is_enough() -> None:
    """With a large logging_steps there is no earlier line to compare with."""
    assert names_in([line(4, pairs=32, sft_loss=9.0, kl=-100.0)], 4) == ["model_wrecked"]
    assert names_in([line(4, pairs=32, sft_loss=9.0, kl=-15.0)], 4) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        pytest.param({"sft_loss": 3.0, "drift": 0.5}, True, marks=U3),
        pytest.param({"sft_loss": 1.1, "drift": 24.0}, True, marks=U3),
        ({"sft_loss": 1.1, "drift": 1.7}, False),
    ],
)
def test_held_out_pairs_show_a_wreck_at_once(values: dict[str, float], found: bool) -> None:
    records = [evaluated(0, sft_loss=0.9, drift=0.0), evaluated(5, **values)]
    assert names_in(records, 100) == ["model_wrecked"] * found


def test_a_reference_of_another_model_is_no_wreck() -> None:
    held_out = [evaluated(step, sft_loss=1.0, drift=5.0) for step in (0, 4, 8)]
    trained = [line(step, sft_loss=1.0, kl=-100.0) for step in range(1, 9)]
    assert names_in([*held_out[:1], *trained, *held_out[1:]], 8) == []


def test_a_run_of_unknown_length_has_no_end() -> None:
    rising = [line(step, lr=step * 1e-5, sft_loss=1.0 + step) for step in range(1, 4)]
    assert names_in([*rising, line(4, lr=4e-5, sft_loss=1.0)], 0) == []


def test_a_first_finding_is_not_repeated() -> None:
    records = [line(1, sft_loss=0.2), *(line(step, sft_loss=9.0) for step in range(2, 9))]
    assert names_in(records, 100) == ["model_wrecked"]


@pytest.mark.defect("U3")
def test_falling_is_found_at_the_end_of_a_short_run() -> None:
    """One evaluation follows the first one if a run has one epoch."""
    values = {"logps__chosen_below_reference": 1.0}
    records = [evaluated(0, sft_loss=0.5), evaluated(7, sft_loss=1.2, **values)]
    assert names_in(records, 7) == ["chosen_falling"]
    assert names_in(records, 8) == []


# --- labels, template, schedule ---


@pytest.mark.parametrize(
    ("before", "right", "pairs", "found"),
    [
        pytest.param(0.5, 0.0, 16, True, marks=U3),
        (0.5, 0.25, 16, False),  # chance
        pytest.param(0.5, 0.30, 100, True, marks=U3),
        (0.5, 0.45, 100, False),
        (0.25, 0.25, 100, False),  # a loss without a reference, whose model began like this
    ],
)
def test_fewer_right_pairs_than_by_chance(
    before: float, right: float, pairs: int, found: bool
) -> None:
    start = {"rewards__accuracies": 0.0, "rewards__ties": 1.0}
    if before != 0.5:
        start = {"rewards__accuracies": before, "rewards__ties": 0.0}
    end = {"rewards__accuracies": right, "rewards__ties": 0.0}
    held_out = [evaluated(0, pairs, **start), evaluated(9, pairs, **end)]
    records = [*held_out[:1], line(9, **{"rewards/accuracies": 0.9}), *held_out[1:]]
    assert names_in(records, 9) == ["labels_reversed"] * found
    assert names_in(records, 9, unit="answers") == []
    assert names_in(held_out, 9) == [], "nothing is learned, not even the opposite"


def test_reversed_labels_are_not_called_stuck_as_well() -> None:
    end = {"rewards__accuracies": 0.1, "rewards__ties": 0.0}
    start = evaluated(0, 200, rewards__accuracies=0.0, rewards__ties=1.0)
    learned = line(4, **{"rewards/accuracies": 0.9})
    records = [start, learned, *(evaluated(step, 200, **end) for step in (5, 9))]
    assert names_in(records, 9) == ["labels_reversed"]


def test_a_milder_earlier_evaluation_does_not_hide_reversed_labels() -> None:
    start = evaluated(0, 48, rewards__accuracies=0.0, rewards__ties=1.0)
    learned = line(4, **{"rewards/accuracies": 0.8})
    middle = evaluated(5, 48, rewards__accuracies=0.3125, rewards__ties=0.0)
    end = evaluated(9, 48, rewards__accuracies=0.1875, rewards__ties=0.0)
    assert names_in([start, learned, middle, end], 9) == ["labels_reversed"]


@pytest.mark.defect("U3")
def test_answers_that_are_no_text_to_the_reference() -> None:
    costs = {(10.4, 10.4, 10.2): True, (10.4, 10.4, 4.0): False, (5.0, 5.0, 5.0): False}
    for each, found in costs.items():
        records = [line(step, sft_loss=cost) for step, cost in enumerate(each, 1)]
        assert names_in(records, 100) == ["answers_unlikely"] * found


@pytest.mark.defect("X6")
def test_a_warm_up_that_covers_the_run() -> None:
    rising = [line(step, lr=step * 1e-5) for step in range(1, 9)]
    assert names_in(rising, 8) == ["warmup_never_ends"]
    assert names_in(rising, 9) == [], "it may still end"
    assert names_in([*rising[:7], line(8, lr=7e-5)], 8) == []
    assert names_in(rising[:3], 3) == [], "three steps have no schedule"
    restarted = [line(step, lr=rate) for step, rate in enumerate((9, 5, 1, 3, 5, 7, 8, 8.5), 1)]
    assert names_in(restarted, 8) == []


@pytest.mark.parametrize(("ties", "found"), [pytest.param(1.0, True, marks=X6), (0.5, False)])
def test_few_pairs_without_any_difference(ties: float, found: bool) -> None:
    """Updates that rounding discards, as those of learning rate 1e-9."""
    start = line(1, **{"rewards/ties": 1.0})
    trained = [line(step, **{"rewards/ties": ties}) for step in range(2, 9)]
    assert names_in([start, *trained], 8) == ["nothing_learned"] * found
    assert names_in([start, *trained], 9) == []
    held_out = [evaluated(step, rewards__ties=1.0 if not step else ties) for step in (0, 1)]
    assert names_in([start, *held_out], 1) == ["nothing_learned"] * found


# --- the end of a run ---


OUTCOME = {"steps": 8, "updates": 8, "skipped_steps": 0, "changed_masters": 1.0}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        pytest.param(0.1, 0.0, True, marks=X6),
        pytest.param(0.1, 1e-12, True, marks=X6),
        pytest.param(0.0, 0.0, True, marks=X6),
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
    shown = json.loads(CliRunner().invoke(app, ["health", str(tmp_path), "--json"]).output)
    assert [one["name"] for one in shown] == [
        "run_failed", "model_wrecked", "learning_rate_too_high", "data/length_bias",
        "chosen_falling",
    ]  # fmt: skip
    assert sorted(written, key=lambda one: urgency(*one))[0] == ("run_failed", "serious")
