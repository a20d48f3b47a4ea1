"""The numbers of a look at the pairs, and the types that hold them and everything else that was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rather.data import near_duplicates as near
from rather.data.pairs import PairDataset

NEAR_PAIRS = 1_000_000  # of a set among which near duplicates are looked for
BARS = 16
EXAMPLES = 5
PARTS = ("prompt", "chosen", "rejected")

Rows = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Spread:
    """Lengths in tokens. Bar i counts from edges[i] to below the next; the last also what is longer."""

    median: float
    p95: float
    longest: int
    edges: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Repeats:
    """Of texts that are the same but for case and white space, and of texts that are nearly the same."""

    prompts: int  # different ones
    prompts_again: int  # pairs whose prompt came before
    pairs_again: int
    near_prompts: int  # different prompts that nearly are an earlier one
    near_pairs: int  # different pairs of which prompt, chosen and rejected nearly are those of an earlier one
    compared: int  # pairs among which near ones were looked for


@dataclass(frozen=True)
class Contradictions:
    swapped: int  # pairs whose two answers are preferred the other way round elsewhere
    both_ways: int  # further pairs with an answer that wins in one row and loses in another


@dataclass(frozen=True)
class LengthBias:
    """What the length of an answer alone tells."""

    chosen_longer: float
    rejected_longer: float
    longer_wins: float  # accuracy of taking the longer answer; a tie counts half
    correlation: float  # of an answer's length with being the chosen one
    difference: float  # median of chosen minus rejected


@dataclass(frozen=True)
class SetLook:
    pairs: int
    lengths: dict[str, Spread]
    repeats: Repeats
    contradictions: Contradictions
    length_bias: LengthBias


@dataclass(frozen=True)
class Leak:
    """What an evaluation set shares with the training data."""

    prompts: int  # different ones of the evaluation set
    same_prompts: int
    near_prompts: int
    pairs: int
    same_pairs: int

    @property
    def share(self) -> float:
        return (self.same_prompts + self.near_prompts) / max(1, self.prompts)


@dataclass(frozen=True)
class Example:
    """A pair, and the one that it repeats, contradicts or leaks."""

    kind: str
    set: str
    row: int
    like_set: str
    like_row: int
    place: str = ""  # file and line
    like: str = ""


@dataclass(frozen=True)
class Truncation:
    sequence_length: int
    overlong: str
    pairs: int
    dropped: int
    cut_prompts: int
    cut_answers: int


@dataclass(frozen=True)
class Finding:
    name: str
    severity: str  # info, warning, serious
    set: str
    number: float
    text: str
    advice: str


@dataclass(frozen=True)
class Look:
    sets: dict[str, SetLook]
    leaks: dict[str, Leak]
    examples: list[Example]
    truncation: dict[str, Truncation] = field(default_factory=dict)
    inference: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@dataclass
class _Set:
    """The hashes of a set, and the prompts that are compared."""

    name: str
    pairs: PairDataset

    def __post_init__(self) -> None:
        self.prompt, self.chosen, self.rejected = (
            self.pairs.column(f"normal_{part}") for part in PARTS
        )
        self.pair = near.joined(self.prompt, self.chosen, self.rejected)
        self.drawn = _drawn(self.prompt)
        self.first = self.drawn[
            _first_of_each(self.prompt[self.drawn])
        ]  # a pair of each different prompt


def numbers(sets: Mapping[str, PairDataset], tell: Callable[[int], None]) -> Look:
    """All that depends on the pairs alone. The first set is the one that is trained on."""
    known = [_Set(name, pairs) for name, pairs in sets.items()]
    train, *held = known
    done, frame = 0, near.frame_of(train.pairs, train.first)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(done)

    looks, leaks, examples = {}, {}, list[Example]()
    index: dict[str, near.Index] = {}
    for one in known:
        index[one.name] = near.Index.of_prompts(one.pairs, one.first, frame, advance)
        looks[one.name] = _set_look(one, index[one.name], examples)
    for one in held:
        leaks[one.name] = _leak(one, index[one.name], train, index["train"], examples)
    return Look(looks, leaks, examples)


def _set_look(one: _Set, index: near.Index, examples: list[Example]) -> SetLook:
    lengths = {part: one.pairs.lengths(part) for part in PARTS}
    repeated = np.setdiff1d(np.arange(len(one.pair)), _first_of_each(one.pair))
    edges = near.alike(index.inner(), one.pairs, one.pairs, "prompt", index.frame)
    pair_edges = _near_pairs(one, edges, index.frame)
    _note(examples, "same_pair", one, repeated, one, lambda row: _where(one.pair, one.pair[row]))
    _note_edges(examples, "near_prompt", one, edges, one)
    _note_edges(examples, "near_pair", one, pair_edges, one)
    repeats = Repeats(
        prompts=(different := len(_first_of_each(one.prompt))),
        prompts_again=len(one.prompt) - different,
        pairs_again=len(repeated),
        near_prompts=len(np.unique(edges[:, 0])),
        near_pairs=len(np.unique(pair_edges[:, 0])),
        compared=len(one.drawn),
    )
    return SetLook(
        len(one.pairs),
        _spreads(lengths),
        repeats,
        _contradictions(one, examples),
        _length_bias(lengths),
    )


def _first_of_each(keys: Hashes) -> Rows:
    return np.sort(np.unique(keys, return_index=True)[1])


def _drawn(prompt: Hashes) -> Rows:
    """All pairs, or NEAR_PAIRS of them, whole prompts drawn by their hash."""
    if len(prompt) <= NEAR_PAIRS:
        return np.arange(len(prompt))
    order = near.mixed(prompt)
    return np.flatnonzero(order < np.partition(order, NEAR_PAIRS)[NEAR_PAIRS])


def _near_pairs(one: _Set, edges: near.Edges, frame: near.Hashes) -> near.Edges:
    """Looked for among pairs whose prompt comes again or nearly does: no others can be alike."""
    place = np.searchsorted(one.first, edges)
    label = near.groups_of(len(one.first), place)
    rows = one.drawn[_first_of_each(one.pair[one.drawn])]
    order = np.argsort(one.prompt[one.first])
    prompt_of = order[np.searchsorted(one.prompt[one.first][order], one.prompt[rows])]
    group = label[prompt_of]
    several = np.bincount(group, minlength=len(one.first))[group] > 1
    rows, group = rows[several], group[several]
    found = near.Index.of_answers(one.pairs, rows, group.astype(np.uint64)).inner()
    same = one.prompt[found[:, 0]] == one.prompt[found[:, 1]]
    others = near.alike(found[~same], one.pairs, one.pairs, "prompt", frame)
    found = np.concatenate([found[same], others])
    for part in ("chosen", "rejected"):
        found = near.alike(found, one.pairs, one.pairs, part, near.NO_FRAME)
    return found


def _contradictions(one: _Set, examples: list[Example]) -> Contradictions:
    opposite = near.joined(one.prompt, one.rejected, one.chosen)
    swapped = near.among(opposite, one.pair)
    row = (one.pairs.column("source").astype(np.int64) << 40) | one.pairs.column("number")
    wins, loses = near.joined(one.prompt, one.chosen), near.joined(one.prompt, one.rejected)
    both = ~swapped & (_elsewhere(wins, row, loses) | _elsewhere(loses, row, wins))
    _note(
        examples,
        "swapped",
        one,
        np.flatnonzero(swapped),
        one,
        lambda i: _where(one.pair, opposite[i]),
    )
    winners = np.flatnonzero(both & near.among(wins, loses))
    _note(examples, "both_ways", one, winners, one, lambda i: _where(loses, wins[i], row != row[i]))
    return Contradictions(int(swapped.sum()), int(both.sum()))


def _elsewhere(keys: Hashes, row: Rows, others: Hashes) -> NDArray[np.bool_]:
    """Which keys are among the others in another row: one row's own ranking contradicts nothing."""
    found = near.among(keys, others)
    mine = row[found]
    shared = near.among(others, keys[found])
    others, rows = others[shared], row[shared]
    order = np.lexsort((rows, others))
    begin, end = (
        np.searchsorted(others[order], keys[found], side=side) for side in ("left", "right")
    )
    found[found] = (rows[order][begin] != mine) | (rows[order][end - 1] != mine)
    return found


def _length_bias(lengths: Mapping[str, NDArray[np.int32]]) -> LengthBias:
    chosen, rejected = (lengths[part].astype(np.float64) for part in ("chosen", "rejected"))
    longer, shorter = float((chosen > rejected).mean()), float((chosen < rejected).mean())
    both = np.concatenate([chosen, rejected])
    label = np.repeat([1.0, 0.0], len(chosen))
    return LengthBias(
        chosen_longer=round(longer, 4),
        rejected_longer=round(shorter, 4),
        longer_wins=round(longer + (1 - longer - shorter) / 2, 4),
        correlation=round(float(np.corrcoef(both, label)[0, 1]), 4) if both.std() > 0 else 0.0,
        difference=float(np.median(chosen - rejected)),
    )


def _spreads(lengths: Mapping[str, NDArray[np.int32]]) -> dict[str, Spread]:
    """Both answers on the same bars, so that they can be compared."""
    answers = np.concatenate([lengths["chosen"], lengths["rejected"]])
    scale = {
        "prompt": _bar_width(lengths["prompt"]),
        "chosen": _bar_width(answers),
        "rejected": _bar_width(answers),
    }
    return {part: _spread(lengths[part], scale[part]) for part in PARTS}


def _bar_width(lengths: NDArray[np.int32]) -> int:
    """A round number, of which BARS reach the longest but one in a hundred."""
    wanted = (float(np.percentile(lengths, 99)) + 1) / BARS
    return next(width for width in _round_numbers() if width >= wanted)


def _round_numbers() -> Iterator[int]:
    ten = 1
    while True:
        yield from (ten, 2 * ten, 5 * ten)
        ten *= 10


def _spread(lengths: NDArray[np.int32], width: int) -> Spread:
    last = min(BARS - 1, int(lengths.max()) // width)
    counts = np.bincount(np.minimum(lengths // width, last), minlength=last + 1)
    return Spread(
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        longest=int(lengths.max()),
        edges=[width * i for i in range(last + 1)],
        counts=counts.tolist(),
    )


def bar_labels(spread: Mapping[str, Any]) -> list[str]:
    """'0-49', '50-99', ..., '750 and more'."""
    edges = spread["edges"]
    width = edges[1] - edges[0] if len(edges) > 1 else spread["longest"] + 1
    ends = [f"{edge}-{edge + width - 1}" if width > 1 else str(edge) for edge in edges]
    return [*ends[:-1], f"{edges[-1]} and more"] if spread["longest"] >= edges[-1] + width else ends


def _leak(
    held: _Set, index: near.Index, train: _Set, trained: near.Index, examples: list[Example]
) -> Leak:
    first = _first_of_each(held.prompt)
    same = near.among(held.prompt[first], train.prompt)
    pairs = np.flatnonzero(near.among(held.pair, train.pair))
    others = near.alike(index.across(trained), held.pairs, train.pairs, "prompt", index.frame)
    others = others[~near.among(held.prompt[others[:, 0]], train.prompt)]
    _note(
        examples,
        "leaked_prompt",
        held,
        first[same],
        train,
        lambda i: _where(train.prompt, held.prompt[i]),
    )
    _note(examples, "leaked_pair", held, pairs, train, lambda i: _where(train.pair, held.pair[i]))
    _note_edges(examples, "near_leaked_prompt", held, others, train)
    return Leak(
        prompts=len(first),
        same_prompts=int(same.sum()),
        near_prompts=len(np.unique(others[:, 0])),
        pairs=len(held.pairs),
        same_pairs=len(pairs),
    )


def _where(keys: Hashes, key: np.uint64, among: NDArray[np.bool_] | None = None) -> int:
    found = keys == key if among is None else (keys == key) & among
    return int(found.argmax())


def _note(
    examples: list[Example],
    kind: str,
    one: _Set,
    rows: Rows,
    other: _Set,
    like: Callable[[int], int],
) -> None:
    examples += [
        Example(kind, one.name, row, other.name, like(row)) for row in rows[:EXAMPLES].tolist()
    ]


def _note_edges(
    examples: list[Example], kind: str, one: _Set, edges: near.Edges, other: _Set
) -> None:
    rows, first = np.unique(edges[:, 0], return_index=True)
    like = dict(zip(rows[:EXAMPLES].tolist(), edges[first[:EXAMPLES], 1].tolist(), strict=True))
    _note(examples, kind, one, rows, other, lambda row: like[row])
