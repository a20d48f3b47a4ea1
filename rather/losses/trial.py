"""One call of a user's own loss or metric on made-up pairs, before anything slow is started.

A function that returns a mean, or a loss without a gradient, would otherwise fail in the first
step, after data and models were loaded.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from rather.data.batch import PairLogps
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.metrics import OF_A_LOSS, PER_PAIR, WITH_REFERENCE
from rather.losses.objective import PairLoss
from rather.losses.own import OwnMetric

PAIRS = 8
LOGGED = {*PER_PAIR, *WITH_REFERENCE, *OF_A_LOSS, "baseline", "calibrated_loss", "drift", "pairs"}


def try_own_losses(objective: PairLoss) -> None:
    """Call each loss that is not part of Rather once, or raise a ConfigError."""
    for term in objective.terms:
        if not LOSSES.is_own(term.name):
            continue
        x = made_up_pairs(with_reference=objective.needs_reference)
        subject = f"pref_loss: loss '{term.name}'"
        losses = _one_value_per_pair(subject, "loss", partial(objective.of, term, x))
        if not losses.requires_grad:
            raise ConfigError(
                f"{subject} has no gradient: it must be computed from x.policy with torch, without "
                ".detach(), .item() or torch.no_grad()."
            )


def try_own_metrics(metrics: Mapping[str, OwnMetric], *, with_reference: bool) -> None:
    """Call each metric once, or raise a ConfigError."""
    x = made_up_pairs(with_reference=with_reference)
    x = x._replace(policy=x.policy.detach())
    for name, metric in metrics.items():
        if name in LOGGED:
            raise ConfigError(f"metric '{name}': Rather logs a metric of that name; rename yours.")
        _one_value_per_pair(f"metric '{name}'", "value", partial(metric, x))


def made_up_pairs(*, with_reference: bool) -> PairLogps:
    """Return pairs as a loss sees them in training; no random number is drawn."""
    count = torch.arange(2.0 * PAIRS, dtype=torch.float64).reshape(PAIRS, 2)
    policy = (-20 - count).requires_grad_()
    ones = torch.ones(PAIRS, dtype=torch.float64)
    extra = {
        "margin": ones,
        "soft_label": torch.arange(PAIRS, dtype=torch.float64) % 2,
        "label": torch.arange(PAIRS, dtype=torch.float64) % 2,
        "score": ones,
        "baseline": 0 * ones,
        "group": torch.arange(PAIRS, dtype=torch.float64) // 4,
        "mean_chosen_length": ones[0] * 10,
    }
    for role in ("policy", "reference"):
        extra |= {f"{role}/{name}": -10 - count for name in ("shared", "squares")}
    return PairLogps(policy, -21 - count.flip(1) if with_reference else None, 10 + count, extra)


def _one_value_per_pair(subject: str, kind: str, call: Callable[[], Tensor]) -> Tensor:
    try:
        with torch.random.fork_rng(devices=[]):
            values = call()
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})"
        raise ConfigError(
            f"{subject} failed in a trial call with {PAIRS} pairs: {' '.join(text.split())}"
        ) from error
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != [PAIRS]:
        raise ConfigError(
            f"{subject} must return one {kind} per pair: a tensor of shape [{PAIRS}] for {PAIRS} "
            f"pairs, got {shape}; leave out .mean() or .sum()."
        )
    return values
