"""Packing: every pair once, limits kept, and every index right when it is looked up by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rather.batch import PairBatch, TokenPair
from rather.data.pack import bins, pack
from tests.padded import random_pairs

LIMITS = [(1, None), (40, None), (100, 2), (10**6, 3), (10**6, None)]


def sizes_of(seed: int, count: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(1, 120, count).tolist()


@pytest.mark.parametrize(("budget", "max_pairs"), LIMITS)
@pytest.mark.parametrize("seed", range(3))
def test_bins(seed: int, budget: int, max_pairs: int | None) -> None:
    sizes = sizes_of(seed)
    filled = bins(sizes, budget, max_pairs)
    assert sorted(place for members in filled for place in members) == list(range(len(sizes)))
    for members in filled:
        assert members == sorted(members)
        assert len(members) <= (max_pairs or len(sizes))
        assert len(members) == 1 or sum(sizes[i] for i in members) <= budget
    assert bins(sizes, budget, max_pairs) == filled


def test_bins_are_full() -> None:
    assert bins([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    sizes = sizes_of(0, 200)
    assert len(bins(sizes, 1000)) == -(-sum(sizes) // 1000)
    assert bins([], 10) == []


def test_a_pair_larger_than_the_budget_is_alone_and_whole() -> None:
    assert bins([3, 50, 4], 10) == [[1], [0, 2]]
    pair = random_pairs(1, 50)[0]
    (batch,) = pack([pair], budget=1)
    assert len(batch.ids_N) == pair.tokens


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


ODD_PAIRS = [
    # an empty prompt: the first token of an answer has nothing that predicts it
    TokenPair(ids(), ids(7, 8, 9), ids(4, 5), ((1, 3),), ((1, 2),), weight=0.5),
    # earlier turns inside the prompt are scored too, in both sequences
    TokenPair(ids(1, 2, 3, 4, 5, 6), ids(7, 8, 9), ids(10, 11), ((2, 4), (6, 8)), ((2, 4), (5, 8)), weight=2.0),
    # the common beginning reaches into the answers, so that nothing is left of one
    TokenPair(ids(1, 2, 3), ids(), ids(4, 5), ((2, 3),), ((2, 5),)),
]


def check_by_hand(batch: PairBatch, pairs: list[TokenPair]) -> None:
    """Each response's tokens, positions and scored tokens, found through the batch's own indices."""
    keys = batch.segments.key_index_K.split(list(batch.segments.k_lens))
    first_query = 0
    for response, (at, q_len) in enumerate(zip(keys, batch.segments.q_lens, strict=True)):
        pair = pairs[int(batch.pair_P[response // 2])]
        chosen = response % 2 == 0
        answer, scored = (pair.chosen, pair.chosen_scored) if chosen else (pair.rejected, pair.rejected_scored)
        sequence = np.concatenate([pair.prompt, answer]).tolist()
        assert batch.ids_N[at].tolist() == sequence
        assert batch.positions_N[at].tolist() == list(range(len(sequence)))
        # its own queries lie one after another and are the last keys that it sees
        assert at[len(at) - q_len :].tolist() == list(range(first_query, first_query + q_len))
        first_query += q_len
        hits = [place for first, end in scored for place in range(first, end)]
        mine = batch.response_T == response
        assert batch.targets_T[mine].tolist() == [sequence[place] for place in hits]
        assert batch.rows_T[mine].tolist() == [int(at[place - 1]) for place in hits]
        assert batch.length_R[response] == len(hits)
    assert first_query == len(batch.ids_N) == sum(pairs[i].tokens for i in batch.pair_P.tolist())
    assert batch.weight_P.tolist() == [pairs[i].weight for i in batch.pair_P.tolist()]
    assert batch.chosen_P.tolist() == list(range(0, 2 * len(batch.pair_P), 2))
    assert batch.rejected_P.tolist() == list(range(1, 2 * len(batch.pair_P), 2))


@pytest.mark.parametrize(("budget", "max_pairs"), LIMITS)
def test_every_index_by_hand(budget: int, max_pairs: int | None) -> None:
    pairs = [*random_pairs(9, 50, seed=4), *ODD_PAIRS]
    batches = pack(pairs, budget, max_pairs)
    assert sorted(torch.cat([batch.pair_P for batch in batches]).tolist()) == list(range(len(pairs)))
    for batch in batches:
        check_by_hand(batch, pairs)


def test_the_first_token_is_never_scored() -> None:
    with pytest.raises(AssertionError, match="nothing predicts the first token"):
        pack([TokenPair(ids(), ids(7, 8), ids(4, 5), ((0, 2),), ((1, 2),))], 100)


def test_nothing_is_changed_and_the_same_again() -> None:
    pairs = random_pairs(6, 50)
    before = [pair.prompt.copy() for pair in pairs]
    one, other = pack(pairs, 60), pack(pairs, 60)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.ids_N, b.ids_N)
        assert torch.equal(a.pair_P, b.pair_P)
    assert all(np.array_equal(pair.prompt, old) for pair, old in zip(pairs, before, strict=True))
