"""Metrics that only a whole held-out set has."""

from __future__ import annotations

import math

import pytest
import torch

from rather.data.batch import PairFacts
from rather.losses.metrics import (
    calibrated_loss,
    drift,
    interval_of_accuracy,
    whole_set_metrics,
)


def facts(longer: list[float], weight: list[float] | None = None) -> PairFacts:
    chosen = torch.tensor(longer, dtype=torch.float64) + 10
    length = torch.stack([chosen, torch.full_like(chosen, 10)], dim=1)
    nothing = torch.full_like(chosen, math.nan)
    return PairFacts(length, torch.tensor(weight or [1.0] * len(longer)).double(), *[nothing] * 5)


def ratios(margins: list[float]) -> torch.Tensor:
    chosen = torch.tensor(margins, dtype=torch.float64)
    return torch.stack([chosen - 50, torch.full_like(chosen, -50)], dim=1)


def test_margins_that_only_follow_the_length_have_no_controlled_accuracy() -> None:
    longer = [4.0, 2.0, 1.0, -1.0]
    base = torch.full((4, 2), -50.0, dtype=torch.float64)
    only_length = whole_set_metrics(facts(longer), ratios([8, 4, 2, -2]), base)
    key = "rewards/accuracies_length_controlled"
    assert only_length[key] == 0.0  # nothing is left of the margins
    both = whole_set_metrics(facts(longer), ratios([9, 5, 3, -1]), base)
    assert both[key] == 1.0  # the same, and a constant preference
    low, high = interval_of_accuracy(facts(longer), 0.75).values()
    assert (low, high) == pytest.approx((0.3006, 0.9544), abs=1e-4)  # Wilson, 3 of 4


def test_calibrated_loss_does_not_depend_on_beta() -> None:
    share = torch.full((4,), 0.25, dtype=torch.float64)
    margin = torch.tensor([1.0, 2.0, -0.5, 0.3], dtype=torch.float64)
    least = min(
        float(torch.nn.functional.softplus(-t * margin).mean()) for t in torch.linspace(0, 5, 5001)
    )
    assert calibrated_loss(margin, share) == pytest.approx(least, abs=1e-6)
    assert calibrated_loss(100 * margin, share) == pytest.approx(least, abs=1e-6)
    assert calibrated_loss(-margin, share) == pytest.approx(math.log(2))
    assert calibrated_loss(0 * margin, share) == math.log(2)


def test_drift_is_per_token_and_ties_are_not_right() -> None:
    base = torch.full((2, 2), -50.0, dtype=torch.float64)
    same = whole_set_metrics(facts([0, 0]), base, base)
    assert drift(facts([0, 0]), base, base, is_paired=True) == 0.0
    assert same["rewards/accuracies_length_controlled"] == 0.0
    weighted = facts([0, 0], [1.0, 3.0])
    moved = drift(weighted, ratios([2, -4]), base, is_paired=True)
    assert moved == pytest.approx((1 * 0.1 + 3 * 0.2) / 4)
    # The second column of a single answer is another answer's, or empty.
    single = weighted._replace(length=weighted.length * torch.tensor([1.0, 0.0]))
    moved = drift(single, ratios([2, -4]), base, is_paired=False)
    assert moved == pytest.approx((1 * 0.2 + 3 * 0.4) / 4)
