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


def ledger(margins: Sequence[Any], first: int = 0) -> Any:
    """Return the rows of pairs that have these margins, one array per visit."""
    tables = []
    for step, margin in enumerate(margins, 1):
        size, zeros = len(margin), np.zeros(len(margin))
        columns = {
            "step": np.full(size, step),
            "id": np.arange(first, first + size, dtype=np.uint64),
        }
        columns |= {"margin": margin, "chosen": zeros, "rejected": zeros}
        columns |= {"gradient_weight": zeros, "chosen_tokens": zeros, "rejected_tokens": zeros}
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


def doctor_of(margins: Sequence[Any], *, held_out: Any = None) -> Doctor:
    return Doctor(PairHistory.of(ledger(margins)), {}, held_out)


def simulated(seed: int, *, flips: float, quality: float = 1.5) -> tuple[list[Any], Any]:
    """Return margins at two visits by a model of some quality, and which labels are flipped."""
    draw = np.random.default_rng(seed)
    belief = quality + draw.normal(size=PAIRS)
    flipped = draw.random(PAIRS) < flips
    margin = np.where(flipped, -belief, belief)
    return [margin, margin + 0.3], flipped  # the second visit: a bit of each label is memorised


def knows_its_errors(seed: int, quality: float = 1.5) -> Any:
    """Return what is known from held-out pairs with right labels."""
    return pairs.HeldOut(quality + np.random.default_rng(1000 + seed).normal(size=300))


def accused(doctor: Doctor) -> Any:
    return doctor.findings["likely_flipped"]


FLIPPED, _ = simulated(0, flips=0.2)
(WEAK, _), _ = simulated(3, flips=0.3, quality=0.7)  # right on 76 % of the pairs
HAIR = np.linspace(-0.006, 3, PAIRS)
AS_BAD = pairs.HeldOut(simulated(1, flips=0.2)[0][0])
GUESSES = pairs.HeldOut(np.linspace(-1, 1.1, 300))
U4 = pytest.mark.defect("U4")


@pytest.mark.parametrize(
    ("margins", "held_out", "conclusion"),
    [
        # The margins of `rather demo`: right labels, some pairs seen before anything is learned.
        pytest.param([HAIR], None, "", marks=U4),
        pytest.param([HAIR, HAIR], None, "", marks=U4),
        pytest.param(FLIPPED[:1], None, "seen once", marks=U4),
        (FLIPPED, GUESSES, "not better than chance"),
        # A model that is sure and wrong on held-out pairs may be so on training pairs as well.
        (FLIPPED, AS_BAD, "to tell its own errors from wrong labels"),
        # It memorises wrong labels as fast as it learns.
        ([WEAK, WEAK + 1.5], knows_its_errors(3, 0.7), "too few to rely on"),
    ],
)
def test_without_evidence_nobody_is_accused(margins: Any, held_out: Any, conclusion: str) -> None:
    doctor = doctor_of(margins, held_out=held_out)
    assert not accused(doctor).any()
    assert conclusion in doctor.conclusion


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


@pytest.mark.defect("E12")
def test_a_source_without_held_out_pairs_is_not_accused() -> None:
    """No label is wrong; the model contradicts a source that the held-out pairs lack."""
    accusing = 0
    for seed in range(10):
        draw = np.random.default_rng(seed)
        margin = 1.5 + draw.normal(size=PAIRS)
        margin[: PAIRS // 10] *= -1
        training = ledger([margin, margin + 0.3])
        held_out = ledger([1.5 + draw.normal(size=300)], first=PAIRS)
        source_of = dict.fromkeys(range(PAIRS // 10), "other.jsonl")
        doctor = Doctor.by_source(training, held_out, source_of)
        assert not accused(doctor).any()
        assert doctor.findings["disagrees"][: PAIRS // 10].mean() > 0.8
        assert doctor.conclusion.count("No pair is called likely flipped") == 2
        assert not accused(Doctor.by_source(training, held_out, None)).any()
        accusing += bool(accused(Doctor.by_source(training, held_out, {})).any())
    assert accusing > 5  # as if they were of one source


@pytest.mark.defect("E12")
def test_flipped_labels_of_one_source_are_found_among_others() -> None:
    (first, second), flipped = simulated(0, flips=0.2)
    sizes = np.random.default_rng(1).normal(size=PAIRS) - 2  # a source that it contradicts
    training = ledger([np.append(first, sizes), np.append(second, sizes)])
    held_out = ledger([1.5 + np.random.default_rng(2).normal(size=300)], first=2 * PAIRS)
    source_of = dict.fromkeys(range(PAIRS, 2 * PAIRS), "b.jsonl")
    doctor = Doctor.by_source(training, held_out, source_of)
    found = accused(doctor)
    assert not found[PAIRS:].any()
    assert flipped[found[:PAIRS]].mean() > 0.8
    chances = [row["id"] for row in doctor.rows() if "chance" in row]
    assert len(chances) == PAIRS


@pytest.mark.defect("E12")
def test_errors_of_a_sure_model_are_not_called_wrong_labels() -> None:
    """Errors with heavy tails (Student's t of 3): the promised share of accusations is right."""
    rightly = accusations = 0
    for seed in range(24):
        draw = np.random.default_rng(seed)
        belief = 1.5 + draw.standard_t(3, size=PAIRS)
        flipped = draw.random(PAIRS) < (0.1, 0.2, 0.3)[seed % 3]
        margin = np.where(flipped, -belief, belief)
        held_out = pairs.HeldOut(1.5 + draw.standard_t(3, size=300))
        flags = accused(doctor_of([margin, margin + 0.3], held_out=held_out))
        rightly += flipped[flags].sum()
        accusations += flags.sum()
    assert accusations > 100
    assert rightly >= pairs.PRECISION * accusations
