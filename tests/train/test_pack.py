"""Packing: every pair once, within its limits, and every index verified by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from rather.config.run_config import DPOConfig
from rather.data.batch import PairBatch, PromptImage, TokenPair
from rather.data.pack import best_fit, pack
from rather.data.prepare import prepare
from rather.data.sampler import Order
from tests.counting import lines_of
from tests.padded import fill, random_pairs, ranked_pairs

LIMITS = [(1, None), (40, None), (100, 2), (10**6, 3), (10**6, None)]


def sizes_of(seed: int, count: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(1, 120, count).tolist()


def bins(sizes: list[int], budget: int, max_pairs: int | None = None) -> list[list[int]]:
    return best_fit(sizes, [1] * len(sizes), max_pairs, further=budget)


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
    TokenPair(
        ids(1, 2, 3, 4, 5, 6),
        ids(7, 8, 9),
        ids(10, 11),
        ((2, 4), (6, 8)),
        ((2, 4), (5, 8)),
        weight=2.0,
    ),
    # the common beginning reaches into the answers, so that nothing is left of one
    TokenPair(ids(1, 2, 3), ids(), ids(4, 5), ((2, 3),), ((2, 5),)),
]


def seen_by(batch: PairBatch) -> list[list[int]]:
    """For each token the places of all tokens that it sees, its own last, by the definition of
    segments.
    """
    seen = []
    keys = batch.segments.key_index_K.split(list(batch.segments.k_lens))
    for at, q_len in zip(keys, batch.segments.q_lens, strict=True):
        seen += [at[: len(at) - q_len + query + 1].tolist() for query in range(q_len)]
    assert [places[-1] for places in seen] == list(range(len(batch.ids_N)))
    return seen


def check_by_hand(batch: PairBatch, pairs: list[TokenPair]) -> None:
    """Each scored token is predicted by a row that sees the tokens before it, in order, and
    nothing else.
    """
    seen, ids_N = seen_by(batch), batch.ids_N.tolist()
    assert [len(places) - 1 for places in seen] == batch.positions_N.tolist()
    counted = zip(
        batch.token_T.tolist(), batch.cell_T.tolist(), batch.shared_T.tolist(), strict=True
    )
    for place, pair in enumerate(pairs[i] for i in batch.pair_P.tolist()):
        spans = pair.chosen_scored, pair.rejected_scored
        hits = [[at for first, end in each for at in range(first, end)] for each in spans]
        assert batch.length_P2[place].tolist() == [len(hits[0]), len(hits[1])]
        for side, answer in enumerate((pair.chosen, pair.rejected)):
            sequence = [*pair.prompt.tolist(), *answer.tolist()]
            for number, at in enumerate(hits[side]):
                token, cell, shared = next(counted)
                assert cell == 2 * place + side
                assert shared == (number < min(map(len, hits)))
                assert int(batch.targets_U[token]) == sequence[at]
                assert [ids_N[i] for i in seen[int(batch.rows_U[token])]] == sequence[:at]
    assert next(counted, None) is None
    assert batch.weight_P.tolist() == [pairs[i].weight for i in batch.pair_P.tolist()]
    # no token is scored twice, and fillers are seen by no token and score nothing
    assert len({*zip(batch.rows_U.tolist(), batch.targets_U.tolist(), strict=True)}) == len(
        batch.rows_U
    )
    assert all(max(places) < batch.real_tokens for places in seen[: batch.real_tokens])
    assert all(min(places) >= batch.real_tokens for places in seen[batch.real_tokens :])
    assert all(row < batch.real_tokens for row in batch.rows_U.tolist())


@pytest.mark.parametrize(("budget", "max_pairs"), LIMITS)
@pytest.mark.parametrize(("ladder", "ranks"), [(0, 1), (32, 1), (0, 2), (16, 3), (16, 4), (0, 7)])
def test_every_index_by_hand(budget: int, max_pairs: int | None, ladder: int, ranks: int) -> None:
    pairs = [*random_pairs(9, 50, seed=4), *ODD_PAIRS, *ranked_pairs(50)]
    batches = pack(pairs, budget, max_pairs, ladder=ladder, ranks=ranks)
    assert len(batches) % ranks == 0
    places = torch.cat([batch.pair_P for batch in batches]).tolist()
    assert sorted(places) == list(range(len(pairs)))
    for batch in batches:
        check_by_hand(batch, pairs)
        assert len(batch.ids_N) >= 1
        assert len(batch.pair_P) <= (max_pairs or len(pairs))
        assert batch.real_tokens <= budget or len(batch.pair_P) == 1


def test_common_beginnings_are_laid_out_once() -> None:
    """Of all pairs with one prompt, each different beginning is one token; a prompt of nothing
    joins nothing.
    """
    pairs = [*ODD_PAIRS[:1] * 2, *ranked_pairs(50)]
    (batch,) = pack(pairs, 10**6)
    beginnings = {
        (tuple(pair.prompt), place * (len(pair.prompt) == 0), *([*pair.prompt, *answer][:end]))
        for place, pair in enumerate(pairs)
        for answer in (pair.chosen, pair.rejected)
        for end in range(1, len(pair.prompt) + len(answer) + 1)
    }
    assert batch.real_tokens == len(batch.ids_N) == len(beginnings)
    assert len(batch.rows_U) < len(batch.token_T)
    assert fill([batch]) == 1


def test_pairs_that_share_nothing_keep_their_order() -> None:
    """Prompt and chosen, then rejected: what runs that began without sharing were computed with."""
    pairs = random_pairs(5, 5000, seed=2)
    (batch,) = pack(pairs, 10**6)
    parts = [part for pair in pairs for part in (pair.prompt, pair.chosen, pair.rejected)]
    assert batch.ids_N.tolist() == np.concatenate(parts).tolist()
    assert batch.token_T.tolist() == list(range(len(batch.rows_U)))
    lengths = [(len(p.prompt), len(p.chosen), len(p.rejected)) for p in pairs]
    assert batch.segments.q_lens == [q for p, c, r in lengths for q in (p + c, r)]
    assert batch.segments.k_lens == [k for p, c, r in lengths for k in (p + c, p + r)]


def test_a_group_larger_than_the_budget_is_split_by_pairs() -> None:
    """In halves until each fits; a single pair is never split."""
    pairs = [
        replace(random_pairs(1, 50)[0], rejected=np.full(10 + i, 3 + i, np.int32)) for i in range(6)
    ]
    (whole,) = pack(pairs, 10**6)
    assert [batch.pair_P.tolist() for batch in pack(pairs, whole.real_tokens)] == [
        [0, 1, 2, 3, 4, 5]
    ]
    assert [batch.pair_P.tolist() for batch in pack(pairs, whole.real_tokens - 1)] == [
        [3, 4, 5],
        [0, 1, 2],
    ]
    assert [batch.pair_P.tolist() for batch in pack(pairs, 10**6, 3)] == [[3, 4, 5], [0, 1, 2]]
    assert [batch.pair_P.tolist() for batch in pack(pairs, 1)] == [[5], [4], [3], [2], [1], [0]]


def test_segment_tensors_of_the_kernel() -> None:
    (batch,) = pack(ranked_pairs(50), 10**6)
    s = batch.segments
    assert s.cu_q.tolist() == [0, *accumulate(s.q_lens)]
    assert s.cu_k.tolist() == [0, *accumulate(s.k_lens)]
    assert (s.max_q, s.max_k) == (max(s.q_lens), max(s.k_lens))
    assert len(s.start_N) == len(batch.ids_N) + 1
    for token, (first, end) in enumerate(pairwise(s.start_N.tolist())):
        uses = s.order_K[first:end].tolist()
        assert uses == (s.key_index_K == token).nonzero()[:, 0].tolist()
    assert {x.dtype for x in (s.cu_q, s.cu_k, s.order_K, s.start_N)} == {torch.int32}


# --- sizes on a ladder ---


def sized_pairs(count: int, random: np.random.Generator) -> list[TokenPair]:
    """Pairs of UltraFeedback-like lengths: lognormal, means 180/320/290, at most 1024."""
    means = np.log([180, 320, 290]) - 0.7**2 / 2
    lengths = np.clip(random.lognormal(means, 0.7, (count, 3)).round(), 1, 1024).astype(int)
    parts = [
        [random.integers(3, 32000, n).astype(np.int32) for n in row] for row in lengths.tolist()
    ]
    return [
        TokenPair(*ids, ((p, p + c),), ((p, p + r),))
        for ids, (p, c, r) in zip(parts, lengths.tolist(), strict=True)
    ]


@pytest.fixture(scope="module")
def steps() -> list[list[TokenPair]]:
    random = np.random.default_rng(0)
    return [sized_pairs(64, random) for _ in range(50)]


@pytest.mark.parametrize(
    ("ranks", "average", "least"), [(1, 0.985, 0.97), (2, 0.98, 0.96), (4, 0.97, 0.94)]
)
def test_bins_are_nearly_full(
    steps: list[list[TokenPair]], ranks: int, average: float, least: float
) -> None:
    packed = [pack(pairs, 16384, ladder=512, ranks=ranks) for pairs in steps]
    shares = [fill(batches) for batches in packed]
    assert np.mean(shares) >= average
    assert min(shares) >= least
    for batches, pairs in zip(packed, steps, strict=True):
        sizes = [len(batch.ids_N) for batch in batches]
        assert len(batches) == ranks * -(-sum(pair.tokens for pair in pairs) // (16384 * ranks))
        assert sizes == sorted(sizes, reverse=True)
        assert all(
            len({*sizes[first : first + ranks]}) == 1 for first in range(0, len(sizes), ranks)
        )
        assert sizes[0] - sizes[-1] <= 512
        assert sizes[0] <= 16384
        assert all(size % 512 == 0 for size in sizes)
    assert len({len(batch.ids_N) for batches in packed for batch in batches}) <= 12


def test_bins_of_real_pairs_are_nearly_full(team_data: Path, tmp_path: Path) -> None:
    config = DPOConfig.model_validate(
        {
            "output_dir": str(tmp_path),
            "pretrain": str(team_data / "tokenizers/smollm2"),
            "actor_train": {
                "data_args": {
                    "file_name": str(team_data / "pairs/ultrafeedback_train_clean.jsonl.gz")
                }
            },
        }
    )
    data = prepare(config).train
    order = Order(data.parts, 64, 0)
    whole_steps = [data.take(order.step(number)) for number in range(len(data) // 64)]
    for ranks, average in ((1, 0.98), (2, 0.98), (4, 0.97)):
        assert (
            np.mean([fill(pack(pairs, 16384, ladder=512, ranks=ranks)) for pairs in whole_steps])
            >= average
        )


def test_the_cost_of_packing_grows_with_the_pairs(steps: list[list[TokenPair]]) -> None:
    """Not with their square: four steps in one are four times the work, with a little for sorting."""
    together = [pair for pairs in steps[:4] for pair in pairs]
    once, fourfold = (
        lines_of(lambda pairs=pairs: pack(pairs, 16384, ladder=512))
        for pairs in (steps[0], together)
    )
    assert fourfold < 5 * once


def test_a_ladder_with_a_pair_that_is_too_large() -> None:
    pairs = random_pairs(8, 50, seed=1)
    large = max(range(8), key=lambda i: pairs[i].tokens)
    batches = pack(pairs, pairs[large].tokens - 1, ladder=10)
    alone = [batch for batch in batches if large in batch.pair_P.tolist()]
    assert [len(batch.ids_N) for batch in alone] == [-(-pairs[large].tokens // 10) * 10]
    assert all(len(batch.ids_N) % 10 == 0 for batch in batches)
    # a ladder beyond the budget is as high as the budget
    assert all(len(batch.ids_N) == 200 for batch in pack(pairs, 200, ladder=512))


def test_fillers_are_cheap_segments() -> None:
    (batch,) = pack(random_pairs(1, 50), 10**6, ladder=1000)
    fillers = len(batch.ids_N) - batch.real_tokens
    assert len(batch.ids_N) == 1000
    assert sum(batch.segments.q_lens[2:]) == sum(batch.segments.k_lens[2:]) == fillers
    assert max(batch.segments.q_lens[2:]) == 256


def test_moving_a_batch_moves_every_tensor() -> None:
    (batch,) = pack(random_pairs(2, 50), 10**6)
    moved = batch.to("meta")
    tensors = [*vars(moved).values(), *vars(moved.segments).values()]
    assert {x.device.type for x in tensors if isinstance(x, torch.Tensor)} == {"meta"}
    assert sum(isinstance(x, torch.Tensor) for x in tensors) == 21
    assert torch.equal(batch.pin_memory().ids_N, batch.ids_N)


def test_the_first_token_is_never_scored() -> None:
    with pytest.raises(AssertionError, match="nothing predicts the first token"):
        pack([TokenPair(ids(), ids(7, 8), ids(4, 5), ((0, 2),), ((1, 2),))], 100)


def test_packing_is_deterministic_and_changes_no_pair() -> None:
    pairs = random_pairs(6, 50)
    before = [pair.prompt.copy() for pair in pairs]
    one, other = pack(pairs, 60), pack(pairs, 60)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.ids_N, b.ids_N)
        assert torch.equal(a.pair_P, b.pair_P)
    assert all(np.array_equal(pair.prompt, old) for pair, old in zip(pairs, before, strict=True))


def test_prompts_with_other_images_are_never_merged() -> None:
    red, blue = (PromptImage(name, f"{name}.png", (1, 4, 4), 4) for name in ("red", "blue"))
    prompt = np.array([5, 7, 7, 7, 7, 6], np.int32)
    answers = [np.array(ids, np.int32) for ids in ([11, 12], [13])]
    spans = ((6, 8),), ((6, 7),)

    def pair(*images: PromptImage) -> TokenPair:
        return TokenPair(prompt, *answers, *spans, images=images)

    (merged,) = pack([pair(red), pair(red)], budget=100)
    (apart,) = pack([pair(red), pair(blue), pair()], budget=100)
    assert merged.real_tokens == 9
    assert merged.images == (red,)
    assert apart.real_tokens == 27
    assert apart.images == (red, blue)
    halves = pack([pair(red), pair(blue)] * 2, budget=1, max_pairs=1)
    assert [batch.images for batch in halves] == [(red,), (red,), (blue,), (blue,)]
    assert sum(int(batch.counted_N.sum()) for batch in halves) == 18  # each prompt counts once
