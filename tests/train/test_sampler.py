"""The order of pairs is a pure function of seed and epoch, and every epoch covers what it should."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from rather.data.sampler import Order, Part, _epoch

ONE: tuple[Part, ...] = ((0, 23, 1.0),)


def drawn(order: Order, epoch: int) -> list[list[int]]:
    """The steps of one epoch."""
    first = epoch * order.steps_per_epoch
    return [order.step(number).tolist() for number in range(first, first + order.steps_per_epoch)]


def test_the_steps_of_an_epoch_are_disjoint_and_cover_it() -> None:
    order = Order(ONE, 5, 42)
    for epoch in range(3):
        steps = drawn(order, epoch)
        assert [len(step) for step in steps] == [5, 5, 5, 5, 3]
        assert sorted(chain.from_iterable(steps)) == list(range(23))


def test_a_pure_function_of_seed_and_step() -> None:
    """Asked in any order, by any object, after anything else was drawn."""
    want = [Order(ONE, 5, 42).step(number).tolist() for number in range(20)]
    _epoch.cache_clear()
    np.random.seed(1)
    again = Order(ONE, 5, 42)
    assert {number: again.step(number).tolist() for number in (19, 3, 11, 0)} == {n: want[n] for n in (19, 3, 11, 0)}


def test_the_order_does_not_depend_on_the_batch() -> None:
    small, large = Order(ONE, 1, 42), Order(ONE, 23, 42)
    for epoch in range(2):
        assert [*chain.from_iterable(drawn(small, epoch))] == [*chain.from_iterable(drawn(large, epoch))]


def test_epochs_and_seeds_differ() -> None:
    orders = {seed: [Order(ONE, 23, seed).step(epoch).tolist() for epoch in range(3)] for seed in (0, 1, 42)}
    every = [tuple(order) for epochs in orders.values() for order in epochs]
    assert len(set(every)) == len(every)
    assert tuple(range(23)) not in every


def test_mixing_weights() -> None:
    """A part of weight 2 comes twice in each epoch, one of 0.5 gives a fresh half."""
    order = Order(((0, 10, 1.0), (10, 16, 2.0), (16, 36, 0.5)), 8, 7)
    assert order.pairs_per_epoch == 10 + 12 + 10
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
    """25 pairs in steps of 5: half an epoch needs 12.5 pairs, so 3 steps."""
    assert Order(((0, 25, 1.0),), 5, 0).steps(epochs) == steps


def test_rounding_makes_no_step() -> None:
    """1.1 - 1 is a little more than 0.1 in floating point."""
    assert Order(((0, 50, 1.0),), 5, 0).steps(1.1) == 11


def test_a_set_smaller_than_one_step() -> None:
    order = Order(((0, 3, 1.0),), 64, 0)
    assert order.steps_per_epoch == 1
    assert order.steps(2.0) == 2
    assert sorted(order.step(1).tolist()) == [0, 1, 2]
