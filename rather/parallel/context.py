"""Context parallel: the ranks of a group divide the tokens of a micro-batch.

Each rank runs its own tokens through the model; inside attention it gathers the keys and values of
all (attention.py). A query segment that is cut keeps the keys up to its own end, so "causal from
the bottom right" still holds, and a sequence may be longer than any rank's share. Sums over scored
tokens are formed over the ranks (policy.py).

Tokens lie in twice as many chunks as there are ranks; rank r takes chunk r from the front and chunk
r from the back: late tokens of a long sequence see more keys than early ones, and so each rank gets
some of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.arithmetic import round_up
from rather.data.batch import PairBatch, Segments
from rather.data.pack import FILLER_SEGMENT
from rather.errors import ConfigError
from rather.model.attention import SpreadSegments
from rather.model.mixers import has_scans
from rather.model.policy import PolicyModel
from rather.parallel.mesh import Mesh

Places = NDArray[np.int64]


def spread_tokens(policy: PolicyModel, mesh: Mesh) -> None:
    """Make this policy compute its share of each micro-batch; called after the split over tp."""
    multiple = policy.token_parts
    if group := mesh.group("cp"):
        if has_scans(policy):
            raise ConfigError(
                f"cp_size: {mesh.size('cp')}: layers of '{policy.causal_lm.config.model_type}' "
                "carry a state from token to token, so ranks cannot divide the tokens of a "
                "sequence; set cp_size to 1"
            )
        policy.context = group.group_name
        policy.divide = partial(
            share_of,
            rank=mesh.rank("cp"),
            ranks=mesh.size("cp"),
            group=group.group_name,
            multiple=multiple,
        )
    elif multiple > 1:
        policy.divide = partial(filled_up, multiple=multiple)


def filled_up(batch: PairBatch, multiple: int) -> PairBatch:
    """Return the batch with filler tokens, so that their number is a multiple."""
    return filled_to(batch, round_up(len(batch.ids_N), multiple))


def filled_to(batch: PairBatch, tokens: int) -> PairBatch:
    """Return the same pairs, padded to this many tokens with unscored fillers at the end."""
    have = len(batch.ids_N)
    if have == tokens:
        return batch
    batch = batch.to("cpu")
    segments = batch.segments
    starts = range(have, tokens, FILLER_SEGMENT)
    filler_lengths = [min(FILLER_SEGMENT, tokens - first) for first in starts]
    return replace(
        batch,
        ids_N=torch.cat([batch.ids_N, batch.ids_N.new_zeros(tokens - have)]),
        positions_N=torch.cat([batch.positions_N, *map(torch.arange, filler_lengths)]),
        counted_N=torch.cat([batch.counted_N, batch.counted_N.new_zeros(tokens - have)]),
        segments=Segments.of(
            (*segments.q_lens, *filler_lengths),
            (*segments.k_lens, *filler_lengths),
            torch.cat([segments.key_index_K, torch.arange(have, tokens)]),
        ),
    )


def share_of(
    batch: PairBatch, *, rank: int, ranks: int, group: str, multiple: int = 1
) -> PairBatch:
    """Return one rank's tokens (a multiple of `multiple`) and the scored tokens they predict."""
    if isinstance(batch.segments, SpreadSegments):
        return batch
    batch = filled_up(batch.to("cpu"), 2 * ranks * multiple)
    chunks = np.arange(len(batch.ids_N)).reshape(2, ranks, -1)
    # All tokens in the order in which the ranks hold them.
    order = np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)
    own_tokens = order.reshape(ranks, -1)[rank]
    position = np.empty_like(order)  # of each token, rank after rank
    position[order] = np.arange(len(order))
    scored: dict[str, Any] = _own_scored(batch, position - rank * len(own_tokens), len(own_tokens))
    return replace(
        batch,
        ids_N=batch.ids_N[own_tokens],
        positions_N=batch.positions_N[own_tokens],
        counted_N=batch.counted_N[own_tokens],
        segments=_own_segments(batch.segments, own_tokens, position, group),
        real_tokens=int((own_tokens < batch.real_tokens).sum()),
        **scored,
    )


def _own_segments(segments: Segments, own: Places, place: Places, group: str) -> SpreadSegments:
    """Make a segment of each stretch of own tokens within a segment, with keys up to its end."""
    keys = place[segments.key_index_K.numpy()]
    half = len(own) // 2
    pieces = [
        piece for first in own[::half].tolist() for piece in _pieces(segments, first, first + half)
    ]
    index = np.concatenate([keys[begin:end] for _, begin, end in pieces])
    q_lens, k_lens = zip(*((q, end - begin) for q, begin, end in pieces), strict=True)
    cut = Segments.of(q_lens, k_lens, torch.from_numpy(index))
    starts = np.searchsorted(np.sort(index), np.arange(len(place) + 1))  # over all ranks' tokens
    fields = {**vars(cut), "start_N": torch.from_numpy(starts.astype(np.int32))}
    return SpreadSegments(**fields, group=group)


def _pieces(segments: Segments, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (queries, first key, end of keys) of each segment's part between two tokens."""
    q_start = k_start = 0
    for q, k in zip(segments.q_lens, segments.k_lens, strict=True):
        low = max(first, q_start)
        high = min(end, q_start + q)
        if low < high:
            yield high - low, k_start, k_start + k - q + high - q_start
        q_start, k_start = q_start + q, k_start + k


def _own_scored(batch: PairBatch, place: Places, tokens: int) -> dict[str, Tensor]:
    """Return the scored tokens of a rank: those that its hidden rows predict."""
    rows = place[batch.rows_U.numpy()]
    mine = (rows >= 0) & (rows < tokens)
    number = np.cumsum(mine) - 1
    counts = torch.from_numpy(mine[batch.token_T.numpy()])
    return {
        "rows_U": torch.from_numpy(rows[mine]),
        "targets_U": batch.targets_U[torch.from_numpy(mine)],
        "token_T": torch.from_numpy(number)[batch.token_T[counts]],
        "cell_T": batch.cell_T[counts],
        "shared_T": batch.shared_T[counts],
    }
