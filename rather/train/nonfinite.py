"""Why a step was not applied, and where the cause is. Searched only when it happens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rather.data.batch import PairBatch
from rather.parallel.mesh import gather_objects

# The float16 loss scale was too large; loss or gradient is not finite; it is above the limits; all
# pairs of the step have weight 0.
Reason = Literal["overflow", "nonfinite", "spike", "no_weight"]
MOST_LAYERS = 5


@dataclass(frozen=True)
class StepLimits:
    """The largest loss and gradient norm with which a step is applied."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss or grad_norm > self.grad_norm


NOTHING_PASSES = StepLimits(-math.inf, -math.inf)


@dataclass(frozen=True)
class NonFiniteReport:
    """Where NaN or Inf was found in a step; without `pairs`, only in the summed gradients."""

    pairs: list[int]  # by their place in the step
    ranks: list[int]
    layers: dict[str, float]  # norms of some gradients: non-finite ones, nearest to the loss first
    layers_lost: int  # the number of non-finite ones


def lost_pairs(
    numbers: Tensor, batches: Sequence[PairBatch], losses: Sequence[Tensor]
) -> list[int]:
    """Return the pairs with NaN or Inf; else those of micro-batches whose loss is not finite.

    `numbers` are log-probs and gradients by them, one row for each pair.
    """
    lost_by_number: list[int] = torch.nonzero(~numbers.isfinite().all(dim=1)).flatten().tolist()
    if lost_by_number or len(losses) != len(batches):
        return lost_by_number
    lost = [batch for batch, loss in zip(batches, losses, strict=True) if not loss.isfinite()]
    return sorted(pair for batch in lost for pair in batch.pair_P.tolist())


def nonfinite_report(
    pairs: list[int], norms: Mapping[str, float], *, alone: bool
) -> NonFiniteReport:
    """Combine what all ranks found, each in its own part. A collective, unless alone."""
    reports = [(pairs, norms)] if alone else gather_objects((pairs, norms))
    squares: defaultdict[str, float] = defaultdict(float)
    for _, norms_of_rank in reports:
        for name, norm in norms_of_rank.items():
            squares[name.removeprefix("causal_lm.")] += norm * norm
    layers = {name: math.sqrt(square) for name, square in squares.items()}
    lost = [name for name, norm in layers.items() if not math.isfinite(norm)]
    worst = lost[::-1] or sorted(layers, key=lambda name: layers[name], reverse=True)
    return NonFiniteReport(
        pairs=sorted({pair for pairs_of_rank, _ in reports for pair in pairs_of_rank}),
        ranks=[rank for rank, (pairs_of_rank, _) in enumerate(reports) if pairs_of_rank],
        layers={name: layers[name] for name in worst[:MOST_LAYERS]},
        layers_lost=len(lost),
    )
