"""Context parallel: whatever the ranks' shares cut through, log-probs and gradients are those of one
process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.parallel.context import filled_up, share_of
from tests.model.test_families import FAMILIES, VOCAB
from tests.padded import random_pairs, ranked_pairs
from tests.same.against_whole import worst_difference
from tests.same.canonical import make_step, pairs_of
from tests.same.cases import TASKS
from tests.same.pool import pool

# --- shares, without any process ---


def shares(batch: PairBatch, ranks: int, multiple: int = 1) -> list[PairBatch]:
    return [
        share_of(batch, rank=rank, ranks=ranks, group="", multiple=multiple)
        for rank in range(ranks)
    ]


def one_long_sequence() -> list[TokenPair]:
    """Beside short ones: more tokens than two ranks' shares of four."""
    ids = np.random.default_rng(7).integers(3, VOCAB, 190).astype(np.int32)
    long = TokenPair(ids[:30], ids[30:180], ids[180:], ((30, 180),), ((30, 40),))
    return [*random_pairs(3, VOCAB, longest=8), long]


def seen(batch: PairBatch, tokens: torch.Tensor) -> list[list[int]]:
    """Of each token of a batch: the tokens that it sees, by their numbers in `tokens`."""
    found = []
    keys = batch.segments.key_index_K.split(batch.segments.k_lens)
    for q, own in zip(batch.segments.q_lens, keys, strict=True):
        found += [tokens[own[: len(own) - q + place + 1]].tolist() for place in range(q)]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "pairs", [one_long_sequence(), ranked_pairs(VOCAB)], ids=["long", "ranked"]
)
def test_shares_make_up_the_whole(pairs: list[TokenPair], ranks: int) -> None:
    (batch,) = pack(pairs, budget=10**6)
    whole, parts = filled_up(batch, 2 * ranks), shares(batch, ranks)
    assert len({len(part.ids_N) for part in parts}) == 1
    # Numbers that tell tokens apart travel as ids do.
    numbered = shares(_numbered(whole), ranks)
    order = torch.cat([part.ids_N for part in numbered])
    assert sorted(order.tolist()) == list(range(len(whole.ids_N)))
    expected = seen(whole, torch.arange(len(whole.ids_N)))
    for part, numbers in zip(parts, numbered, strict=True):
        assert seen(part, order) == [expected[token] for token in numbers.ids_N.tolist()]
        assert torch.equal(part.positions_N, whole.positions_N[numbers.ids_N])
    _every_scored_token_counts_once(whole, parts, numbered)
    assert sum(part.real_tokens for part in parts) == batch.real_tokens


def _numbered(batch: PairBatch) -> PairBatch:
    return batch.__class__(**{**vars(batch), "ids_N": torch.arange(len(batch.ids_N))})


def _every_scored_token_counts_once(
    whole: PairBatch, parts: list[PairBatch], numbered: list[PairBatch]
) -> None:
    def counted(batch: PairBatch, rows: torch.Tensor) -> list[tuple[int, ...]]:
        columns = (
            rows[batch.token_T],
            batch.targets_U[batch.token_T],
            batch.cell_T,
            batch.shared_T.long(),
        )
        return list(zip(*(column.tolist() for column in columns), strict=True))

    found = [
        each
        for part, n in zip(parts, numbered, strict=True)
        for each in counted(part, n.ids_N[part.rows_U])
    ]
    assert sorted(found) == sorted(counted(whole, whole.rows_U))


def test_requested_lengths_do_not_prevent_a_share() -> None:
    (batch,) = pack(one_long_sequence(), budget=10**6)
    for part in shares(batch, 2):
        assert sum(part.segments.q_lens) == len(part.ids_N)
        assert [int(n) for n in part.to("cpu").segments.k_lens] == part.segments.k_lens


def test_a_share_of_a_share_is_itself_and_fits_a_multiple() -> None:
    (batch,) = pack(one_long_sequence(), budget=10**6)
    for part in shares(batch, 2, multiple=3):
        assert len(part.ids_N) % 6 == 0
        assert share_of(part, rank=1, ranks=2, group="") is part


def test_ranks_get_about_the_same_attention_of_a_long_sequence() -> None:
    ids = np.full(4001, 5, np.int32)
    (batch,) = pack(
        [TokenPair(ids[:1], ids[1:4000], ids[:1], ((1, 4000),), ((1, 2),))], budget=10**6
    )
    costs = []
    for part in shares(batch, 4):
        lens = zip(part.segments.q_lens, part.segments.k_lens, strict=True)
        costs.append(sum(q * k - q * (q - 1) // 2 for q, k in lens))
    assert max(costs) < 1.01 * min(costs)


# --- on ranks ---


def differences(axes: dict[str, int]) -> dict[str, float]:
    long, ranked = one_long_sequence(), ranked_pairs(VOCAB)
    return {
        **{name: worst_difference(name, axes) for name in FAMILIES},
        "long": worst_difference("mistral-window", axes, pairs=long, budget=1000),
        "ranked": worst_difference("llama", axes, pairs=ranked, budget=1000),
        "recomputed": worst_difference("llama", axes, arranged={"recompute": "selective"}),
    }


@pytest.mark.wide
def test_every_family() -> None:
    for each in pool(4).run(differences, {"cp": 4}):
        assert max(each.values()) < 1e-4, each


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequences_of_the_compared_runs_are_longer_than_a_share(ranks: int) -> None:
    batches = [b for pairs in pairs_of(TASKS["many steps"]) for b in make_step(pairs, 1).dealt[0]]
    assert any(max(b.segments.k_lens) > -(-len(b.ids_N) // ranks) for b in batches)
