"""Packs the pairs of one optimizer step into micro-batches; nothing is computed twice.

Bins never cross an optimizer step, so the budget changes speed and memory, never the result. A
pair is never split: one that is larger than the budget gets a bin of its own size.

Pairs with the same prompt form a unit. Its sequences are a tree: each new response branches off an
earlier one where their tokens differ, and only the rest is laid out. So each token of the tree has
one place, and is scored once.
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

Places = NDArray[np.int64]
Tokens = NDArray[np.int32]

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
    """Return the pairs of one step as micro-batches of at most `budget` tokens, `max_pairs` pairs.

    With a ladder each is filled up to a multiple of it, the smallest that fits the step: few
    sizes, each of which is compiled once. The number of batches is a multiple of `ranks`; the
    missing ones have no pairs.
    """
    units = list(_units(pairs, budget, max_pairs or len(pairs)))
    sizes, counts = [unit.tokens for unit in units], [len(unit.places) for unit in units]
    if ladder:
        filled = _on_the_ladder(sizes, counts, budget, max_pairs, min(ladder, budget), ranks)
    else:
        filled = [(0, members) for members in best_fit(sizes, counts, max_pairs, further=budget)]
    filled += [(ladder or 1, [])] * (-len(filled) % ranks)
    return [_pack_bin(pairs, [units[i] for i in members], size) for size, members in filled]


# --- which units share a bin ---


def best_fit(
    sizes: Sequence[int],
    counts: Sequence[int],
    max_pairs: int | None,
    opened: Sequence[int] = (),
    further: int = 0,
) -> list[list[int]]:
    """Put each unit, largest first, into the fullest bin with room; members stay in step order.

    Bins have the sizes `opened`, then `further`; without `further`, return [] if the opened ones
    do not suffice.
    """
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
            return []
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
    """Return (size, units) of as few bins as possible, of the smallest sizes into which best fit
    puts all units.
    """
    top = budget // ladder * ladder
    alone = [(-(-size // ladder) * ladder, [i]) for i, size in enumerate(sizes) if size > top]
    small = [i for i, size in enumerate(sizes) if size <= top]
    if not small:
        return alone
    sizes, counts = [sizes[i] for i in small], [counts[i] for i in small]
    tokens, pairs = sum(sizes), sum(counts)
    number = max(-(-tokens // top), -(-pairs // (max_pairs or pairs)))
    while True:
        number += -(number + len(alone)) % ranks
        least = max(*sizes, -(-tokens // number))
        for shape in _shapes(number, range(-(-least // ladder) * ladder, top + 1, ladder), ranks):
            filled = best_fit(sizes, counts, max_pairs, shape) if sum(shape) >= tokens else []
            if filled:
                members = [[small[i] for i in each] for each in filled]
                return alone + [each for each in zip(shape, members, strict=True) if each[1]]
        number += 1


def _shapes(number: int, sizes: range, ranks: int) -> Iterator[list[int]]:
    """Yield sizes of `number` bins, ascending: some of one size, the others one rung below.

    With one size alone, four bins would waste up to four rungs. All ranks work on one size at a
    time.
    """
    several = -(-number // (8 * ranks)) * ranks  # at most 8 shapes per size keep the search short
    for size in sizes:
        for larger in (*range(several, number, several), number):
            yield [size] * larger + [size - sizes.step] * (number - larger)


# --- which tokens several sequences share ---


class _Branch(NamedTuple):
    """A response that branches off an earlier one of its unit after `shared` tokens; the first one
    shares none.
    """

    response: Tokens
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


def _units(pairs: Sequence[TokenPair], budget: int, max_pairs: int) -> Iterator[_Unit]:
    """Yield pairs by their prompts, in step order."""
    prompts: dict[bytes | int, list[int]] = {}
    for place, pair in enumerate(pairs):
        # Pairs without a prompt have nothing in common, so each is a unit of its own.
        prompts.setdefault(pair.prompt.tobytes() or place, []).append(place)
    for places in prompts.values():
        yield from _split(pairs, places, budget, max_pairs)


def _split(
    pairs: Sequence[TokenPair], places: Sequence[int], budget: int, max_pairs: int
) -> Iterator[_Unit]:
    """Yield one unit, or its halves if it is too large; a single pair is never split."""
    unit = _unit(pairs, places)
    if len(places) == 1 or (unit.tokens <= budget and len(places) <= max_pairs):
        yield unit
        return
    half = (len(places) + 1) // 2
    for part in (places[:half], places[half:]):
        yield from _split(pairs, part, budget, max_pairs)


def _unit(pairs: Sequence[TokenPair], places: Sequence[int]) -> _Unit:
    branches: list[_Branch] = []
    known: dict[bytes, int] = {}
    ordered: list[bytes] = []  # neighbours in this order have the longest common beginnings
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


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens both begin with."""
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
        self.before = self.count - 1  # the place whose hidden state predicts a token; -1: none does
        self.start = 0
        self.ids: list[Tokens] = []
        self.positions: list[Places] = []
        self.keys: list[Places] = []
        self.q_lens: list[int] = []

    def add(self, ids: Sequence[Tokens], beginning: Places) -> Places:
        """Lay out tokens that follow those at the places `beginning`; return the places of the
        whole sequence.
        """
        start, end, shared = self.start, self.start + sum(map(len, ids)), len(beginning)
        path = (
            np.concatenate([beginning, self.count[start:end]]) if shared else self.count[start:end]
        )
        if end > start:
            self.ids += ids
            self.positions.append(self.count[shared : shared + end - start])
            self.keys.append(path)
            self.q_lens.append(end - start)
            self.before[start] = path[shared - 1] if shared else -1
            self.start = end
        return path

    def add_unit(self, prompt: Tokens, branches: Sequence[_Branch]) -> list[Places]:
        """Return the places of each branch's sequence.

        The prompt's queries belong to the first response's segment.
        """
        paths = [self.add((prompt, branches[0].response), self.count[:0])]
        for response, earlier, shared in branches[1:]:
            paths.append(self.add((response[shared:],), paths[earlier][: len(prompt) + shared]))
        return paths

    def fill_up(self) -> None:
        while left := len(self.count) - self.start:
            self.add((np.zeros(min(left, FILLER_SEGMENT), np.int32),), self.count[:0])


def _pack_bin(pairs: Sequence[TokenPair], units: Sequence[_Unit], size: int) -> PairBatch:
    real_tokens = sum(unit.tokens for unit in units)
    layout = _Layout(max(size, real_tokens))
    places = [place for unit in units for place in unit.places]
    scored, lengths = [layout.count[:0]], list[int]()
    for unit in units:
        paths = layout.add_unit(pairs[unit.places[0]].prompt, unit.branches)
        both = (
            spans
            for place in unit.places
            for spans in (pairs[place].chosen_scored, pairs[place].rejected_scored)
        )
        for side, spans in zip(unit.sides, both, strict=True):
            scored += [paths[side][first:end] for first, end in spans]
            lengths.append(sum(end - first for first, end in spans))
    layout.fill_up()
    ids = np.concatenate(layout.ids, dtype=np.int64)
    k_lens = [len(keys) for keys in layout.keys]
    tensors: dict[str, Any] = {
        f"{name}_P": np.asarray([getattr(pairs[i], name) for i in places], np.float64)
        for name in ("weight", "margin", "soft_label")
    }
    tensors |= {"ids_N": ids, "positions_N": np.concatenate(layout.positions)}
    tensors |= _scored_tokens(
        np.concatenate(scored), np.asarray(lengths, np.int64), ids, layout.before
    )
    tensors["pair_P"] = np.asarray(places, np.int64)
    return PairBatch(
        segments=Segments.of(layout.q_lens, k_lens, torch.from_numpy(np.concatenate(layout.keys))),
        real_tokens=real_tokens,
        **{name: torch.from_numpy(array) for name, array in tensors.items()},
    )


def _scored_tokens(places: Places, lengths: Places, ids: Places, before: Places) -> dict[str, Any]:
    """Return each place at which a token counts once, and where it counts, response after
    response.
    """
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
        "rows_U": rows,
        "targets_U": ids.take(unique),
        "token_T": number.take(places),
        "cell_T": np.arange(len(lengths)).repeat(lengths),
        "shared_T": shared,
        "length_P2": lengths.reshape(-1, 2).astype(np.float64),
    }
