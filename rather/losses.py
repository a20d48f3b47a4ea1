"""The losses: one pure function each, PairLogps -> one loss per pair. A loss's signature is its schema.

`margins` are log-ratio differences: how much more the policy prefers the chosen answer than the reference does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.batch import PairLogps
from rather.errors import ConfigError

Loss = Callable[[PairLogps], Tensor]


def gap(chosen_and_rejected: Tensor) -> Tensor:
    """[P, 2] -> [P]: chosen minus rejected."""
    return chosen_and_rejected[:, 0] - chosen_and_rejected[:, 1]


def log_ratios(x: PairLogps) -> Tensor:
    """[P, 2]: log policy / reference of each answer."""
    assert x.reference is not None
    return x.policy - x.reference


def sigmoid(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """DPO (2305.18290 eq. 7); label_smoothing is the chance that a label is wrong (cDPO)."""
    margin = beta * gap(log_ratios(x))
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """IPO (2310.12036 eq. 17) on per-token averages; beta is the paper's tau."""
    return (gap(log_ratios(x) / x.length) - 1 / (2 * beta)) ** 2


LOSSES: Mapping[str, Callable[..., Tensor]] = {loss.__name__: loss for loss in (sigmoid, ipo)}


def configure(name: str, numbers: Mapping[str, float | None]) -> Loss:
    """The named loss with the user's numbers. One that the loss does not have is an error unless it is neutral."""
    numbers_of_loss = schema(name)
    foreign = [key for key, value in numbers.items() if value and key not in numbers_of_loss]
    if foreign:
        takes = " and ".join(numbers_of_loss)
        raise ConfigError([f"{key}: loss '{name}' takes {takes}; it has no {key}. Remove it." for key in foreign])
    return partial(
        LOSSES[name], **{k: v for k, v in numbers.items() if v is not None and k in numbers_of_loss}
    )


def schema(name: str) -> dict[str, Any]:
    """The numbers a loss takes, with their defaults, from its signature."""
    if name not in LOSSES:
        near = get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"the losses are {', '.join(sorted(LOSSES))}."
        raise ConfigError(f"pref_loss: unknown loss '{name}'; {hint}")
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def at_zero_margin(loss: Loss) -> float:
    """The loss of a pair on which policy and reference agree: ln 2 for sigmoid."""
    logps = torch.full((1, 2), -1.0, dtype=torch.float64)
    return float(loss(PairLogps(logps, logps, torch.ones_like(logps))))
