"""Losses of single answers and of reward models, against formulas in NumPy; and how a step's
baseline depends on nothing but its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from rather.data.batch import PairFacts, PairLogps, TokenPair
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.objective import configure
from rather.train.rank_trainer import RankTrainer
from tests.losses.formulas import PAIRWISE, as_logps, cost, prob, some_pairs
from tests.losses.test_batching import VOCAB, Outcome, Stepper, small
from tests.padded import random_pairs

PAIRS = some_pairs(8)
GOOD = np.array([1, 0, 0, 1, 1, 0, 1, 0], dtype=bool)
BASELINE = 0.37
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.4}


def answers() -> PairLogps:
    extra = {
        "label": torch.tensor(GOOD, dtype=torch.float64),
        "group": torch.tensor([7, 2, 7, 2, 7, 9, 9, 7], dtype=torch.float64),
    }
    x = as_logps(PAIRS)
    extra["score"] = x.extra["margin"]
    return x._replace(
        extra={**x.extra, **extra, "baseline": torch.tensor(BASELINE, dtype=torch.float64)}
    )


def signed(margin: Any) -> Any:
    return np.where(GOOD, margin, -margin)


FORMULAS = {
    "kto": lambda beta: 1 - prob(signed(beta * (PAIRS.a - BASELINE))),
    "bco": lambda beta: cost(signed(beta * PAIRS.a - BASELINE)),
    "apo_zero_unpaired": lambda beta: np.where(
        GOOD, 1 - prob(beta * PAIRS.a), prob(beta * PAIRS.a)
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_single_answers(name: str) -> None:
    for beta in (0.1, 0.45):
        got = configure([name], {"beta": beta})(answers()).numpy()
        np.testing.assert_allclose(got, FORMULAS[name](beta), rtol=1e-9)
        weighted = configure([name], {"beta": beta, **WEIGHTS})(answers()).numpy()
        np.testing.assert_allclose(weighted, got * np.where(GOOD, 1.5, 0.4), rtol=1e-9)


def test_reward_models() -> None:
    x, r = as_logps(PAIRS), PAIRS.policy_w - PAIRS.policy_l
    got = configure(["bradley_terry"], {"center_rewards_coefficient": 0.1})(x).numpy()
    both = 0.1 * (PAIRS.policy_w + PAIRS.policy_l) ** 2
    np.testing.assert_allclose(got, cost(r - PAIRS.margin) + both, rtol=1e-9)
    without = x._replace(extra={**x.extra, "margin": torch.full((8,), float("nan")).double()})
    np.testing.assert_allclose(
        configure(["bradley_terry"], {})(without).numpy(), cost(r), rtol=1e-9
    )
    squared = (PAIRS.policy_w - PAIRS.margin) ** 2
    scored = x._replace(extra={"score": x.extra["margin"]})
    np.testing.assert_allclose(configure(["regression"], {})(scored).numpy(), squared, rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in PAIRWISE])
def test_gradients(name: str) -> None:
    x, loss = answers(), configure([name], {})
    policy = x.policy.clone().requires_grad_()
    assert gradcheck(lambda logps: loss(x._replace(policy=logps)), policy)


def test_the_kl_of_a_step_is_the_mean_over_its_rows_and_never_negative() -> None:
    loss, x = configure(["kto"], {}), answers()
    kl, running = loss.baseline(x, [3, 0.5])
    assert float(kl) == pytest.approx(max(0.0, PAIRS.b.mean()), abs=1e-12)
    assert running == [3, 0.5]
    assert x.reference is not None
    assert float(loss.baseline(x._replace(reference=x.policy + 1), [0, 0.0])[0]) == 0
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    mixed = x._replace(policy=x.policy[order], reference=x.reference[order])
    assert float(loss.baseline(mixed, [0, 0.0])[0]) == pytest.approx(float(kl), abs=1e-12)


def test_the_running_mean_counts_every_row_once() -> None:
    loss, x = configure(["bco"], {"beta": 0.3}), answers()
    first, running = loss.baseline(_rows(x, slice(0, 3)), [0, 0.0])
    second, running = loss.baseline(_rows(x, slice(3, 8)), running)
    assert running[0] == 8
    assert float(first) == pytest.approx(0.3 * PAIRS.a[:3].mean(), rel=1e-12)
    assert float(second) == pytest.approx(0.3 * PAIRS.a.mean(), rel=1e-12)


def _rows(x: PairLogps, which: slice) -> PairLogps:
    assert x.reference is not None
    return x._replace(policy=x.policy[which], reference=x.reference[which])


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in PAIRWISE])
def test_modifiers_of_pairs_are_refused(name: str) -> None:
    for modifier in ({"rpo_alpha": 0.5}, {"ld_alpha": 0.5}, {"use_weighting": True}):
        with pytest.raises(ConfigError, match="not supported by loss"):
            configure([name], {}, modifiers=modifier)


# --- however a step is cut into micro-batches ---


def labelled_pairs() -> list[TokenPair]:
    """Eight answers with labels and weights; the rejected ones are answers to other prompts."""
    pairs = random_pairs(8, VOCAB, seed=4, longest=9)
    weights = np.random.default_rng(3).uniform(0.2, 2, 8)
    return [
        replace(pair, weight=float(weight), label=float(good))
        for pair, weight, good in zip(pairs, weights, GOOD, strict=True)
    ]


def kto_step(dtype: torch.dtype, order: list[int], micro: int, dp: int = 1) -> Outcome:
    """One step of KTO in any order, in any micro-batches and on any number of ranks."""
    loss, pairs = configure(["kto"], {"beta": 0.5}), labelled_pairs()
    rows = [pairs[i] for i in order]
    noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(5)).double()
    both = RankTrainer(small(dtype), loss).log_probs(pack(pairs, 10**6))["sum"]
    reference = {"sum": (both - noise.abs())[order]}
    stepper = Stepper(small(dtype), loss, dp)
    chosen, rejected = (
        stepper.share([row.only(side) for row in rows], 10**6, micro)
        for side in ("chosen", "rejected")
    )
    partners = stepper.trainer.log_probs(rejected, 8)
    known, _ = loss.with_baseline(partners, reference, [0, 0.0])
    assert float(known["baseline"][0, 0]) > 0.1
    return stepper.step(chosen, known, PairFacts.of_pairs([row.only("chosen") for row in rows]))


ROWS, SHUFFLED = list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-6)]


def assert_same_step(got: Outcome, dtype: torch.dtype, limit: float) -> None:
    expected = kto_step(dtype, ROWS, 8)
    assert expected.gradient.norm() > 1e-3
    difference = (got.gradient - expected.gradient).norm() / expected.gradient.norm()
    assert difference < limit
    assert got.sums == pytest.approx(expected.sums, rel=limit, abs=limit)


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_kto_does_not_depend_on_order_or_micro_batches(dtype: torch.dtype, limit: float) -> None:
    for micro in (1, 4, 8):
        for order in (ROWS, SHUFFLED):
            assert_same_step(kto_step(dtype, order, micro), dtype, limit)
