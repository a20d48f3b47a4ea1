"""Findings about the pairs of a run: repeats, contradictions, leakage, truncation and length bias.

Everything is computed from lengths and from hashes that were stored with the tokens, so no text is
read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rather.data.pairs import PairDataset
from rather.data.report import TOO_LONG

BARS = 16
EXAMPLES = 5
PARTS = ("prompt", "chosen", "rejected")
SEVERITIES = ("serious", "warning", "info")

Json = dict[str, Any]  # an object of a JSON file
Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]


class FindingRule(NamedTuple):
    """One kind of finding. Its share is a warning, or serious, from these values on."""

    warning: float
    serious: float
    text: str
    advice: str


RULES = {
    "leakage": FindingRule(
        0,
        0.1,
        "{percent} of the prompts of {set} are also in train, and {same_pairs} of its {pairs} "
        "pairs with both "
        "answers: its scores measure memory as well as learning.",
        "Remove these rows from one of the two sets, or use validation.data_args.split, which "
        "holds out whole prompts.",
    ),
    "prompt_difference": FindingRule(
        0,
        0.5,
        "{different} of {compared} compared prompts differ from those at inference: training has "
        "{training!r} where "
        "{by} gives {inference!r}.",
        "Prompt the trained model with exactly the training prompt, or choose the "
        "data_args.template it is served with.",
    ),
    "contradictory_pairs": FindingRule(
        0,
        0.05,
        "{swapped} pairs of {set} ({percent}) are contradicted: elsewhere the same two answers to "
        "the same prompt are "
        "preferred the other way round.",
        "Keep the judgement that you trust; if people simply disagree, robust or label_smoothing "
        "helps.",
    ),
    "duplicate_pairs": FindingRule(
        0.01,
        0.05,
        "{pairs_again} pairs of {set} ({percent}) repeat an earlier pair, ignoring case and white "
        "space.",
        "Remove them, unless they should count more; a weight column does that explicitly.",
    ),
    "truncation": FindingRule(
        0.01,
        0.05,
        "{cut} pairs of {set} ({percent}) are cut to sequence_length ({sequence_length}): {lost}.",
        "Raise sequence_length, or set data_args.overlong to drop.",
    ),
    "length_bias": FindingRule(
        0,
        0.8,
        'accuracy of "pick the {which} answer": {percent} (median difference {difference:+.0f} '
        "tokens, correlation "
        "{correlation:+.2f}): a model may learn only that.",
        "Watch the length of answers during evaluation; ld_alpha, a length-normalised loss (simpo, "
        "sigmoid_norm) or "
        "pairs of similar length help.",
    ),
}
LENGTH_MATTERS = 0.65  # accuracy of "pick the longer answer", or the shorter
NUMBERS = (  # heading, key, format: the table of numbers in the terminal and on the page
    ("pairs", "pairs", ","),
    ("different prompts", "prompts", ","),
    ("repeated pairs", "pairs_again", ","),
    ("contradicted pairs", "swapped", ","),
    ("prompts also in train", "same_prompts", ","),
    ("pairs also in train", "same_pairs", ","),
    ("prompts cut to sequence_length", "cut_prompts", ","),
    ("answers cut to sequence_length", "cut_answers", ","),
    ("dropped as too long", "dropped", ","),
    ("chosen is longer", "chosen_longer", ".1%"),
    ('accuracy of "pick the longer answer"', "longer_wins", ".1%"),
    ("correlation of length and chosen", "correlation", "+.2f"),
    ("median of chosen minus rejected tokens", "difference", "+.0f"),
)


def mix(x: Hashes) -> Hashes:
    """Return splitmix64 of each number.

    Held-out splits are drawn by it, so it must never change.
    """
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def combine(*columns: Hashes) -> Hashes:
    """Return one hash for each row of several columns; the order of the columns matters."""
    total = np.zeros_like(columns[0])
    with np.errstate(over="ignore"):
        for column in columns:
            total = mix(total * np.uint64(3) + column + np.uint64(0x9E3779B97F4A7C15))
    return total


def sets_of(report: Json) -> Json:
    """Return the entries of a data report by the names of their sets: train, eval, eval <name>."""
    evals = {f"eval {name}".strip(): entry for name, entry in report["evals"].items()}
    return {"train": report["train"], **evals}


class _HashedSet:
    """A set of pairs with the hashes of its normalised texts, and where its rows come from."""

    def __init__(self, name: str, pairs: PairDataset, files: list[Json]) -> None:
        self.name, self.pairs, self.files = name, pairs, files
        self.prompt, self.chosen, self.rejected = (pairs.column(f"normal_{p}") for p in PARTS)
        self.pair = combine(self.prompt, self.chosen, self.rejected)
        self.source, self.number = pairs.column("source"), pairs.column("number")

    def place(self, row: int) -> str:
        return f"{self.files[self.source[row]]['path']}:{self.number[row]}"


def examine(train: PairDataset, evals: Mapping[str, PairDataset], report: Json) -> Json:
    """Return the part `look` of a data report: all numbers, the first examples, and the
    findings.
    """
    entries, files = sets_of(report), report["train"]["files"]
    own, *held = (
        # Pairs that are held out of train come from its files.
        _HashedSet(name, pairs, entry.get("files") or files)
        for (name, entry), pairs in zip(entries.items(), (train, *evals.values()), strict=True)
    )
    examples: list[Json] = []
    inference = report["train"]["inference"]
    look = {
        "sets": {one.name: _set_numbers(one, examples) for one in (own, *held)},
        "leaks": {one.name: _leak(one, own, examples) for one in held},
        "examples": examples,
        "truncation": {
            name: _truncation(entry, report["sequence_length"])
            for name, entry in entries.items()
            if "dropped" in entry
        },
        "inference": inference
        | {
            "examples": [
                {**one, "place": f"{files[one['source']]['path']}:{one['number']}"}
                for one in inference["examples"]
            ]
        },
    }
    return {**look, "findings": findings(look)}


def findings(look: Json) -> list[Json]:
    """Return all findings, the most severe first."""
    found = []
    for name, set_name, share, facts in _shares(look):
        if share:
            rule = RULES[name]
            severity = SEVERITIES[2 - (share >= rule.warning) - (share >= rule.serious)]
            text = rule.text.format_map({**facts, "set": set_name, "percent": percent(share)})
            found.append(
                {"name": name, "severity": severity, "set": set_name, "number": round(share, 4)}
                | {"text": text, "advice": rule.advice}
            )
    return sorted(found, key=lambda one: SEVERITIES.index(one["severity"]))


def _shares(look: Json) -> Iterator[tuple[str, str, float, Json]]:
    """Yield the rule, the set, the share that the rule judges, and the facts that its text
    names.
    """
    for name, leak in look["leaks"].items():
        yield "leakage", name, leak["same_prompts"] / max(1, leak["prompts"]), leak
    check = look["inference"]
    if check["different"]:
        first = {key: "".join(check["examples"][0][key])[:80] for key in ("training", "inference")}
        yield "prompt_difference", "train", check["different"] / check["compared"], check | first
    for name, one in look["sets"].items():
        against, again = one["contradictions"], one["repeats"]
        yield "contradictory_pairs", name, against["swapped"] / one["pairs"], against
        yield "duplicate_pairs", name, again["pairs_again"] / one["pairs"], again
    for name, cut in look["truncation"].items():
        total = cut["cut_prompts"] + cut["cut_answers"]
        prompts = "prompts lose their beginning"
        lost = prompts if cut["cut_prompts"] else "answers lose their end and their end token"
        yield "truncation", name, total / max(1, cut["pairs"]), {**cut, "cut": total, "lost": lost}
    train = look["sets"]["train"]
    bias = train["length_bias"]
    accuracy = max(bias["longer_wins"], 1 - bias["longer_wins"])
    chance = 0.5 + 1.5 / sqrt(train["pairs"])  # three standard deviations of a coin
    if accuracy >= max(LENGTH_MATTERS, chance):
        which = "longer" if bias["longer_wins"] > 0.5 else "shorter"
        yield "length_bias", "train", accuracy, {**bias, "which": which}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def number_rows(look: Json) -> list[tuple[str, ...]]:
    """Return the table of numbers: a heading, then one column for each set."""
    columns: list[Json] = []
    for name, one in look["sets"].items():
        others = {**look["truncation"].get(name, {}), **look["leaks"].get(name, {})}
        nested = [value for value in one.values() if isinstance(value, dict)]
        columns.append(others | one | {key: each[key] for each in nested for key in each})
    return [
        (heading, *(f"{column[key]:{form}}" if key in column else "" for column in columns))
        for heading, key, form in NUMBERS
    ]


# --- the numbers ---


def _set_numbers(one: _HashedSet, examples: list[Json]) -> Json:
    lengths = {part: one.pairs.lengths(part) for part in PARTS}
    firsts = np.unique(one.pair, return_index=True)[1]
    repeated = np.delete(np.arange(len(one.pair)), firsts)
    prompts = len(
        np.unique(one.prompt, return_index=True)[1]
    )  # with the index it sorts, which is faster
    opposite = combine(one.prompt, one.rejected, one.chosen)
    swapped = np.flatnonzero(_among(opposite, one.pair))
    _add(examples, "same_pair", one, repeated, one, lambda row: one.pair == one.pair[row])
    _add(examples, "swapped", one, swapped, one, lambda row: one.pair == opposite[row])
    return {
        "pairs": len(one.pairs),
        "lengths": _spreads(lengths),
        "repeats": {
            "prompts": prompts,
            "prompts_again": len(one.prompt) - prompts,
            "pairs_again": len(repeated),
        },
        "contradictions": {"swapped": len(swapped)},
        "length_bias": _length_bias(lengths["chosen"], lengths["rejected"]),
    }


def _among(keys: Hashes, others: Hashes) -> NDArray[np.bool_]:
    """Return which keys are among the others; np.isin takes five times as long."""
    ordered = np.sort(others)
    places = np.searchsorted(ordered, keys)
    return np.asarray(ordered[np.minimum(places, len(ordered) - 1)] == keys)


def _leak(held: _HashedSet, train: _HashedSet, examples: list[Json]) -> dict[str, int]:
    """Count what an evaluation set shares with the training data."""
    first = np.sort(np.unique(held.prompt, return_index=True)[1])
    same = first[_among(held.prompt[first], train.prompt)]
    pairs = np.flatnonzero(_among(held.pair, train.pair))
    _add(examples, "leaked_prompt", held, same, train, lambda i: train.prompt == held.prompt[i])
    _add(examples, "leaked_pair", held, pairs, train, lambda i: train.pair == held.pair[i])
    return {
        "prompts": len(first),
        "same_prompts": len(same),
        "pairs": len(held.pairs),
        "same_pairs": len(pairs),
    }


def _add(
    examples: list[Json],
    kind: str,
    one: _HashedSet,
    rows: Rows,
    other: _HashedSet,
    matches: Callable[[int], NDArray[np.bool_]],
) -> None:
    """Add the first rows of a kind, each with the first row of the other set that matches it."""
    for row in rows[:EXAMPLES].tolist():
        like = other.place(int(matches(row).argmax()))
        examples.append({"kind": kind, "set": one.name, "place": one.place(row), "like": like})


def _truncation(entry: Json, sequence_length: int) -> Json:
    def counted(group: str, *kinds: str) -> int:
        return sum(entry[group][kind]["count"] for kind in kinds if kind in entry[group])

    return {
        "sequence_length": sequence_length,
        "overlong": entry["overlong"],
        "pairs": entry["pairs"],
        "dropped": counted("dropped", *TOO_LONG),
        "cut_prompts": counted("changed", "truncated_prompt"),
        "cut_answers": counted("changed", "truncated_response"),
    }


def _length_bias(chosen: NDArray[np.int32], rejected: NDArray[np.int32]) -> dict[str, float]:
    """Measure what the length of an answer alone says about which one is chosen; a tie counts
    half.
    """
    longer, shorter = float((chosen > rejected).mean()), float((chosen < rejected).mean())
    both = np.concatenate([chosen, rejected]).astype(np.float64)
    label = np.repeat([1.0, 0.0], len(chosen))
    return {
        "chosen_longer": round(longer, 4),
        "rejected_longer": round(shorter, 4),
        "longer_wins": round(longer + (1 - longer - shorter) / 2, 4),
        "correlation": round(float(np.corrcoef(both, label)[0, 1]), 4) if both.std() > 0 else 0.0,
        "difference": float(np.median(chosen.astype(np.float64) - rejected)),
    }


def _spreads(lengths: Mapping[str, NDArray[np.int32]]) -> dict[str, Json]:
    """Return each part's lengths as BARS bars; both answers have the same, to be comparable.

    Bar i counts from edges[i] to below the next edge; the last one also counts whatever is longer.
    """
    answers = np.concatenate([lengths["chosen"], lengths["rejected"]])
    spreads = {}
    for part, own in lengths.items():
        largest = float(np.percentile(own if part == "prompt" else answers, 99))
        width = ceil((largest + 1) / BARS)
        spreads[part] = {
            "median": float(np.median(own)),
            "p95": float(np.percentile(own, 95)),
            "longest": int(own.max()),
            "edges": [width * i for i in range(BARS)],
            "counts": np.bincount(np.minimum(own // width, BARS - 1), minlength=BARS).tolist(),
        }
    return spreads


def bar_labels(spread: Json) -> list[str]:
    """Return '0-49', '50-99', ..., '750 and more'."""
    edges = spread["edges"]
    inner = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in pairwise(edges)]
    return [*inner, f"{edges[-1]} and more"]
