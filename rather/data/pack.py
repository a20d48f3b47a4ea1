"""Pairs of one optimizer step -> micro-batches under a token budget, in which nothing is computed twice.

Bins never cross an optimizer step, so the budget changes speed and memory, never the result. A pair is never
split: one that is larger than the budget gets a bin of its own size.

Pairs with the same prompt form a unit. Its sequences are a tree: each new response leaves an earlier one where their
tokens differ, and only what follows is laid out. So each token of the tree stands at one place, and is scored once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rather.data.batch import PairBatch, Segments, TokenPair

Ids = NDArray[np.int64]

FILLER_SEGMENT = (
    256  # the longest segment of fillers, so that attention over them costs next to nothing
)


def pack(
    pairs: Sequence[TokenPair],
    budget: int,
    max_pairs: int | None = None,
    *,
    ladder: int = 0,
    ranks: int = 1,
) -> list[PairBatch]:
    """All pairs of one step as micro-batches of at most `budget` tokens and `max_pairs` pairs.

    With a ladder each is filled up to a size that is a multiple of it, the smallest that serves the step: few sizes,
    each of which is compiled once. Their number is a multiple of `ranks`; what is missing are batches without pairs.
    """
    units = list(_units(pairs, budget, max_pairs))
    sizes, counts = [unit.tokens for unit in units], [len(unit.places) for unit in units]
    if ladder:
        filled = _on_the_ladder(sizes, counts, budget, max_pairs, min(ladder, budget), ranks)
    else:
        filled = [
            (0, members) for members in _best_fit(sizes, counts, max_pairs, further=budget) or []
        ]
    filled += [(ladder or 1, [])] * (-len(filled) % ranks)
    return [_packed(pairs, [units[i] for i in members], size) for size, members in filled]


def fill(batches: Sequence[PairBatch]) -> float:
    """The share of tokens that are not fillers."""
    return sum(batch.real_tokens for batch in batches) / sum(len(batch.ids_N) for batch in batches)


# --- which units lie in one bin ---


def bins(sizes: Sequence[int], budget: int, max_pairs: int | None = None) -> list[list[int]]:
    """Best fit, largest first: the fullest bin that still has room. Deterministic; places stay in step order."""
    return _best_fit(sizes, [1] * len(sizes), max_pairs, further=budget) or []


def _best_fit(
    sizes: Sequence[int],
    counts: Sequence[int],
    max_pairs: int | None,
    opened: Sequence[int] = (),
    further: int = 0,
) -> list[list[int]] | None:
    """Units of these sizes and pair counts in bins of the sizes `opened`, then in further ones; None if too much."""
    members: list[list[int]] = [[] for _ in opened]
    pairs = [0] * len(opened)
    rooms = sorted((room, i) for i, room in enumerate(opened))
    most = inf if max_pairs is None else max_pairs
    for unit in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(rooms, (sizes[unit], -1))
        while at < len(rooms) and pairs[rooms[at][1]] + counts[unit] > most:
            at += 1
        if at < len(rooms):
            room, place = rooms.pop(at)
        elif further:
            room, place = further, len(members)
            members.append([])
            pairs.append(0)
        else:
            return None
        members[place].append(unit)
        pairs[place] += counts[unit]
        insort(rooms, (room - sizes[unit], place))
    return [sorted(each) for each in members]


def _on_the_ladder(
    sizes: Sequence[int],
    counts: Sequence[int],
    budget: int,
    max_pairs: int | None,
    ladder: int,
    ranks: int,
) -> list[tuple[int, list[int]]]:
    """(size, units) of each bin: as few bins as can be, of the smallest sizes into which best fit puts all units."""
    top = budget // ladder * ladder
    alone = [(-(-size // ladder) * ladder, [i]) for i, size in enumerate(sizes) if size > top]
    small = [i for i, size in enumerate(sizes) if size <= top]
    if not small:
        return alone
    small_sizes, small_counts = [sizes[i] for i in small], [counts[i] for i in small]
    tokens, pairs = sum(small_sizes), sum(small_counts)
    number = max(-(-tokens // top), -(-pairs // (max_pairs or pairs)))
    while True:
        number += -(number + len(alone)) % ranks
        least = max(*small_sizes, -(-tokens // number))
        for shape in _shapes(number, range(-(-least // ladder) * ladder, top + 1, ladder), ranks):
            filled = (
                _best_fit(small_sizes, small_counts, max_pairs, shape)
                if sum(shape) >= tokens
                else None
            )
            if filled is not None:
                members = [[small[i] for i in each] for each in filled]
                return alone + [each for each in zip(shape, members, strict=True) if each[1]]
        number += 1


def _shapes(number: int, sizes: range, ranks: int) -> Iterator[list[int]]:
    """Sizes of `number` bins, ascending: some of one size, the others a rung below.

    With one size alone, four bins would waste up to four rungs. What the ranks do at a time is of one size.
    """
    several = (
        -(-number // (8 * ranks)) * ranks
    )  # at most 8 shapes a size, so that the search stays short
    for size in sizes:
        for larger in (*range(several, number, several), number):
            yield [size] * larger + [size - sizes.step] * (number - larger)


# --- which tokens several sequences share ---


class _Branch(NamedTuple):
    """A response that leaves an earlier one of its unit after `shared` tokens; the first of a unit leaves none."""

    response: NDArray[np.int32]
    earlier: int
    shared: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Pairs with one prompt and the tree of their sequences."""

    places: Sequence[int]
    branches: Sequence[_Branch]
    sides: Sequence[
        int
    ]  # the branches of the first pair's chosen and rejected response, the second pair's, ...
    tokens: int


def _units(pairs: Sequence[TokenPair], budget: int, max_pairs: int | None) -> Iterator[_Unit]:
    """Pairs by their prompts, in step order. A unit that is too large is halved; a single pair is never split."""
    prompts: dict[bytes | int, list[int]] = {}
    for place, pair in enumerate(pairs):
        # Nothing in common is no reason to lie together.
        prompts.setdefault(pair.prompt.tobytes() if len(pair.prompt) else place, []).append(place)
    for places in prompts.values():
        yield from _small_enough(pairs, places, budget, max_pairs or len(pairs))


def _small_enough(
    pairs: Sequence[TokenPair], places: Sequence[int], budget: int, max_pairs: int
) -> Iterator[_Unit]:
    unit = _unit(pairs, places)
    if len(places) == 1 or (unit.tokens <= budget and len(places) <= max_pairs):
        yield unit
        return
    half = (len(places) + 1) // 2
    yield from _small_enough(pairs, places[:half], budget, max_pairs)
    yield from _small_enough(pairs, places[half:], budget, max_pairs)


def _unit(pairs: Sequence[TokenPair], places: Sequence[int]) -> _Unit:
    branches: list[_Branch] = []
    known: dict[bytes, int] = {}
    ordered: list[bytes] = []  # neighbours in this order begin alike the longest
    sides: list[int] = []
    tokens = len(pairs[places[0]].prompt)
    for place in places:
        for response in (pairs[place].chosen, pairs[place].rejected):
            key = response.tobytes()
            if key not in known:
                at = bisect_left(ordered, key)
                shared, earlier = 0, 0
                for near in ordered[max(0, at - 1) : at + 1]:
                    common = _common(response, branches[known[near]].response)
                    if common > shared:
                        shared, earlier = common, known[near]
                ordered.insert(at, key)
                known[key] = len(branches)
                branches.append(_Branch(response, earlier, shared))
                tokens += len(response) - shared
            sides.append(known[key])
    return _Unit(places, branches, sides, tokens)


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    if not length or one[0] != other[0]:
        return 0
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


# --- a bin as tensors ---


class _Layout:
    """The tokens of one bin while it is filled from left to right."""

    def __init__(self, size: int) -> None:
        self.count = np.arange(size)
        self.before = (
            self.count - 1
        )  # the place whose hidden state predicts a token; -1 where nothing does
        self.start = 0
        self.ids: list[NDArray[np.int32]] = []
        self.positions: list[Ids] = []
        self.keys: list[Ids] = []
        self.q_lens: list[int] = []

    def add(self, ids: Sequence[NDArray[np.int32]], beginning: Ids | None = None) -> Ids:
        """Lays out tokens that follow those at the places `beginning`; the places of the whole sequence."""
        start, end = self.start, self.start + sum(map(len, ids))
        path = self.count[start:end]
        shared = 0 if beginning is None else len(beginning)
        if beginning is not None and shared:
            path = np.concatenate([beginning, path])
        if end > start:
            self.ids += ids
            self.positions.append(self.count[shared : shared + end - start])
            self.keys.append(path)
            self.q_lens.append(end - start)
            self.before[start] = path[shared - 1] if shared else -1
            self.start = end
        return path

    def add_unit(self, prompt: NDArray[np.int32], branches: Sequence[_Branch]) -> list[Ids]:
        """The places of each branch's sequence. The prompt's queries ride with the first response."""
        paths = [self.add((prompt, branches[0].response))]
        for response, earlier, shared in branches[1:]:
            paths.append(self.add((response[shared:],), paths[earlier][: len(prompt) + shared]))
        return paths

    def fill_up(self) -> None:
        while left := len(self.count) - self.start:
            self.add((np.zeros(min(left, FILLER_SEGMENT), np.int32),))

    def segments(self) -> Segments:
        return Segments.of(
            self.q_lens, [len(keys) for keys in self.keys], _tensor(np.concatenate(self.keys))
        )


def _packed(pairs: Sequence[TokenPair], units: Sequence[_Unit], size: int) -> PairBatch:
    real_tokens = sum(unit.tokens for unit in units)
    layout = _Layout(max(size, real_tokens))
    members: list[TokenPair] = []
    scored: list[Ids] = [layout.count[:0]]
    lengths: list[int] = []
    for unit in units:
        paths = layout.add_unit(pairs[unit.places[0]].prompt, unit.branches)
        for place, chosen, rejected in zip(
            unit.places, unit.sides[::2], unit.sides[1::2], strict=True
        ):
            pair = pairs[place]
            members.append(pair)
            for path, spans in (
                (paths[chosen], pair.chosen_scored),
                (paths[rejected], pair.rejected_scored),
            ):
                length = 0
                for first, end in spans:
                    scored.append(path[first:end])
                    length += end - first
                lengths.append(length)
    layout.fill_up()
    ids = np.concatenate(layout.ids, dtype=np.int64)
    return PairBatch(
        ids_N=_tensor(ids),
        positions_N=_tensor(np.concatenate(layout.positions)),
        segments=layout.segments(),
        **_scored_tokens(
            np.concatenate(scored), np.asarray(lengths, dtype=np.int64), ids, layout.before
        ),
        weight_P=_tensor(np.asarray([pair.weight for pair in members], dtype=np.float64)),
        margin_P=_tensor(np.asarray([pair.margin for pair in members], dtype=np.float64)),
        soft_label_P=_tensor(np.asarray([pair.soft_label for pair in members], dtype=np.float64)),
        pair_P=_tensor(
            np.asarray([place for unit in units for place in unit.places], dtype=np.int64)
        ),
        real_tokens=real_tokens,
    )


def _scored_tokens(places: Ids, lengths: Ids, ids: Ids, before: Ids) -> dict[str, Any]:
    """Of the places at which tokens count, response after response: each place once, and where it counts."""
    assert len(places) == lengths.sum(), "a scored span leaves its sequence"
    longer_by = lengths - lengths.reshape(-1, 2).min(axis=1).repeat(2)
    shared = np.ones(len(places))
    for end, excess in zip(lengths.cumsum().tolist(), longer_by.tolist(), strict=True):
        shared[end - excess : end] = 0
    hit = np.zeros(len(ids), dtype=bool)
    hit[places] = True
    unique = np.flatnonzero(hit)
    number = np.empty(len(ids), dtype=np.int64)
    number[unique] = np.arange(len(unique))
    rows = before.take(unique)
    assert (rows >= 0).all(), "nothing predicts the first token"
    return {
        "rows_U": _tensor(rows),
        "targets_U": _tensor(ids.take(unique)),
        "token_T": _tensor(number.take(places)),
        "cell_T": _tensor(np.arange(len(lengths)).repeat(lengths)),
        "shared_T": _tensor(shared),
        "length_P2": _tensor(lengths.reshape(-1, 2).astype(np.float64)),
    }


def _tensor(array: NDArray[np.int64] | NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
