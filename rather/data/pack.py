"""Pack the pairs of one optimizer step into micro-batches that compute no token twice.

Bins never cross an optimizer step, so the budget changes speed and memory, never the result. A
pair is never split: one that is larger than the budget gets a bin of its own size.

Pairs with the same prompt form a unit. Its sequences are a tree: each new response branches off an
earlier one where their tokens differ, and only the rest is laid out. So each token of the tree has
one place, and is scored once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rather.data.batch import PairBatch, Segments, Span, TokenPair

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
    return [each.pack(pairs, at_end=at_end) for each in bins]


def plan_bins(
    pairs: Pairs, budget: int, max_pairs: int | None = None, *, ladder: int = 0, ranks: int = 1
) -> list[Bin]:
    """Return which pairs of a step share a micro-batch, before any is laid out; see `pack`."""
    units = _units(pairs, budget, max_pairs or len(pairs))
    sizes, counts = [unit.tokens for unit in units], [len(unit.places) for unit in units]
    if ladder:
        filled = _on_the_ladder(sizes, counts, budget, max_pairs, min(ladder, budget), ranks)
    else:
        filled = [(0, members) for members in best_fit(sizes, counts, max_pairs, further=budget)]
    filled += [(ladder or 1, [])] * (-len(filled) % ranks)
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
    most = inf if max_pairs is None else max_pairs
    for unit in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(gaps, (sizes[unit], -1))
        while at < len(gaps) and pairs[gaps[at][1]] + counts[unit] > most:
            at += 1
        if at < len(gaps):
            gap, bin_index = gaps.pop(at)
        elif further:
            gap, bin_index = further, len(members)
            members.append([])
            pairs.append(0)
        else:
            return []
        members[bin_index].append(unit)
        pairs[bin_index] += counts[unit]
        insort(gaps, (gap - sizes[unit], bin_index))
    return [sorted(each) for each in members]


def _on_the_ladder(
    sizes: Numbers,
    counts: Numbers,
    budget: int,
    max_pairs: int | None,
    ladder: int,
    ranks: int,
) -> list[tuple[int, list[int]]]:
    """Return (size, units) of as few bins as possible, of the smallest sizes that hold all units.

    Some bins have one size, the others one rung less: with one size alone, four bins would waste
    up to four rungs. All ranks work on one size at a time.
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
        several = -(-number // (8 * ranks)) * ranks  # at most 8 shapes per size: a short search
        least = max(*sizes, -(-tokens // number))
        for size in range(-(-least // ladder) * ladder, top + 1, ladder):
            for larger in (*range(several, number, several), number):
                shape = [size] * larger + [size - ladder] * (number - larger)
                filled = best_fit(sizes, counts, max_pairs, shape) if sum(shape) >= tokens else []
                if filled:
                    members = ([small[i] for i in each] for each in filled)
                    return alone + [each for each in zip(shape, members, strict=True) if each[1]]
        number += 1


# --- which tokens several sequences share ---


class _Unit:
    """Pairs with one prompt and the tree of their responses."""

    def __init__(self, pairs: Pairs, places: Numbers) -> None:
        self.places, self.prompt = places, pairs[places[0]].prompt
        self.earlier: list[Tokens] = []  # responses to this prompt in earlier units of the step
        # Each branch: its response, an earlier branch, and how many tokens both begin with.
        self.branches: list[tuple[Tokens, int, int]] = []
        # The branch and the scored spans of each pair's chosen and rejected response.
        self.sides: list[tuple[int, tuple[Span, ...]]] = []
        self.tokens = len(self.prompt)
        known: dict[bytes, int] = {}
        ordered: list[bytes] = []  # neighbours in this order have the longest common prefixes
        for place in places:
            for response, scored in pairs[place].answers:
                key = response.tobytes()
                if key not in known:
                    at = bisect_left(ordered, key)
                    near = [known[each] for each in ordered[max(0, at - 1) : at + 1]]
                    common = [common_tokens(response, self.branches[i][0]) for i in near]
                    shared = max(common, default=0)
                    earlier = near[common.index(shared)] if shared else 0
                    ordered.insert(at, key)
                    known[key] = len(self.branches)
                    self.branches.append((response, earlier, shared))
                    self.tokens += len(response) - shared
                self.sides.append((known[key], scored))


def _units(pairs: Pairs, budget: int, max_pairs: int) -> list[_Unit]:
    """Group pairs by prompt, in step order; halve groups that are too large, but never a pair."""
    prompts: dict[bytes | int, list[int]] = {}
    for place, pair in enumerate(pairs):
        # Pairs without a prompt have nothing in common, so each is a unit of its own.
        prompts.setdefault(pair.prompt.tobytes() or place, []).append(place)
    units, waiting = [], list(prompts.values())[::-1]
    while waiting:
        places = waiting.pop()
        unit = _Unit(pairs, places)
        if len(places) == 1 or (unit.tokens <= budget and len(places) <= max_pairs):
            units.append(unit)
        else:
            half = (len(places) + 1) // 2
            waiting += [places[half:], places[:half]]
    for before, unit in pairwise(units):  # halves of a group follow one another
        if len(unit.prompt) and np.array_equal(before.prompt, unit.prompt):
            unit.earlier = before.earlier + [response for response, _, _ in before.branches]
    return units


def common_tokens(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


# --- a bin as tensors ---


class Bin(NamedTuple):
    """A micro-batch that is not laid out yet."""

    size: int
    units: Sequence[_Unit]

    @property
    def tokens(self) -> int:
        return max(self.size, sum(unit.tokens for unit in self.units))

    @property
    def places(self) -> Places:
        return np.array([place for unit in self.units for place in unit.places], np.int64)

    def pack(self, pairs: Pairs, *, at_end: bool = False) -> PairBatch:
        """Lay the pairs out as tensors."""
        real_tokens = sum(unit.tokens for unit in self.units)
        count = np.arange(self.tokens)
        segments: list[tuple[Tokens, Places]] = []  # tokens, and the places of all that they see
        end = 0

        def add(ids: Tokens, beginning: Places) -> Places:
            """Lay out tokens that follow those at `beginning`; return the places of the sequence."""
            nonlocal end
            start, end = end, end + len(ids)
            path = np.concatenate([beginning, count[start:end]])
            if len(ids):
                segments.append((ids, path))
            return path

        counted = np.where(count < real_tokens, np.float32(1), np.float32(0))
        scored, ends, lengths = [count[:0]], [count[:0]], list[int]()
        for unit in self.units:
            (first, _, _), *others = unit.branches
            paths = [add(np.concatenate([unit.prompt, first]), count[:0])]
            for response, earlier, shared in others:
                paths.append(add(response[shared:], paths[earlier][: len(unit.prompt) + shared]))
            for (response, _, _), path in zip(unit.branches, paths, strict=True):
                known = [common_tokens(response, other) for other in unit.earlier]
                counted[path[: len(unit.prompt) + max(known) if known else 0]] = 0
            for branch, spans in unit.sides:
                scored += [paths[branch][start:stop] for start, stop in spans]
                lengths.append(sum(stop - start for start, stop in spans))
                ends.append(paths[branch][-1:] if spans else count[:0])
        while end < len(count):
            add(np.zeros(min(len(count) - end, FILLER_SEGMENT), np.int32), count[:0])
        before = count - 1  # the place whose hidden state predicts a token; -1: none does
        for own, path in segments:
            before[path[-len(own)]] = path[-len(own) - 1] if len(path) > len(own) else -1
        ids = np.concatenate([own for own, _ in segments], dtype=np.int64)
        places = self.places
        facts = {
            f"{name}_P": np.asarray([getattr(pairs[i], name) for i in places], np.float64)
            for name in ("weight", "margin", "soft_label")
        }
        positions = [count[len(path) - len(own) : len(path)] for own, path in segments]
        tensors = {
            **facts,
            "pair_P": places,
            "ids_N": ids,
            "counted_N": counted,
            "positions_N": np.concatenate(positions),
            **_scored_tokens(np.concatenate(scored), np.asarray(lengths, np.int64), ids, before),
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
        keys = torch.from_numpy(np.concatenate([path for _, path in segments]))
        q_lens, k_lens = zip(*((len(own), len(path)) for own, path in segments), strict=True)
        return PairBatch(
            segments=Segments.of(q_lens, k_lens, keys),
            real_tokens=real_tokens,
            **{name: torch.from_numpy(array) for name, array in tensors.items()},
        )


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
