"""Pairs of one optimizer step -> micro-batches under a token budget, each prompt once.

Bins never cross an optimizer step, so the budget changes speed and memory, never the result. A pair is never
split: one that is larger than the budget gets a bin of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rather.batch import PairBatch, Segments, Span, TokenPair

Ids = NDArray[np.int64]


def pack(pairs: Sequence[TokenPair], budget: int, max_pairs: int | None = None) -> list[PairBatch]:
    """All pairs of one step as micro-batches of at most `budget` tokens and `max_pairs` pairs."""
    sizes = [pair.tokens for pair in pairs]
    return [_packed(pairs, places) for places in bins(sizes, budget, max_pairs)]


def bins(sizes: Sequence[int], budget: int, max_pairs: int | None = None) -> list[list[int]]:
    """Best fit, largest first: the fullest bin that still has room. Deterministic; places stay in step order."""
    filled: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [
            (used, i)
            for i, (used, members) in enumerate(filled)
            if used + sizes[place] <= budget and (max_pairs is None or len(members) < max_pairs)
        ]
        if fitting:
            used, best = max(fitting, key=lambda fit: (fit[0], -fit[1]))
            filled[best] = (used + sizes[place], [*filled[best][1], place])
        else:
            filled.append((sizes[place], [place]))
    return [sorted(members) for _, members in filled]


def _packed(pairs: Sequence[TokenPair], places: Sequence[int]) -> PairBatch:
    ids: list[NDArray[np.int32]] = []
    positions: list[Ids] = []
    keys: list[Ids] = []
    q_lens: list[int] = []
    k_lens: list[int] = []
    rows: list[Ids] = []
    targets: list[Ids] = []
    lengths: list[int] = []
    shared: list[NDArray[np.float64]] = []
    start = 0
    for place in places:
        pair = pairs[place]
        p, c, r = len(pair.prompt), len(pair.chosen), len(pair.rejected)
        chosen_at = np.arange(start, start + p + c)  # where each token of prompt + chosen lies
        rejected_at = np.concatenate([chosen_at[:p], np.arange(start + p + c, start + p + c + r)])
        ids += [pair.prompt, pair.chosen, pair.rejected]
        positions += [np.arange(p + c), np.arange(p, p + r)]
        # The prompt's queries ride with the first response; the second sees the prompt's keys, then its own.
        q_lens += [p + c, r]
        k_lens += [p + c, p + r]
        keys += [chosen_at, rejected_at]
        hits = _positions(pair.chosen_scored), _positions(pair.rejected_scored)
        shorter = min(map(len, hits))
        for at, response, hit in ((chosen_at, pair.chosen, hits[0]), (rejected_at, pair.rejected, hits[1])):
            shared.append((np.arange(len(hit)) < shorter).astype(np.float64))
            assert (hit > 0).all(), "nothing predicts the first token"
            rows.append(at[hit - 1])  # the hidden state before a token predicts it
            targets.append(np.concatenate([pair.prompt, response])[hit].astype(np.int64))
            lengths.append(len(hit))
        start += p + c + r
    pair_count = len(places)
    return PairBatch(
        ids_N=_tensor(np.concatenate(ids).astype(np.int64)),
        positions_N=_tensor(np.concatenate(positions)),
        segments=Segments(tuple(q_lens), tuple(k_lens), _tensor(np.concatenate(keys))),
        rows_T=_tensor(np.concatenate(rows)),
        targets_T=_tensor(np.concatenate(targets)),
        response_T=_tensor(np.repeat(np.arange(2 * pair_count), lengths)),
        shared_T=_tensor(np.concatenate(shared)),
        length_R=_tensor(np.asarray(lengths, dtype=np.float64)),
        chosen_P=_tensor(np.arange(0, 2 * pair_count, 2)),
        rejected_P=_tensor(np.arange(1, 2 * pair_count, 2)),
        weight_P=_tensor(np.asarray([pairs[place].weight for place in places], dtype=np.float64)),
        margin_P=_tensor(np.asarray([pairs[place].margin for place in places], dtype=np.float64)),
        soft_label_P=_tensor(np.asarray([pairs[place].soft_label for place in places], dtype=np.float64)),
        pair_P=_tensor(np.asarray(places, dtype=np.int64)),
    )


def _positions(scored: Sequence[Span]) -> Ids:
    return np.concatenate([np.arange(first, end) for first, end in scored] or [np.arange(0)])


def _tensor(array: NDArray[np.int64] | NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
