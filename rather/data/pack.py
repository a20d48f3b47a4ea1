"""Pack the pairs of one optimizer step into micro-batches that compute no token twice.

Bins never cross an optimizer step, so the budget changes speed and memory, never the result. A
pair is never split: one that is larger than the budget gets a bin of its own size.

Pairs with the same prompt and the same images form a unit. Its sequences are a tree: each new
response branches off an earlier one where their tokens differ, and only the rest is laid out. So
each token of the tree has one place, and is scored once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rather.arithmetic import ceil_div, round_up
from rather.data.batch import PairBatch, PairFacts, Segments, Span, TokenPair

Numbers = Sequence[int]
Pairs = Sequence[TokenPair]
Places = NDArray[np.int64]
Tokens = NDArray[np.int32]

FILLER_SEGMENT = 256  # the longest segment of fillers: attention over them costs next to nothing


def pack(
    pairs: Pairs,
    budget: int,
    max_pairs: int | None = None,
    *,
    ladder: int = 0,
    ranks: int = 1,
    at_end: bool = False,
) -> list[PairBatch]:
    """Return the pairs of one step as micro-batches of at most `budget` tokens, `max_pairs` pairs.

    With a `ladder`, each is padded to a multiple of it, the smallest that fits the step: there are
    few sizes to compile. The number of batches is a multiple of `ranks`; added ones have no pairs.
    With `at_end`, the last token of each response is scored, by its own hidden state.
    """
    bins = plan_bins(pairs, budget, max_pairs, ladder=ladder, ranks=ranks)
    return [planned.pack(pairs, at_end=at_end) for planned in bins]


def plan_bins(
    pairs: Pairs, budget: int, max_pairs: int | None = None, *, ladder: int = 0, ranks: int = 1
) -> list[Bin]:
    """Return which pairs of a step share a micro-batch, before any is laid out; see `pack`."""
    units = _units(pairs, budget, max_pairs or len(pairs))
    sizes = [unit.tokens for unit in units]
    counts = [len(unit.places) for unit in units]
    if ladder:
        filled = _on_the_ladder(sizes, counts, budget, max_pairs, min(ladder, budget), ranks)
    else:
        filled = [(0, members) for members in best_fit(sizes, counts, max_pairs, further=budget)]
    while len(filled) % ranks:
        filled.append((ladder or 1, []))
    return [Bin(size, [units[i] for i in members]) for size, members in filled]


# --- which units share a bin ---


def best_fit(
    sizes: Numbers,
    counts: Numbers,
    max_pairs: int | None,
    opened: Numbers = (),
    further: int = 0,
) -> list[list[int]]:
    """Put each unit, largest first, into the fullest bin that fits; members stay in step order.

    The first bins have the sizes `opened`, all others `further`. If `further` is 0 and the opened
    bins do not suffice, return [].
    """
    members: list[list[int]] = [[] for _ in opened]
    pairs = [0] * len(opened)
    gaps = sorted((gap, i) for i, gap in enumerate(opened))
    pair_limit = inf if max_pairs is None else max_pairs
    for unit in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(gaps, (sizes[unit], -1))
        while at < len(gaps) and pairs[gaps[at][1]] + counts[unit] > pair_limit:
            at += 1
        if at < len(gaps):
            gap, bin_index = gaps.pop(at)
        elif further:
            gap = further
            bin_index = len(members)
            members.append([])
            pairs.append(0)
        else:
            return []
        members[bin_index].append(unit)
        pairs[bin_index] += counts[unit]
        insort(gaps, (gap - sizes[unit], bin_index))
    return [sorted(units) for units in members]


def _on_the_ladder(
    sizes: Numbers,
    counts: Numbers,
    budget: int,
    max_pairs: int | None,
    ladder: int,
    ranks: int,
) -> list[tuple[int, list[int]]]:
    """Return (size, units) of as few bins as possible, of the smallest sizes that hold all units.

    A unit that is larger than the budget has a bin of its own.
    """
    top = budget // ladder * ladder
    alone = [(round_up(size, ladder), [i]) for i, size in enumerate(sizes) if size > top]
    small = [i for i, size in enumerate(sizes) if size <= top]
    if not small:
        return alone
    small_sizes = [sizes[i] for i in small]
    small_counts = [counts[i] for i in small]
    pairs = sum(small_counts)
    fewest = ceil_div(pairs, max_pairs or pairs)
    for bin_sizes in _bin_sizes_to_try(small_sizes, fewest, top, ladder, ranks, len(alone)):
        members_of_bins = best_fit(small_sizes, small_counts, max_pairs, bin_sizes)
        if members_of_bins:
            break
    filled = []
    for size, members in zip(bin_sizes, members_of_bins, strict=True):
        if members:
            filled.append((size, [small[i] for i in members]))
    return alone + filled


def _bin_sizes_to_try(
    sizes: Numbers, fewest: int, top: int, ladder: int, ranks: int, bins_alone: int
) -> Iterator[list[int]]:
    """Yield the sizes of bins that may hold units of these sizes, without end.

    Few bins come before many, small ones before large ones. Some bins have one size, the others one
    rung less: with one size alone, four bins would waste up to four rungs. All ranks work on one
    size at a time.
    """
    tokens = sum(sizes)
    number = max(fewest, ceil_div(tokens, top))
    while True:
        number = round_up(number + bins_alone, ranks) - bins_alone
        step = ceil_div(number, 8 * ranks) * ranks  # at most 8 mixtures per size: a short search
        smallest = max(*sizes, ceil_div(tokens, number))
        for size in range(round_up(smallest, ladder), top + 1, ladder):
            for larger_bins in (*range(step, number, step), number):
                smaller_bins = number - larger_bins
                bin_sizes = [size] * larger_bins + [size - ladder] * smaller_bins
                if sum(bin_sizes) >= tokens:
                    yield bin_sizes
        number += 1


# --- which tokens several sequences share ---


class _Branch(NamedTuple):
    response: Tokens
    earlier: int  # the number of an earlier branch
    shared: int  # how many tokens both begin with


class _Unit:
    """Pairs with one prompt and the tree of their responses."""

    def __init__(self, pairs: Pairs, places: Numbers) -> None:
        self.places = places
        self.prompt = pairs[places[0]].prompt
        self.images = pairs[places[0]].images
        self.prompt_key = pairs[places[0]].prompt_key
        self.earlier: list[Tokens] = []  # responses to this prompt in earlier units of the step
        self.branches: list[_Branch] = []
        # The branch and the scored spans of each pair's chosen and rejected response.
        self.sides: list[tuple[int, tuple[Span, ...]]] = []
        self.tokens = len(self.prompt)
        branch_of: dict[bytes, int] = {}
        ordered: list[bytes] = []  # neighbours in this order have the longest common prefixes
        for pair_index in places:
            for response, scored in pairs[pair_index].answers:
                key = response.tobytes()
                if key not in branch_of:
                    at = bisect_left(ordered, key)
                    near = [branch_of[neighbour] for neighbour in ordered[max(0, at - 1) : at + 1]]
                    ordered.insert(at, key)
                    branch_of[key] = len(self.branches)
                    self._add_branch(response, near)
                self.sides.append((branch_of[key], scored))

    def _add_branch(self, response: Tokens, near: Numbers) -> None:
        """Let a response branch off that of two branches with which it shares more tokens."""
        common = [common_tokens(response, self.branches[i].response) for i in near]
        shared = max(common, default=0)
        earlier = near[common.index(shared)] if shared else 0
        self.branches.append(_Branch(response, earlier, shared))
        self.tokens += len(response) - shared


def _units(pairs: Pairs, budget: int, max_pairs: int) -> list[_Unit]:
    """Group pairs by prompt, in step order; halve groups that are too large, but never a pair."""
    pairs_of_prompt: dict[bytes | int, list[int]] = {}
    for i, pair in enumerate(pairs):
        # Pairs without a prompt have nothing in common, so each is a unit of its own.
        pairs_of_prompt.setdefault(pair.prompt_key or i, []).append(i)
    units = []
    waiting = list(pairs_of_prompt.values())[::-1]
    while waiting:
        group = waiting.pop()
        unit = _Unit(pairs, group)
        if len(group) == 1 or (unit.tokens <= budget and len(group) <= max_pairs):
            units.append(unit)
        else:
            half = (len(group) + 1) // 2
            waiting += [group[half:], group[:half]]
    for before, unit in pairwise(units):  # halves of a group follow one another
        if unit.prompt_key and unit.prompt_key == before.prompt_key:
            unit.earlier = before.earlier + [branch.response for branch in before.branches]
    return units


def common_tokens(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


# --- a bin as tensors ---


class _Segment(NamedTuple):
    """Tokens that are laid out together."""

    ids: Tokens
    path: Places  # the places of all tokens that they see, and their own


class _TokenLayout:
    """The tokens of a bin, one segment after another."""

    def __init__(self, tokens: int) -> None:
        self.count = np.arange(tokens)
        self.nowhere = self.count[:0]
        self.segments: list[_Segment] = []
        self.end = 0

    def add(self, ids: Tokens, beginning: Places) -> Places:
        """Lay out tokens that follow those at `beginning`; return the places of the sequence."""
        start = self.end
        self.end += len(ids)
        path = np.concatenate([beginning, self.count[start : self.end]])
        if len(ids):
            self.segments.append(_Segment(ids, path))
        return path

    def add_unit(self, unit: _Unit) -> list[Places]:
        """Lay out a prompt and its responses; return the places of each whole sequence."""
        first, *further = unit.branches
        paths = [self.add(np.concatenate([unit.prompt, first.response]), self.nowhere)]
        for branch in further:
            beginning = paths[branch.earlier][: len(unit.prompt) + branch.shared]
            paths.append(self.add(branch.response[branch.shared :], beginning))
        return paths

    def add_fillers(self) -> None:
        while self.end < len(self.count):
            length = min(len(self.count) - self.end, FILLER_SEGMENT)
            self.add(np.zeros(length, np.int32), self.nowhere)

    @property
    def ids(self) -> Places:
        return np.concatenate([segment.ids for segment in self.segments], dtype=np.int64)

    @property
    def positions(self) -> Places:
        positions = [self.count[len(path) - len(ids) : len(path)] for ids, path in self.segments]
        return np.concatenate(positions)

    @property
    def before(self) -> Places:
        """The place whose hidden state predicts each token; -1: none does."""
        before = self.count - 1
        for ids, path in self.segments:
            before[path[-len(ids)]] = path[-len(ids) - 1] if len(path) > len(ids) else -1
        return before

    def attention(self) -> Segments:
        keys = torch.from_numpy(np.concatenate([segment.path for segment in self.segments]))
        q_lens = tuple(len(segment.ids) for segment in self.segments)
        k_lens = tuple(len(segment.path) for segment in self.segments)
        return Segments.of(q_lens, k_lens, keys)


class Bin(NamedTuple):
    """A micro-batch that is not laid out yet."""

    size: int
    units: Sequence[_Unit]

    @property
    def tokens(self) -> int:
        return max(self.size, self.real_tokens)

    @property
    def real_tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)

    @property
    def places(self) -> Places:
        return np.array([i for unit in self.units for i in unit.places], np.int64)

    def pack(self, pairs: Pairs, *, at_end: bool = False) -> PairBatch:
        """Lay the pairs out as tensors."""
        layout = _TokenLayout(self.tokens)
        is_real = layout.count < self.real_tokens
        counted = np.where(is_real, np.float32(1), np.float32(0))
        scored = [layout.nowhere]
        ends = [layout.nowhere]
        lengths: list[int] = []
        for unit in self.units:
            paths = layout.add_unit(unit)
            _count_once(counted, unit, paths)
            for branch, spans in unit.sides:
                scored += [paths[branch][start:stop] for start, stop in spans]
                lengths.append(sum(stop - start for start, stop in spans))
                ends.append(paths[branch][-1:] if spans else layout.nowhere)
        layout.add_fillers()
        ids = layout.ids
        places = self.places
        scored_places = np.concatenate(scored)
        tensors = {
            **_facts(pairs, places),
            "pair_P": places,
            "ids_N": ids,
            "counted_N": counted,
            "positions_N": layout.positions,
            **_scored_tokens(scored_places, np.asarray(lengths, np.int64), ids, layout.before),
        }
        if at_end:
            rows = np.concatenate(ends)
            tensors |= {
                "rows_U": rows,
                "targets_U": ids[rows],
                "token_T": np.arange(len(rows)),
                "cell_T": np.flatnonzero(lengths),
                "shared_T": np.ones(len(rows)),
            }
        return PairBatch(
            segments=layout.attention(),
            real_tokens=self.real_tokens,
            images=tuple(image for unit in self.units for image in unit.images),
            **{name: torch.from_numpy(array) for name, array in tensors.items()},
        )


def empty_batch(tokens: int) -> PairBatch:
    """Return a micro-batch of fillers, for a rank or a schedule that needs one more."""
    return Bin(tokens, []).pack([])


def _count_once(counted: NDArray[np.float32], unit: _Unit, paths: Sequence[Places]) -> None:
    """Do not count the tokens that an earlier unit of the step has as well."""
    if not unit.earlier:
        return
    for branch, path in zip(unit.branches, paths, strict=True):
        shared = max(common_tokens(branch.response, response) for response in unit.earlier)
        counted[path[: len(unit.prompt) + shared]] = 0


def _facts(pairs: Pairs, places: Places) -> dict[str, NDArray[np.float64]]:
    return {
        f"{name}_P": np.asarray([getattr(pairs[i], name) for i in places], np.float64)
        for name in PairFacts._fields[1:]
    }


def _scored_tokens(places: Places, lengths: Places, ids: Places, before: Places) -> dict[str, Any]:
    """Return each place that is scored once, and for which responses it counts."""
    assert len(places) == lengths.sum(), "a scored span leaves its sequence"
    hit = np.zeros(len(ids), dtype=bool)
    hit[places] = True
    rows = before[hit]
    assert (rows >= 0).all(), "nothing predicts the first token"
    length_P2 = lengths.reshape(-1, 2)
    within = np.arange(len(places)) - (lengths.cumsum() - lengths).repeat(lengths)
    return {
        "rows_U": rows,
        "targets_U": ids[hit],
        "token_T": (hit.cumsum() - 1)[places],
        "cell_T": np.arange(len(lengths)).repeat(lengths),
        "shared_T": (within < length_P2.min(axis=1).repeat(2).repeat(lengths)).astype(np.float64),
        "length_P2": length_P2.astype(np.float64),
    }
