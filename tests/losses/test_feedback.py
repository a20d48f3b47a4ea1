"""Losses of single answers and of reward models, against formulas in NumPy; and how a step's
baseline depends on nothing but its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from rather.data.batch import PairLogps, TokenPair
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.objective import configure
from rather.model.policy import PolicyModel
from rather.train.rank_trainer import RankTrainer
from tests.losses.formulas import PAIRWISE, as_logps, cost, prob, some_pairs
from tests.losses.test_batching import VOCAB, Outcome, small, step
from tests.padded import random_pairs

PAIRS = some_pairs(8)
GOOD = np.array([1, 0, 0, 1, 1, 0, 1, 0], dtype=bool)
BASELINE = 0.37
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.4}


def answers() -> PairLogps:
    extra = {"soft_label": torch.tensor(GOOD, dtype=torch.float64)}
    x = as_logps(PAIRS)
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
    np.testing.assert_allclose(configure(["regression"], {})(x).numpy(), squared, rtol=1e-9)


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
        with pytest.raises(ConfigError, match="cannot take it"):
            configure([name], {}, modifiers=modifier)


# --- however a step is cut into micro-batches ---


def labelled_pairs() -> list[TokenPair]:
    """Eight answers with labels and weights; the rejected ones are answers to other prompts."""
    pairs = random_pairs(8, VOCAB, seed=4, longest=9)
    weights = np.random.default_rng(3).uniform(0.2, 2, 8)
    return [
        replace(pair, weight=float(weight), soft_label=float(good))
        for pair, weight, good in zip(pairs, weights, GOOD, strict=True)
    ]


def kto_step(policy: PolicyModel, order: list[int], micro: int) -> Outcome:
    """One step of KTO in any order and any micro-batches; results are in the order of the rows."""
    loss, pairs = configure(["kto"], {"beta": 0.5}), labelled_pairs()
    rows = [pairs[i] for i in order]
    noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(5)).double()
    trainer = RankTrainer(policy, loss)
    both = trainer.log_probs(pack(pairs, 10**6))["sum"]
    reference = {"sum": (both - noise.abs())[order]}
    probe = trainer.log_probs(pack([row.only("rejected") for row in rows], 10**6, micro))
    known, _ = loss.with_baseline(probe, reference, [0, 0.0])
    assert float(known["baseline"][0, 0]) > 0.1
    return step(policy, loss, pack([row.only("chosen") for row in rows], 10**6, micro), known)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_kto_does_not_depend_on_order_or_micro_batches(dtype: torch.dtype, limit: float) -> None:
    policy = small(dtype)
    expected = kto_step(policy, list(range(8)), 8)
    assert expected.gradient.norm() > 1e-3
    for micro in (1, 4, 8):
        for order in (list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4]):
            got = kto_step(policy, order, micro)
            difference = (got.gradient - expected.gradient).norm() / expected.gradient.norm()
            assert difference < limit
            assert got.sums == pytest.approx(expected.sums, rel=limit, abs=limit)
