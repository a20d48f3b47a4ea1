"""Metrics as weighted sums: kept on the device, added over micro-batches and steps, divided once per log line.

Every per-pair metric is in one table. Weights are the pairs' own, so no number depends on how pairs were batched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rather.batch import PairLogps
from rather.losses import gap, log_ratios


@dataclass(frozen=True)
class Scored:
    """What the metrics of a micro-batch are computed from."""

    x: PairLogps
    losses: Tensor  # [P]
    rewards: Tensor  # [P, 2]


PER_PAIR: Mapping[str, Callable[[Scored], Tensor]] = {
    "loss": lambda s: s.losses,
    "rewards/chosen": lambda s: s.rewards[:, 0],
    "rewards/rejected": lambda s: s.rewards[:, 1],
    "rewards/accuracies": lambda s: (s.rewards[:, 0] > s.rewards[:, 1]).double(),
    "rewards/ties": lambda s: (s.rewards[:, 0] == s.rewards[:, 1]).double(),
    "rewards/margins": lambda s: gap(s.rewards),
    "logps/chosen": lambda s: s.x.policy[:, 0],
    "logps/rejected": lambda s: s.x.policy[:, 1],
    "sft_loss": lambda s: -s.x.policy[:, 0] / s.x.length[:, 0],
}


def rewards(x: PairLogps, beta: float) -> Tensor:
    """[P, 2] implicit rewards: beta times the log-ratio of policy and reference."""
    return beta * log_ratios(x)


def weighted_sums(scored: Scored, weight_P: Tensor) -> Tensor:
    """[1 + metrics]: the sum of weights, then each metric's weighted sum, still on the device."""
    columns = [torch.ones_like(weight_P), *(metric(scored).detach() for metric in PER_PAIR.values())]
    return torch.stack(columns) @ weight_P


@dataclass
class Window:
    """Sums since the last log line. Part of the checkpoint, so that a line across a resume loses nothing."""

    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PER_PAIR, 0.0))
    pairs: int = 0
    tokens: int = 0
    skipped: int = 0

    def add(self, sums: Tensor, *, pairs: int, tokens: int, skipped: int = 0) -> None:
        weight, *values = sums.tolist()
        self.weight += weight
        for name, value in zip(PER_PAIR, values, strict=True):
            self.sums[name] += value
        self.pairs += pairs
        self.tokens += tokens
        self.skipped += skipped

    def means(self) -> dict[str, float]:
        return {name: total / self.weight if self.weight else math.nan for name, total in self.sums.items()}
