"""Losses of single answers with labels (`task: unpaired`).

a is log policy/reference of the answer. The label is x.extra["soft_label"], 1 or 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.data.batch import PairLogps
from rather.losses.losses import log_ratios, loss

Loss = Callable[[Tensor], Tensor]


def _loss(
    x: PairLogps, margin: Tensor, desirable: float, undesirable: float, of: Loss = torch.sigmoid
) -> Tensor:
    """Return the weighted loss `of` minus the margin; an undesirable answer has the opposite one."""
    label = x.extra["soft_label"]
    weight = desirable * label + undesirable * (1 - label)
    return weight * of(torch.where(label > 0.5, -margin, margin))


@loss(task="unpaired", extra=("soft_label",), baseline="kl")
def kto(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (2402.01306 eq. 8): 1 - sigmoid(beta (a - KL)), or 1 - sigmoid(beta (KL - a))."""
    margin = beta * (log_ratios(x)[:, 0] - x.extra["baseline"])
    return _loss(x, margin, desirable_weight, undesirable_weight)


@loss(task="unpaired", extra=("soft_label",), baseline="mean")
def bco(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """BCO (2404.04656 eq. 8): -log sigmoid(beta a - d), or of the opposite; d: mean reward."""
    margin = beta * log_ratios(x)[:, 0] - x.extra["baseline"]
    return _loss(x, margin, desirable_weight, undesirable_weight, lambda m: -logsigmoid(-m))


@loss(task="unpaired", extra=("soft_label",))
def apo_zero_unpaired(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero (2408.06266 eq. 4) on single answers: 1 - sigmoid(beta a), or sigmoid(beta a)."""
    return _loss(x, beta * log_ratios(x)[:, 0], desirable_weight, undesirable_weight)
