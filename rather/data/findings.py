"""Findings about the pairs of a run: repeats, contradictions, leakage, truncation and length bias.

Everything is computed from lengths and from hashes that were stored with the tokens, so no text is
read again. Two texts are the same if they differ only in case, white space and Unicode form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rather.data.pairs import IDS, PairDataset
from rather.data.report import GROUPS, Json

BARS = 16
SEVERITIES = ("serious", "warning", "info")
TINY_WEIGHT = 1e-6  # the mean of a million pairs of weight 1 hardly moves by one such pair
LENGTH_MATTERS = 0.65  # accuracy of "pick the longer answer", or the shorter

Hashes = NDArray[np.uint64]


# Kind of a finding -> from which share on it is a warning, or serious; the kinds under which the
# report counts its pairs; what is said, and advised.
Rule = tuple[float, float, tuple[str, ...], str, str]
RULES: dict[str, Rule] = {
    "prompt_lost": (
        0,
        0.5,
        ("prompt_lost",),
        "{percent} of the {unit} of {set} ({prompt_lost}) have lost their prompt: the chat template "
        "does not write it, so that the model learns answers to nothing.",
        "Correct data_args.template, or remove it to use the tokenizer's own; `rather data --show` "
        "prints the rendered pairs.",
    ),
    "answer_lost": (
        0,
        0.5,
        ("answer_lost",),
        "in {percent} of the {unit} of {set} ({answer_lost}) the chat template leaves out a part of "
        "an answer, such as its thoughts: the model does not learn it.",
        "Set data_args.template to a template that writes answers whole; `rather data --show` "
        "prints the rendered pairs.",
    ),
    "end_as_text": (
        0,
        0.5,
        ("end_as_text",),
        "in {percent} of the {unit} of {set} ({end_as_text}) answers end with a mark that is not a "
        "token of this tokenizer but plain text or unknown: the chat template belongs to another model, and "
        "generation will not stop there.",
        "Use the template that the model was trained with: remove data_args.template and "
        "global_template to use the tokenizer's own, or `none` for a model without one.",
    ),
    "one_label": (
        0,
        1.0,
        (),
        "all {pairs} answers of {set} are {which}: there is nothing to compare them with, and the "
        "model learns only to make such answers {direction} likely.",
        "Add answers of the other kind, or check how labels are read (data_args.columns, "
        "label_threshold); for good answers alone use task: sft.",
    ),
    "one_score": (
        0,
        1.0,
        (),
        "all {pairs} answers of {set} have the same score, {score:g}: a model that returns it for "
        "any text has no error.",
        "Check the column that data_args.columns reads as the score.",
    ),
    "leakage": (
        0,
        0.1,
        ("prompt_in_training_data",),
        "{percent} of the prompts of {set} are also in train, and so are {in_training_data} of "
        "its {pairs} {unit}: its scores measure memory as well as learning.",
        "Remove these rows from one of the two sets, or use validation.data_args.split, which "
        "holds out whole prompts.",
    ),
    "prompt_difference": (
        0,
        0.5,
        ("prompt_differs",),
        "{percent} of the {unit} of {set} ({prompt_differs}) have another prompt than at "
        "inference: {example}.",
        "Prompt the trained model with exactly the training prompt, or choose the "
        "data_args.template it is served with.",
    ),
    "contradictory_pairs": (
        0,
        0.05,
        ("contradictory_pair",),
        "{percent} of the pairs of {set} ({contradictory_pair}) are contradicted: elsewhere the "
        "same two answers to the same prompt are preferred the other way round.",
        "Keep the judgement that you trust; otherwise robust or label_smoothing helps.",
    ),
    "contradictory_labels": (
        0,
        0.05,
        ("contradictory_label",),
        "{percent} of the answers of {set} ({contradictory_label}) are contradicted: elsewhere "
        "the same answer to the same prompt has the other label.",
        "Keep the label that you trust.",
    ),
    "duplicate_pairs": (
        0.01,
        0.05,
        ("duplicate_pair",),
        "{percent} of the {unit} of {set} ({duplicate_pair}) repeat an earlier one.",
        "Remove them, unless they should count more; a weight column does that explicitly.",
    ),
    "beyond_positions": (
        0,
        0.05,
        (),
        "{percent} of the {unit} of {set} have more tokens than the {positions} positions of the "
        "model (up to {longest}): it was not made for what comes after them.",
        "Lower sequence_length to the model's max_position_embeddings, or use a model with more.",
    ),
    "tiny_weights": (
        0,
        2.0,
        (),
        "{percent} of the {unit} of {set} have a weight below {limit:g} (the smallest is "
        "{smallest:g}): next to others of weight 1 they have no influence, and if all are so small "
        "their weights say nothing.",
        "Check the column that is read as weight; remove rows that should not count, or give them "
        "weight 0.",
    ),
    "truncation": (
        0.01,
        0.05,
        ("truncated_prompt", "truncated_response"),
        "{percent} of the {unit} of {set} are cut to sequence_length: {truncated_prompt} lose the "
        "beginning of their prompt, {truncated_response} the end of an answer.",
        "Raise sequence_length, or set data_args.overlong to drop.",
    ),
    "length_bias": (
        0,
        2.0,  # never serious: many good sets prefer longer answers
        (),
        'accuracy of "pick the {which} answer": {percent} (median difference {difference:+.0f} '
        "tokens, correlation {correlation:+.2f}): a model may learn only that.",
        "Watch the length of answers during evaluation. {help}.",
    ),
}


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


def examine(train: PairDataset, evals: Mapping[str, PairDataset], report: Json) -> Json:
    """Return the part `look` of a data report: lengths and findings.

    Repeats, contradictions and leaks are added to the warnings of their sets.
    """
    entries = sets_of(report)
    files = report["train"]["files"]
    trained: _Repeats | None = None
    sets = {}
    for (name, entry), pairs in zip(entries.items(), (train, *evals.values()), strict=True):
        repeats = _Repeats.of(pairs)
        flags = repeats.flags()
        if trained:
            flags["in_training_data"] = np.isin(repeats.pair, trained.pair)
            flags["prompt_in_training_data"] = np.isin(repeats.prompt, trained.prompt)
        else:
            trained = repeats
        for kind, rows in flags.items():
            if rows.any():
                # Pairs that are held out of train come from its files.
                numbers_of_files = _places(pairs, rows, entry.get("files", files))
                warning = {"count": int(rows.sum()), "places": numbers_of_files, "examples": []}
                entry.setdefault("warned", {})[kind] = warning
        columns = IDS if repeats.is_paired else IDS[:2]
        lengths = {column: pairs.lengths(column) for column in columns}
        label = pairs.column("label")
        sets[name] = {
            "pairs": len(pairs),
            "prompts": len(np.unique(repeats.prompt)),
            "lengths": _spreads(lengths),
            "length_bias": _length_bias(lengths["chosen"], label, lengths.get("rejected")),
            **_same_value(report.get("rows"), pairs),
            **_tiny_weights(pairs.column("weight")),
        }
    return {"sets": sets, "findings": _findings(entries, sets)}


@dataclass(frozen=True)
class _Repeats:
    """Hashes of the pairs of a set, to find those that come again or contradict each other."""

    prompt: Hashes
    pair: Hashes
    opposite: Hashes  # of a pair that would contradict this one
    is_paired: bool
    has_opposite: NDArray[np.bool_]

    @staticmethod
    def of(pairs: PairDataset) -> _Repeats:
        prompt, chosen, rejected = (pairs.column(f"normal_{column}") for column in IDS)
        if pairs.lengths("rejected").any():
            pair = combine(prompt, chosen, rejected)
            opposite = combine(prompt, rejected, chosen)
            return _Repeats(prompt, pair, opposite, True, np.ones(len(pair), bool))
        # Single answers differ by their labels.
        label = pairs.column("label")
        pair = combine(prompt, chosen, np.nan_to_num(label).astype(np.uint64))
        opposite = combine(prompt, chosen, np.nan_to_num(1 - label).astype(np.uint64))
        return _Repeats(prompt, pair, opposite, False, ~np.isnan(label))

    def flags(self) -> dict[str, NDArray[np.bool_]]:
        """Return which pairs repeat an earlier one, and which contradict another."""
        again = np.ones(len(self.pair), bool)
        _, first_rows = np.unique(self.pair, return_index=True)
        again[first_rows] = False
        contradiction = "contradictory_pair" if self.is_paired else "contradictory_label"
        contradicts = np.isin(self.opposite, self.pair) & self.has_opposite
        return {"duplicate_pair": again, contradiction: contradicts}


def _same_value(rows: str | None, pairs: PairDataset) -> Json:
    """Return the label or score that all answers have, if there is only one."""
    columns = {"labelled": ("one_label", "label"), "scored": ("one_score", "score")}
    if rows not in columns:
        return {}
    finding, column = columns[rows]
    values = np.unique(pairs.column(column))
    return {finding: float(values[0])} if len(values) == 1 else {}


def _tiny_weights(weights: NDArray[np.float64]) -> Json:
    tiny = weights[(weights > 0) & (weights < TINY_WEIGHT)]
    facts = {"share": len(tiny) / len(weights), "smallest": float(min(tiny, default=0.0))}
    return {"tiny_weights": facts} if len(tiny) else {}


def _places(pairs: PairDataset, rows: NDArray[np.bool_], files: list[Json]) -> dict[str, list[int]]:
    numbers_of_files: dict[str, list[int]] = {}
    sources = pairs.column("source")[rows].tolist()
    numbers = pairs.column("number")[rows].tolist()
    for source, number in zip(sources, numbers, strict=True):
        numbers_of_files.setdefault(files[source]["path"], []).append(number)
    return numbers_of_files


def _unit(own: Json) -> str:
    return "pairs" if "rejected" in own["lengths"] else "answers"


def _finding(name: str, set_name: str, share: float, facts: Json) -> Json:
    warning, serious, _, text, advice = RULES[name]
    percent = f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
    severity = SEVERITIES[2 - (share >= warning) - (share >= serious)]
    text = text.format_map(facts | {"set": set_name, "percent": percent})
    fields = {"name": name, "severity": severity, "set": set_name, "number": round(share, 4)}
    return fields | {"text": text, "advice": advice.format_map(facts)}


def by_severity(findings: Iterable[Json]) -> list[Json]:
    """Return findings with the most severe first, then in the order of RULES."""
    order = {name: i for i, name in enumerate((*SEVERITIES, *RULES))}
    return sorted(
        findings, key=lambda finding: (order[finding["severity"]], order[finding["name"]])
    )


def beyond_positions(sets: Mapping[str, PairDataset], positions: int) -> Iterator[Json]:
    """Yield a finding for each set with sequences that are longer than a model's positions.

    The data report does not know the model, so a run adds them to its own.
    """
    for name, pairs in sets.items():
        prompt, *answers = (pairs.lengths(column) for column in IDS)
        tokens = prompt + np.maximum(*answers)
        unit = "pairs" if answers[1].any() else "answers"
        facts = {"unit": unit, "positions": positions, "longest": int(tokens.max())}
        share = float((tokens > positions).mean())
        if share:
            yield _finding("beyond_positions", name, share, facts)


def _findings(entries: Json, sets: Json) -> list[Json]:
    """Return all findings, the most severe first."""
    findings: list[Json] = []

    def judge(name: str, set_name: str, share: float, facts: Json) -> None:
        if share:
            findings.append(_finding(name, set_name, share, facts))

    for set_name, entry in entries.items():
        counts: Json = defaultdict(int, pairs=entry["pairs"], unit=_unit(sets[set_name]))
        for group in GROUPS:
            counts |= {kind: events["count"] for kind, events in entry.get(group, {}).items()}
        for example in entry.get("warned", {}).get("prompt_differs", {}).get("examples", ())[:1]:
            counts["example"] = example["detail"]
        for name, (_, _, kinds, *_) in RULES.items():
            judge(name, set_name, sum(counts[kind] for kind in kinds) / entry["pairs"], counts)
    train = sets["train"]
    if "one_label" in train:
        which, direction = ("good", "more") if train["one_label"] > 0.5 else ("bad", "less")
        facts = {"pairs": train["pairs"], "which": which, "direction": direction}
        judge("one_label", "train", 1.0, facts)
    if "one_score" in train:
        judge("one_score", "train", 1.0, {"pairs": train["pairs"], "score": train["one_score"]})
    longer = train["length_bias"]["longer_wins"]
    accuracy = max(longer, 1 - longer)
    if accuracy >= max(LENGTH_MATTERS, 0.5 + 1.5 / sqrt(train["pairs"])):  # 3 deviations of a coin
        judge("length_bias", "train", accuracy, _length_facts(train))
    weights = train.get("tiny_weights")
    if weights:
        facts = {"unit": _unit(train), "limit": TINY_WEIGHT, **weights}
        judge("tiny_weights", "train", weights["share"], facts)
    return by_severity(findings)


def _length_facts(train: Json) -> Json:
    which = "longer" if train["length_bias"]["longer_wins"] > 0.5 else "shorter"
    advice = "Desirable and undesirable answers of similar length help"
    if _unit(train) == "pairs":
        advice = (
            "Pairs of similar length help, and for task: preference ld_alpha or a "
            "length-normalised loss (simpo, sigmoid_norm)"
        )
    return {**train["length_bias"], "which": which, "help": advice}


def _length_bias(
    length: NDArray[Any], label: NDArray[Any], rejected: NDArray[Any] | None = None
) -> dict[str, float]:
    """Measure how well the length of an answer alone predicts that it is the better one.

    Without rejected answers, each desirable one is compared with all undesirable ones. A tie counts
    half.
    """
    good = length[label == 1]
    bad = np.sort(length[label == 0])
    longer = shorter = 0.5
    difference = np.zeros(1)
    if rejected is not None:
        longer = (length > rejected).mean()
        shorter = (length < rejected).mean()
        difference = length.astype(np.float64) - rejected
        length = np.concatenate([length, rejected])
        label = np.arange(len(length)) < len(rejected)
    elif len(good) and len(bad):
        longer = np.searchsorted(bad, good, "left").mean() / len(bad)
        shorter = 1 - np.searchsorted(bad, good, "right").mean() / len(bad)
        difference = np.median(good, keepdims=True) - np.median(bad)
    spread = length.std() * label.std()
    return {
        "chosen_longer": round(float(longer), 4),
        "longer_wins": round(float(1 + longer - shorter) / 2, 4),
        "correlation": round(float(np.corrcoef(length, label)[0, 1]), 4) if spread > 0 else 0.0,
        "difference": float(np.median(difference)),
    }


def _spreads(lengths: Mapping[str, NDArray[np.int32]]) -> dict[str, Json]:
    """Return each part's lengths as BARS bars; both answers have the same, to be comparable.

    Bar i counts from edges[i] to below the next edge; the last one also counts whatever is longer.
    """
    answers = [tokens for column, tokens in lengths.items() if column != "prompt"]
    both_answers = np.concatenate(answers)
    spreads = {}
    for column, tokens in lengths.items():
        shown = tokens if column == "prompt" else both_answers
        least = int(shown.min())
        largest = float(np.percentile(shown, 99))
        width = max(1, int(largest - least) // BARS)
        while (first := least // width * width) + width * BARS <= largest:
            width += 1  # bars begin at multiples of their width
        spreads[column] = {
            "median": float(np.median(tokens)),
            "p95": float(np.percentile(tokens, 95)),
            "longest": int(tokens.max()),
            "edges": [first + width * i for i in range(BARS)],
            "counts": np.bincount(
                np.minimum((tokens - first) // width, BARS - 1), minlength=BARS
            ).tolist(),
        }
    return spreads


def bar_labels(spread: Json) -> list[str]:
    """Return '100-149', '150-199', ..., '850 and more'."""
    edges = spread["edges"]
    labels = []
    for edge, next_edge in pairwise(edges):
        is_single = next_edge - edge == 1
        labels.append(str(edge) if is_single else f"{edge}-{next_edge - 1}")
    return [*labels, f"{edges[-1]} and more"]
