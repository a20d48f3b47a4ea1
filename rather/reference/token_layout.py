"""Where the scored tokens of a step's responses are in the answers of the model, and how they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.data.batch import PairBatch

Places = NDArray[np.int64]


@dataclass(frozen=True)
class TokenLayout:
    """For every scored token of every computed response: where it lies in the answer, and where it counts."""

    token: Tensor
    cell: Tensor
    within: Tensor  # 1 within the scored length of the pair's shorter response, else 0

    @staticmethod
    def of(lengths: Places, bins: Sequence[Places], source: Places) -> TokenLayout:
        order = np.concatenate(bins)
        starts = np.zeros(len(lengths), np.int64)
        starts[order] = lengths[order].cumsum() - lengths[order]
        cells = np.sort(order)
        counts = lengths[cells]
        place = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(
            counts
        )  # within its response
        cell = cells.repeat(counts)
        shorter = lengths.reshape(-1, 2).min(axis=1).repeat(2)
        within = (place < shorter[cell]).astype(np.float64)
        return TokenLayout(
            *(torch.from_numpy(x) for x in (starts[source[cell]] + place, cell, within))
        )


def cells_of(batch: PairBatch) -> Places:
    """Which responses of the step a micro-batch holds, in its order: 2 x the pair, + 1 for the rejected one."""
    return (2 * batch.pair_P.numpy()[:, None] + [0, 1]).reshape(-1)


def token_by_token(batches: Sequence[PairBatch]) -> list[PairBatch]:
    """The same micro-batches with each scored token as a pair of its own, so that its sum is the token's log-prob."""
    views, start = [], 0
    for batch in batches:
        count = len(batch.cell_T)
        views.append(
            replace(
                batch,
                cell_T=torch.arange(0, 2 * count, 2),
                length_P2=torch.zeros(count, 2, dtype=torch.float64),
                pair_P=torch.arange(start, start + count),
            )
        )
        start += count
    return views


def sum_by_cell(values: Tensor, cell: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, cell, values)
