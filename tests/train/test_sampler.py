"""The order of pairs is a pure function of seed and epoch, and every epoch covers what it
should.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rather.config.run_config import DPOConfig
from rather.data.pack import pack
from rather.data.sampler import Order, Part
from rather.errors import CheckpointError
from rather.pipeline.pipeline import DPOPipeline
from tests.counting import lines_of
from tests.tiny import make_config, metrics

ONE: tuple[Part, ...] = ((0, 23, 1.0),)


def drawn(order: Order, epoch: int) -> list[list[int]]:
    """The steps of one epoch."""
    first = sum(map(order.steps_in, range(epoch)))
    return [order.step(number).tolist() for number in range(first, first + order.steps_in(epoch))]


def test_the_steps_of_an_epoch_are_disjoint_and_cover_it() -> None:
    order = Order(ONE, 5, 42)
    for epoch in range(3):
        steps = drawn(order, epoch)
        assert [len(step) for step in steps] == [5, 5, 5, 5, 3]
        assert sorted(chain.from_iterable(steps)) == list(range(23))


def test_a_pure_function_of_seed_and_step() -> None:
    """Asked in any order, by any object, after anything else was drawn."""
    want = [Order(ONE, 5, 42).step(number).tolist() for number in range(20)]
    np.random.seed(1)
    again = Order(ONE, 5, 42)
    assert {number: again.step(number).tolist() for number in (19, 3, 11, 0)} == {
        n: want[n] for n in (19, 3, 11, 0)
    }


def test_the_order_does_not_depend_on_the_batch() -> None:
    small, large = Order(ONE, 1, 42), Order(ONE, 23, 42)
    for epoch in range(2):
        assert [*chain.from_iterable(drawn(small, epoch))] == [
            *chain.from_iterable(drawn(large, epoch))
        ]


def test_epochs_and_seeds_differ() -> None:
    orders = {
        seed: [Order(ONE, 23, seed).step(epoch).tolist() for epoch in range(3)]
        for seed in (0, 1, 42)
    }
    every = [tuple(order) for epochs in orders.values() for order in epochs]
    assert len(set(every)) == len(every)
    assert tuple(range(23)) not in every


def test_mixing_weights() -> None:
    """A part of weight 2 comes twice in each epoch, one of 0.5 gives a fresh half."""
    order = Order(((0, 10, 1.0), (10, 16, 2.0), (16, 36, 0.5)), 8, 7)
    assert order.pairs_in(0) == 10 + 12 + 10
    halves = []
    for epoch in range(4):
        counts = Counter(order.epoch(epoch).tolist())
        assert all(counts[row] == 1 for row in range(10))
        assert all(counts[row] == 2 for row in range(10, 16))
        half = {row for row in range(16, 36) if counts[row]}
        assert len(half) == 10
        assert all(counts[row] == 1 for row in half)
        halves.append(frozenset(half))
    assert len(set(halves)) > 1
    assert frozenset.union(*halves) > halves[0]


def test_one_and_a_half_times() -> None:
    counts = Counter(Order(((0, 10, 1.5),), 4, 0).epoch(0).tolist())
    assert sorted(counts.values()) == [1] * 5 + [2] * 5


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(1.0, 5), (2.0, 10), (0.5, 3), (0.2, 1), (1.2, 6), (2.4, 12), (0.01, 1), (0.1 + 0.2, 2)],
)
def test_fractions_of_epochs(epochs: float, steps: int) -> None:
    """25 pairs in steps of 5: half an epoch needs 12.5 pairs, so 3 steps. Rounding makes none."""
    assert Order(((0, 25, 1.0),), 5, 0).steps(epochs) == steps
    assert Order(((0, 50, 1.0),), 5, 0).steps(1.1) == 11  # 1.1 - 1 is a little more than 0.1


def test_a_set_smaller_than_one_step() -> None:
    order = Order(((0, 3, 1.0),), 64, 0)
    assert order.steps_in(0) == 1
    assert order.steps(2.0) == 2
    assert sorted(order.step(1).tolist()) == [0, 1, 2]


def test_the_order_of_single_pairs_is_fixed() -> None:
    """Runs that began before groups go on as they were: these numbers may never change."""
    assert Order(ONE, 8, 42).step(4).tolist() == [0, 21, 6, 20, 7, 19, 14, 18]
    assert [Order(ONE, 5, 42).epoch_at(step) for step in (0, 1, 5, 12)] == [0.0, 0.2, 1.0, 2.4]
    assert [step for step in range(16) if Order(ONE, 5, 42).ends_epoch(step)] == [5, 10, 15]


# --- groups: pairs that stay together ---

SIZES = [6, 1, 3, 6, 6, 2, 1, 1, 6, 3, 3, 12, 1]
FIRST = np.concatenate([[0], np.cumsum(SIZES)[:-1]])


def grouped(
    batch: int = 8, *, parts: tuple[Part, ...] = ((0, sum(SIZES), 1.0),), seed: int = 42
) -> Order:
    return Order(parts, batch, seed, FIRST)


def group_of(rows: list[int]) -> list[int]:
    return (np.searchsorted(FIRST, rows, side="right") - 1).tolist()


@pytest.mark.parametrize("batch", [1, 4, 8, 100])
def test_a_step_takes_whole_groups_until_the_next_would_be_too_much(batch: int) -> None:
    order = grouped(batch)
    for epoch in range(3):
        steps = drawn(order, epoch)
        assert sorted(chain.from_iterable(steps)) == list(range(sum(SIZES)))
        for rows in steps:
            groups = list(dict.fromkeys(group_of(rows)))
            assert rows == [
                row for group in groups for row in range(FIRST[group], FIRST[group] + SIZES[group])
            ]
            assert len(rows) <= batch or len(groups) == 1
        for rows, following in pairwise(steps):
            assert len(rows) + SIZES[group_of(following)[0]] > batch
    assert drawn(order, 0) != drawn(order, 1)


def test_groups_are_a_pure_function_of_the_step() -> None:
    """Also where epochs have different numbers of steps."""
    counts = [grouped().steps_in(epoch) for epoch in range(8)]
    assert len(set(counts)) > 1
    want = [rows for epoch in range(8) for rows in drawn(grouped(), epoch)]
    again = grouped()
    assert [again.step(number).tolist() for number in reversed(range(len(want)))] == want[::-1]


def test_the_place_of_a_step_in_epochs_of_different_lengths() -> None:
    order = grouped()
    ends = np.cumsum([order.steps_in(epoch) for epoch in range(6)]).tolist()
    assert [step for step in range(ends[-1] + 1) if order.ends_epoch(step)] == ends
    assert [order.epoch_at(end) for end in ends] == [1, 2, 3, 4, 5, 6]
    assert order.epoch_at(ends[0] + 1) == 1 + 1 / order.steps_in(1)
    assert order.epoch_at(0) == 0
    assert order.place(ends[1]) == (2, 0)
    assert order.place(ends[1] - 1) == (1, order.steps_in(1) - 1)


def test_steps_of_epochs_with_groups() -> None:
    order = grouped()
    assert order.steps(2.0) == order.steps_in(0) + order.steps_in(1)
    part = order.steps(1.5) - order.steps(1.0)
    lengths = np.cumsum([len(rows) for rows in drawn(order, 1)])
    assert lengths[part - 1] >= sum(SIZES) / 2 > lengths[part - 2]
    assert order.steps(10**9, limit=20) == 20  # without counting them all
    assert order.steps(1.0, limit=3) == 3


def test_groups_of_one_pair_are_ignored() -> None:
    single = Order(ONE, 5, 42, np.arange(23))
    for step in range(12):
        assert single.step(step).tolist() == Order(ONE, 5, 42).step(step).tolist()
    assert [single.steps(epochs) for epochs in (0.5, 1.2, 3)] == [
        Order(ONE, 5, 42).steps(e) for e in (0.5, 1.2, 3)
    ]


def test_mixing_weights_count_groups() -> None:
    middle = int(FIRST[7])
    order = grouped(parts=((0, middle, 2.0), (middle, sum(SIZES), 0.5)))
    for epoch in range(3):
        rows = order.epoch(epoch).tolist()
        assert all(rows.count(row) == 2 for row in range(middle))
        rest = Counter(group_of([row for row in rows if row >= middle]))
        assert len(rest) == 3
        assert all(SIZES[group] == count for group, count in rest.items())
        assert order.pairs_in(epoch) == len(rows)


def test_a_million_rows_are_cut_at_once() -> None:
    """All rows of an epoch are cut by a few operations on arrays."""
    order = Order(((0, 10**6, 1.0),), 64, 0, np.arange(0, 10**6, 5))
    found: list[int] = []
    assert lines_of(lambda: found.append(len(order.step(order.steps(1.0) - 1)))) < 10**5
    assert found[0] % 5 == 0


# --- groups of a run ---


def ranked_config(folder: Path, **changes: Any) -> DPOConfig:
    """12 rows of three ranked answers, which give three pairs each, then 4 rows of one pair."""
    ranked = [
        {"prompt": f"w{i} w2", "responses": [" w1 w4", " w1 w5 w6", " w7"], "ranks": [1, 2, 3]}
        for i in range(12)
    ]
    plain = [{"prompt": f"w{i} w3", "chosen": " w8", "rejected": " w9"} for i in range(4)]
    files = {"ranked.jsonl": ranked, "plain.jsonl": plain}
    for name, rows in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    paths = [str(folder / name) for name in files]
    return make_config(
        folder, exp_name="ranked", **{"actor_train__data_args__file_name": paths, **changes}
    )


def test_pairs_of_one_row_come_in_one_step(shared: Path) -> None:
    pipeline = DPOPipeline(ranked_config(shared))
    data, order = pipeline.data.train, pipeline.source.order
    assert data.groups is not None
    assert data.groups.tolist() == [*range(0, 36, 3), *range(36, 40)]
    seen = Counter[bytes]()
    for number in range(order.steps_in(0)):
        pairs = data.take(order.step(number))
        assert len(pairs) <= 8
        seen.update({pair.prompt.tobytes() for pair in pairs})
        (batch,) = pack(pairs, 10**6)
        assert batch.real_tokens < sum(pair.tokens for pair in pairs)
    assert set(seen.values()) == {1}
    assert len(seen) == 16
    assert pipeline.identity["grouped responses"] is True


def test_groups_only_where_they_are_wanted_and_there(shared: Path) -> None:
    alone = DPOPipeline(ranked_config(shared, group_responses=False))
    assert alone.source.order.groups is None
    assert alone.source.order.steps_in(0) == 5
    plain = DPOPipeline(make_config(shared))
    assert plain.data.train.groups is None
    assert plain.source.order.groups is None
    for pipeline in (alone, plain):  # as runs that began before there were groups
        assert pipeline.identity["grouped responses"] is None


def test_a_run_with_groups_counts_its_epochs(shared: Path) -> None:
    config = ranked_config(shared, actor_train__training_args__num_train_epochs=2)
    pipeline = DPOPipeline(config)
    steps = [pipeline.source.order.steps_in(epoch) for epoch in (0, 1)]
    assert pipeline.total_steps == sum(steps) > 2 * 5
    assert pipeline.run() == 0
    lines = metrics(config)
    trained = [line for line in lines if "loss" in line]
    assert sum(line["pairs"] for line in trained) == 80
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    assert evaluated == [0, steps[0], sum(steps)]
    assert [line["epoch"] for line in lines if "eval/loss" in line] == [0, 1, 2]
    with pytest.raises(CheckpointError, match="grouped responses: True then, nothing now"):
        DPOPipeline(ranked_config(shared, group_responses=False)).run()
