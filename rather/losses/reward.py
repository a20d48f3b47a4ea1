"""Losses of reward models (`task: reward`): x.policy holds scores instead of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.data.batch import PairLogps
from rather.losses.losses import gap, loss, sums


@loss(task="reward", reference=False, rewards=sums)
def bradley_terry(x: PairLogps, *, center_rewards_coefficient: float = 0.0) -> Tensor:
    """Reward model on pairs (2203.02155 eq. 1): -log sigmoid(chosen - rejected - margin)."""
    margin = torch.nan_to_num(x.extra["margin"])  # 0 for pairs without one
    return -logsigmoid(gap(x.policy) - margin) + center_rewards_coefficient * x.policy.sum(1) ** 2


@loss(task="reward", reference=False, rewards=sums, extra=("margin",))
def regression(x: PairLogps) -> Tensor:
    """Reward model on scored answers: the squared error of the score."""
    return (x.policy[:, 0] - x.extra["margin"]) ** 2
