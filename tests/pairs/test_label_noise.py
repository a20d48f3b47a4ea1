"""The label doctor accuses a label only on evidence that errors of the model do not explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rather.tools.pairs import _print_suspects
from rather.tools.report import pairs
from rather.tools.report.pairs import Doctor, PairHistory

PAIRS = 800


def doctor_of(margins: Sequence[Any], *, held_out: Any = None) -> Doctor:
    """Return the doctor of pairs that have these margins, one array per visit."""
    tables = []
    for step, margin in enumerate(margins, 1):
        size, zeros = len(margin), np.zeros(len(margin))
        columns = {"step": np.full(size, step), "id": np.arange(size, dtype=np.uint64)}
        columns |= {"margin": margin, "chosen": zeros, "rejected": zeros}
        columns |= {"gradient_weight": zeros, "chosen_tokens": zeros, "rejected_tokens": zeros}
        tables.append(pa.table(columns))
    history = PairHistory.of(pa.concat_tables(tables))
    return Doctor(history, {}, held_out) if held_out else Doctor(history, {})


def simulated(seed: int, *, flips: float, quality: float = 1.5) -> tuple[list[Any], Any]:
    """Return margins at two visits by a model of some quality, and which labels are flipped."""
    draw = np.random.default_rng(seed)
    belief = quality + draw.normal(size=PAIRS)
    flipped = draw.random(PAIRS) < flips
    margin = np.where(flipped, -belief, belief)
    return [margin, margin + 0.3], flipped  # the second visit: a bit of each label is memorised


def knows_its_errors(seed: int, quality: float = 1.5) -> Any:
    """Return what is known from held-out pairs with right labels."""
    margin = quality + np.random.default_rng(1000 + seed).normal(size=300)
    noise = pairs.LabelNoise.of_margins(margin)
    return pairs.HeldOut(0.9, 0.86, 0.93, noise)


def accused(doctor: Doctor) -> Any:
    return doctor.findings["likely_flipped"]


@pytest.mark.defect("U4")
def test_a_hair_below_zero_is_no_evidence() -> None:
    """The margins of `rather demo`: right labels, and some pairs seen before anything is learned."""
    margin = np.linspace(-0.006, 3, PAIRS)
    assert not accused(doctor_of([margin])).any()
    assert not accused(doctor_of([margin, margin])).any()


def test_right_labels_are_not_accused() -> None:
    """Ten runs each, of models that are right on 69 %, 93 % and 99 % of the pairs."""
    for quality in (0.5, 1.5, 2.5):
        shares = []
        for seed in range(10):
            margins, _ = simulated(seed, flips=0.0, quality=quality)
            doctor = doctor_of(margins, held_out=knows_its_errors(seed, quality))
            shares.append(accused(doctor).mean())
        assert max(shares) <= 0.01


@pytest.mark.parametrize(("flips", "recall"), [(0.06, 0.6), (0.2, 0.75)])
def test_flipped_labels_are_found_among_errors_of_the_model(flips: float, recall: float) -> None:
    """Four fifths of the accused labels are wrong, whatever their share is."""
    rightly = accusations = wrong_labels = 0
    for seed in range(5):
        margins, flipped = simulated(seed, flips=flips)
        found = accused(doctor_of(margins, held_out=knows_its_errors(seed)))
        rightly += flipped[found].sum()
        accusations += found.sum()
        wrong_labels += flipped.sum()
    assert rightly / accusations >= 0.8
    assert rightly / wrong_labels >= recall


def test_labels_that_are_memorised_later_count_as_when_first_seen() -> None:
    """At its third visit the model agrees with half of the wrong labels."""
    shares = []
    for seed in range(5):
        (first, _), _ = simulated(seed, flips=0.2)
        doctor = doctor_of([first, first + 0.8, first + 1.6], held_out=knows_its_errors(seed))
        shares.append(doctor.noise.share)
    assert np.mean(shares) == pytest.approx(0.2, abs=0.03)


def test_a_model_that_could_name_few_of_the_wrong_labels_accuses_nobody() -> None:
    """It is right on 76 % of the pairs, and memorises wrong labels as fast as it learns."""
    (first, _), _ = simulated(3, flips=0.3, quality=0.7)
    doctor = doctor_of([first, first + 1.5], held_out=knows_its_errors(3, quality=0.7))
    assert not accused(doctor).any()
    assert "too few to rely on" in doctor.conclusion


def test_the_chance_of_a_suspect_is_printed_if_known(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": 7, "first": -2.0, "visits": 1, "flip_score": 0.9, "findings": []}
    _print_suspects([row, {**row, "chance": 0.82}], None)
    printed = capsys.readouterr().out
    assert printed.count("flip score 0.900") == 2
    assert printed.count("chance of a wrong label 82%") == 1


def test_a_score_of_half_is_accused_of_nothing() -> None:
    """A margin near 0 says nothing, however many other labels are wrong."""
    margins, _ = simulated(0, flips=0.2)
    undecided = [np.concatenate([margin, np.full(40, -0.01)]) for margin in margins]
    doctor = doctor_of(undecided, held_out=knows_its_errors(0))
    assert accused(doctor).any()
    assert not accused(doctor)[-40:].any()


def test_held_out_labels_that_are_as_bad_are_no_evidence() -> None:
    """A model that is sure and wrong on held-out pairs may be wrong on training pairs as well."""
    margins, _ = simulated(0, flips=0.2)
    held_out, _ = simulated(1, flips=0.2)
    noise = pairs.LabelNoise.of_margins(held_out[0])
    doctor = doctor_of(margins, held_out=pairs.HeldOut(0.75, 0.7, 0.8, noise))
    assert not accused(doctor).any()
    assert "to tell its own errors from wrong labels" in doctor.conclusion
    assert doctor.findings["disagrees"].sum() > PAIRS / 10


@pytest.mark.defect("U4")
def test_one_visit_accuses_nobody() -> None:
    margins, _ = simulated(0, flips=0.2)
    once = doctor_of(margins[:1])
    assert not accused(once).any()
    assert "seen once" in once.conclusion


def test_a_model_that_guesses_accuses_nobody() -> None:
    margins, _ = simulated(0, flips=0.2)
    guessing = doctor_of(margins, held_out=pairs.HeldOut(0.52, 0.46, 0.58))
    assert not accused(guessing).any()
    assert "not better than chance" in guessing.conclusion
