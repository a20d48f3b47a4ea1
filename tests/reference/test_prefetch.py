"""Prefetched items: the same ones, in order, no more than allowed, errors included."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rather.pipeline.steps import ahead


def threads() -> int:
    return sum(thread.name == "ahead" for thread in threading.enumerate())


def test_the_same_items_in_order() -> None:
    assert list(ahead(iter(range(100)), 2)) == list(range(100))
    assert list(ahead([], 2)) == []
    assert threads() == 0


def test_the_next_item_is_made_while_the_last_one_is_used() -> None:
    made = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    taken = ahead(items(), 1)
    assert next(taken) == 0
    assert made[1].wait(60), "nobody asked for it yet"
    assert list(taken) == [1, 2]


def test_no_more_than_allowed_are_made_and_the_thread_ends_when_closed() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    taken = ahead(items(), 3)
    assert next(taken) == 0
    taken.close()
    assert threads() == 0
    assert len(made) <= 1 + 3


def test_an_error_comes_where_its_item_was_expected() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("broken pairs")

    taken = ahead(items(), 5)
    assert [next(taken), next(taken)] == [1, 2]
    with pytest.raises(ValueError, match="broken pairs"):
        next(taken)
    assert threads() == 0
