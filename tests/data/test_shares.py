"""Micro-batches that are named by numbers: each rank packs its share, and a driver sends a few bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rather.cluster.worker import ActorWorker, RankInfo
from rather.data.batch import PairBatch, PairFacts, scored_lengths
from rather.data.pack import pack
from rather.data.pairs import Correction, PairDataset
from rather.data.prepare import prepare
from rather.data.shares import Batches, PairRows, RunPairs, share_of
from rather.errors import ConfigError
from rather.pipeline.steps import Packing, PreparedSteps
from tests.padded import random_pairs
from tests.tiny import make_config


def assert_equal(one: PairBatch, other: PairBatch) -> None:
    for name, value in vars(one).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-9), getattr(other, name).nan_to_num(-9)), name


def assert_all_equal(ones: Iterable[PairBatch], others: Iterable[PairBatch]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_are_the_packed_step_dealt_out(ranks: int) -> None:
    pairs = random_pairs(20, 40, seed=3)
    whole = pack(pairs, 120, ranks=2)
    named = Batches(pairs, 120, ranks=2)
    shares = [named.share(rank, ranks) for rank in range(ranks)]
    assert len({len(share.batches) for share in shares}) == 1
    dealt = [shares[i % ranks].batches[i // ranks] for i in range(len(whole))]
    assert_all_equal(whole, dealt)
    facts = PairFacts.of_step(whole)
    for share in shares:
        for one, other in zip(facts, share.facts, strict=True):
            assert torch.equal(one.nan_to_num(-9), other.nan_to_num(-9))
    given = [share_of(whole, rank, ranks) for rank in range(ranks)]
    for one_share, other_share in zip(given, shares, strict=True):
        assert_all_equal(one_share.batches, other_share.batches)


def test_only_micro_batches_with_a_wanted_pair_are_left() -> None:
    pairs = random_pairs(12, 40, seed=4)
    whole, wanted = pack(pairs, 100), np.arange(12) < 2
    share = Batches(pairs, 100).only(wanted).share(0, 1)
    left = [batch for batch in whole if wanted[batch.pair_P.numpy()].any()]
    assert 0 < len(left) < len(whole)
    assert_all_equal(left, share.batches)
    assert share.places is not None
    column = torch.arange(2.0 * len(share.places)).view(-1, 2)
    spread = share.spread({"sum": column})["sum"]
    assert torch.equal(spread[share.places], column)
    assert int(spread.isnan().all(1).sum()) == 12 - len(share.places)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PreparedSteps]:
    config = make_config(tmp_path_factory.mktemp("shares"))
    source = PreparedSteps.of(config, prepare(config))
    source.packing = Packing(config.actor_train, config.reference, "cpu", tokens={"train": 128})
    return config, source


def test_what_the_ledger_needs_of_pairs_is_known_without_reading_them(steps: Any) -> None:
    train = steps[1].data.train
    flips = {int(train.digests[5]): Correction(1, True)}
    some = PairDataset(train.file, "flipped", train.parts, np.arange(2, 20), flips)
    for dataset in (train, some):
        pairs, rows = dataset.take(range(len(dataset))), np.arange(len(dataset))[::-1]
        named = PairRows("train", rows, RunPairs({"train": dataset}, steps[1].order))
        assert np.array_equal(named.lengths, scored_lengths(pairs)[::-1])
        assert named.digests.tolist() == [pair.digest for pair in pairs][::-1]
    flipped = scored_lengths([train.take([5])[0]])[0, ::-1]
    assert some.scored[3].tolist() == flipped.tolist()


def test_a_step_travels_as_a_few_bytes(steps: Any) -> None:
    config, source = steps
    first = next(source.steps(0))
    sent = pickle.dumps(first.policy)
    assert len(first.policy) > 1  # packed here, and left out of what is sent
    assert len(pickle.dumps(first.policy)) == len(sent) < 600
    worker = ActorWorker(config, "actor_train", RankInfo(0, 1, "cpu"))
    worker.open_pairs(pickle.loads(pickle.dumps(source.pairs)))
    found = pickle.loads(sent).of(worker.pairs)
    assert_all_equal(first.policy, found)
    assert found.share(0, 1) is found.share(0, 1)  # packed once


def test_evaluation_sets_and_rows_are_named_too(steps: Any) -> None:
    _, source = steps
    rows = PairRows("eval/", np.array([3, 1]), source.pairs)
    again = pickle.loads(pickle.dumps(Batches(rows, 100))).of(source.pairs).pairs
    expected = source.data.evals[""].take([3, 1])
    for one, other in zip(expected, again, strict=True):
        assert np.array_equal(one.prompt, other.prompt)
    assert rows.tokens == sum(pair.tokens for pair in expected)


def test_a_machine_without_the_tokenised_data_is_named(steps: Any, tmp_path: Path) -> None:
    config, source = steps
    sent = pickle.loads(pickle.dumps(source.pairs))
    sent.sets["train"].file.path = tmp_path / "elsewhere.arrow"
    worker = ActorWorker(config, "actor_train", RankInfo(0, 1, "cpu"))
    with pytest.raises(ConfigError, match=r"data_args\.cache_dir: .+ cannot read .+elsewhere"):
        worker.open_pairs(sent)


def test_corrections_and_partners_travel_with_the_pairs(steps: Any) -> None:
    dataset = steps[1].pairs.sets["train"]
    flips = {int(dataset.digests[0]): Correction(flip=True)}
    corrected = PairDataset(dataset.file, "own", dataset.parts, dataset.rows, flips)
    joined = dataset.with_partners(seed=0, limit=1000)
    for here, changed in ((corrected, [0]), (joined, [0, 1])):
        there = pickle.loads(pickle.dumps(here))
        for i, (one, other) in enumerate(zip(here.take([0, 1]), there.take([0, 1]), strict=True)):
            assert np.array_equal(one.chosen, other.chosen)
            assert np.array_equal(one.answers[1][0], other.answers[1][0])
            (plain,) = dataset.take([i])
            assert np.array_equal(plain.rejected, other.answers[1][0]) == (i not in changed)
