"""Losses of single answers with labels (`task: unpaired`).

a is log policy/reference of the answer. The label is x.extra["soft_label"], 1 or 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.data.batch import PairLogps
from rather.losses.losses import log_ratios, loss


def _labelled(x: PairLogps, margin: Tensor) -> Tensor:
    """Return the margin of each answer, with the opposite sign if the answer is undesirable."""
    return torch.where(x.extra["soft_label"] > 0.5, margin, -margin)


def _weights(x: PairLogps, desirable: float, undesirable: float) -> Tensor:
    share = x.extra["soft_label"]
    return desirable * share + undesirable * (1 - share)


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
    return _weights(x, desirable_weight, undesirable_weight) * torch.sigmoid(-_labelled(x, margin))


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
    return _weights(x, desirable_weight, undesirable_weight) * -logsigmoid(_labelled(x, margin))


@loss(task="unpaired", extra=("soft_label",))
def apo_zero_unpaired(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero (2408.06266 eq. 4) on single answers: 1 - sigmoid(beta a), or sigmoid(beta a)."""
    margin = beta * log_ratios(x)[:, 0]
    return _weights(x, desirable_weight, undesirable_weight) * torch.sigmoid(-_labelled(x, margin))
