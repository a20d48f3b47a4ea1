"""Metrics are weighted means over pairs, whatever the pairs were batched with."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

from rather.data.batch import PairLogps
from rather.losses.metrics import MOMENTS, PER_PAIR, WITH_REFERENCE, Scored, Window, weighted_sums
from rather.losses.objective import configure

OBJECTIVE = configure(["sigmoid"], {"beta": 0.25})
POLICY = [[-10.0, -12.0], [-8.0, -7.0], [-6.0, -6.0], [-20.0, -11.0]]
REFERENCE = [[-11.0, -11.0], [-8.0, -9.0], [-5.0, -5.0], [-20.0, -12.0]]
LENGTH = [[5.0, 4.0], [4.0, 7.0], [3.0, 2.0], [8.0, 1.0]]
LOSSES = [0.5, 0.9, math.log(2), 1.0]
WEIGHTS = [1.0, 3.0, 0.5, 0.0]  # the last is a filler
WANTED: dict[str, list[float]] = {  # of each pair, by hand
    "loss": LOSSES,
    "rewards/chosen": [0.25, 0.0, -0.25, 0.0],
    "rewards/rejected": [-0.25, 0.5, -0.25, 0.25],
    "rewards/accuracies": [1, 0, 0, 0],  # a tie is not won
    "rewards/ties": [0, 0, 1, 0],
    "rewards/margins": [0.5, -0.5, 0.0, -0.25],
    "logps/chosen": [-10, -8, -6, -20],
    "logps/rejected": [-12, -7, -6, -11],
    "sft_loss": [2.0, 2.0, 2.0, 2.5],
    "lengths/chosen": [5, 4, 3, 8],
    "lengths/rejected": [4, 7, 2, 1],
    "logps/chosen_below_reference": [0, 0, 1, 0],
    "kl": [0.0, 1.0, -1.0, 0.5],
}


def sums(places: Any) -> dict[str, float]:
    """As one micro-batch of these pairs gives them."""
    double = {"dtype": torch.float64}
    policy, reference, length = (
        torch.tensor(x, **double)[places] for x in (POLICY, REFERENCE, LENGTH)
    )
    x = PairLogps(policy, reference, length)
    scored = Scored(x, torch.tensor(LOSSES, **double)[places], OBJECTIVE.rewards(x))
    totals = weighted_sums(scored, torch.tensor(WEIGHTS, **double)[places], OBJECTIVE)
    return {name: float(total) for name, total in totals.items()}


def test_each_metric_is_a_weighted_mean_over_pairs() -> None:
    window = Window()
    window.add(sums([0, 1, 2, 3]), pairs=3, tokens=40)
    means = window.means()
    correlation = means.pop("rewards/length_correlation")
    assert means.keys() == WANTED.keys() == PER_PAIR.keys() | WITH_REFERENCE.keys()
    margins, longer = WANTED["rewards/margins"], [chosen - rejected for chosen, rejected in LENGTH]
    repeated = [
        (m, d) for m, d, w in zip(margins, longer, WEIGHTS, strict=True) for _ in range(int(2 * w))
    ]
    assert correlation == pytest.approx(
        statistics.correlation(*zip(*repeated, strict=True)), rel=1e-9
    )
    for name, mean in means.items():
        want = sum(w * v for w, v in zip(WEIGHTS, WANTED[name], strict=True)) / sum(WEIGHTS)
        assert mean == pytest.approx(want, rel=1e-12, abs=1e-15), name


def test_several_adds_equal_one() -> None:
    whole, parts = Window(), Window()
    whole.add(sums([0, 1, 2, 3]), pairs=3, tokens=40, skipped=1)
    for places, pairs, tokens, skipped in (([2], 1, 9, 0), ([0, 3], 1, 11, 1), ([1], 1, 20, 0)):
        parts.add(sums(places), pairs=pairs, tokens=tokens, skipped=skipped)
    assert parts.means() == pytest.approx(whole.means(), rel=1e-12)
    assert (parts.pairs, parts.tokens, parts.skipped) == (whole.pairs, whole.tokens, whole.skipped)


def test_metrics_hold_no_graph() -> None:
    policy = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    x = PairLogps(policy, torch.tensor(REFERENCE).double(), torch.tensor(LENGTH).double())
    scored = Scored(x, policy.sum(1), OBJECTIVE.rewards(x))
    totals = weighted_sums(scored, torch.ones(4, dtype=torch.float64), OBJECTIVE)
    assert not any(total.requires_grad for total in totals.values())


def test_pairs_without_weight_have_no_metrics() -> None:
    window = Window()
    window.add(sums([3]), pairs=1, tokens=5)
    assert window.means() == {}
    assert (window.pairs, window.tokens) == (1, 5)


def correlation(pairs: list[tuple[float, float, float]]) -> float:
    """Of weight, margin and length difference of each pair, added one by one."""
    window = Window()
    for weight, margin, longer in pairs:
        values = (
            torch.tensor(margin, dtype=torch.float64),
            torch.tensor(longer, dtype=torch.float64),
        )
        moments = {name: weight * float(moment(*values)) for name, moment in MOMENTS.items()}
        window.add({**moments, "weight": weight}, pairs=1, tokens=0)
    return window.means()["rewards/length_correlation"]


@pytest.mark.parametrize("constant", ["margin", "length", "one pair"])
def test_what_does_not_vary_has_no_correlation_whatever_the_weights(constant: str) -> None:
    draw = random.Random(0)
    for _ in range(300):
        margin, longer = draw.gauss(0, 1), float(draw.randrange(-20, 20))
        pairs = [
            (
                draw.uniform(0.01, 3),
                draw.gauss(0, 1) if constant == "length" else margin,
                float(draw.randrange(-20, 20)) if constant == "margin" else longer,
            )
            for _ in range(1 if constant == "one pair" else draw.choice([2, 8, 40]))
        ]
        assert correlation(pairs) == 0, pairs


def test_correlation_is_that_of_the_weighted_pairs_and_never_beyond_one() -> None:
    draw = random.Random(0)
    for _ in range(300):
        slope, spread = draw.choice([-0.3, 0.7]), draw.choice([0.0, 1e-9, 1.0])
        lengths = [float(length) for length in draw.sample(range(-50, 50), draw.choice([2, 3, 16]))]
        pairs = [(draw.uniform(0.01, 3), slope * d + draw.gauss(0, spread), d) for d in lengths]
        weights, margins, _ = zip(*pairs, strict=True)
        m, d = (
            sum(w * v for w, v in zip(weights, x, strict=True)) / sum(weights)
            for x in (margins, lengths)
        )
        covariance = sum(w * (x - m) * (y - d) for w, x, y in pairs)
        squares = sum(w * (x - m) ** 2 for w, x, _ in pairs) * sum(
            w * (y - d) ** 2 for w, _, y in pairs
        )
        found = correlation(pairs)
        assert -1 <= found <= 1
        assert found == pytest.approx(covariance / math.sqrt(squares), abs=1e-9)


def test_overflowing_rewards_have_no_correlation() -> None:
    assert correlation([(1.0, 1e200, 1.0), (1.0, 3e200, 2.0), (1.0, 2e200, 2.0)]) == 0


def test_differences_within_rounding_are_ties() -> None:
    """Log-probs of the same weights differ by rounding if they were computed in another layout."""
    off = torch.tensor([[3e-7, -2e-7], [-3e-7, 4e-7], [0.0, 1e-3], [1e-3, 0.0]]).double()
    policy = torch.tensor(POLICY).double()
    x = PairLogps(policy, policy + off * policy, torch.tensor(LENGTH).double())
    scored = Scored(x, policy.sum(1), OBJECTIVE.rewards(x))
    found = {name: metric(scored).tolist() for name, metric in (PER_PAIR | WITH_REFERENCE).items()}
    assert found["rewards/ties"] == [1, 1, 0, 0]
    assert found["rewards/accuracies"] == [0, 0, 0, 1]
    assert found["logps/chosen_below_reference"] == [0, 0, 0, 0]


def test_means_of_single_answers_are_over_the_answers_of_their_label() -> None:
    """Three answers weigh 1, 4 and 2; the second is undesirable."""
    double = {"dtype": torch.float64}
    policy, reference, length = (torch.tensor(x, **double)[:3] for x in (POLICY, REFERENCE, LENGTH))
    label = torch.tensor([1.0, 0.0, 1.0], **double)
    x = PairLogps(policy, reference, length, extra={"label": label})
    objective = configure(["apo_zero_unpaired"], {"beta": 0.25})
    scored = Scored(x, torch.tensor(LOSSES[:3], **double), objective.rewards(x))
    totals = weighted_sums(scored, torch.tensor([1.0, 4.0, 2.0], **double), objective)
    window = Window({name: float(total) for name, total in totals.items()})
    means = window.means()
    desirable = {"rewards/chosen": [0.25, -0.25], "logps/chosen": [-10, -6], "sft_loss": [2.0, 2.0],
                 "lengths/chosen": [5, 3], "logps/chosen_below_reference": [0, 1]}  # fmt: skip
    for name, (first, third) in desirable.items():
        assert means.pop(name) == pytest.approx((first + 2 * third) / 3), name
    undesirable = {"rewards/rejected": 0.0, "logps/rejected": -8, "lengths/rejected": 4}
    for name, second in undesirable.items():
        assert means.pop(name) == pytest.approx(second), name
    assert means.pop("rewards/margins") == pytest.approx((0.25 - 2 * 0.25) / 3)
    assert means.keys() == {"loss", "rewards/accuracies", "rewards/ties"}, "means over all answers"
