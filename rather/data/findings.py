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
HUGE_SCORE = 1e4  # Elo ratings are below; those of a new model are about 1
TINY_BETA = 1e-4  # answers differ by some hundred nats, and their margin by less than 0.1
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
    "no_eos": (
        0,
        0.5,
        ("no_eos",),
        "in {percent} of the {unit} of {set} ({no_eos}) the model cannot learn where an answer "
        "ends: {no_eos_example}.",
        "Set eos_token in tokenizer_config.json, or data_args.template to one that ends each "
        "answer with the token at which generation stops.",
    ),
    "unknown_tokens": (
        0.001,
        0.01,
        (),
        "{percent} of the tokens in the answers of {set} stand for words that the tokenizer does "
        "not know: to the model they are all the same word.",
        "Use a model whose tokenizer knows the words of the data (`rather data --show`).",
    ),
    "same_answers": (
        0.9,  # most labels of a classification may be the same
        1.0,
        (),
        "{percent} of the {side} answers of {set} are the same text: the model can learn to "
        "prefer or avoid it without reading the prompt.",
        "Check the column that is read as this answer (data_args.columns).",
    ),
    "huge_scores": (
        0,
        0,
        (),
        "{percent} of the {unit} of {set} have a score or margin of up to {largest:.3g} in size: "
        "no model reaches it.",
        "Check the column that is read as score or margin, or scale it to about -10 to 10.",
    ),
    "unequal_weights": (
        0.9,  # with exponentially distributed weights it is a half
        0.95,
        (),
        "the weights of the {pairs} {unit} of {set} are so unequal that they count as "
        "{counted:.3g} of equal weight.",
        "Check the column that is read as weight; limit the largest weights.",
    ),
    "tiny_beta": (
        0,
        0,
        (),
        "beta is {beta:g}: margins, which are beta times differences of log-probs, stay near 0, "
        "and nothing holds the policy near its reference.",
        "Set beta to 0.01 or more; lower learning_rate for smaller steps.",
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
        "inference: {prompt_differs_example}.",
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
        }
    return {"sets": sets, "findings": _findings(entries, sets, _of_values(train, report))}


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


def _of_values(train: PairDataset, report: Json) -> Iterator[tuple[str, float, Json]]:
    """Yield name, share and facts of what labels, scores, weights, answers and beta show."""
    rows, beta = report["rows"], report["beta"]
    label, score, weights = map(train.column, ("label", "score", "weight"))
    if rows == "labelled" and len(np.unique(label)) == 1:
        which, direction = ("good", "more") if label[0] > 0.5 else ("bad", "less")
        yield "one_label", 1.0, {"which": which, "direction": direction}
    if rows == "scored" and len(np.unique(score)) == 1:
        yield "one_score", 1.0, {"score": score[0]}
    huge = np.abs(score)[np.abs(score) >= HUGE_SCORE]
    yield "huge_scores", len(huge) / len(train), {"largest": max(huge, default=0)}
    weights = weights[weights > 0]
    tiny = weights[weights < TINY_WEIGHT]
    facts = {"limit": TINY_WEIGHT, "smallest": min(tiny, default=0)}
    yield "tiny_weights", len(tiny) / len(train), facts
    if len(weights):
        weights = weights / weights.max()  # squares of large weights would overflow
        counted = weights.sum() ** 2 / (weights**2).sum()  # the effective sample size
        yield "unequal_weights", 1 - counted / len(weights), {"counted": counted}
    for side in IDS[1:]:
        _, counts = np.unique(train.column(f"normal_{side}"), return_counts=True)
        if max(counts) > 1 and train.lengths(side).any():
            yield "same_answers", max(counts) / len(train), {"side": side}
    if beta and beta < TINY_BETA:
        yield "tiny_beta", 1.0, {"beta": beta}


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


def _findings(
    entries: Json, sets: Json, of_values: Iterable[tuple[str, float, Json]]
) -> list[Json]:
    """Return all findings, the most severe first; `of_values` are those of the training pairs."""
    findings: list[Json] = []

    def judge(name: str, set_name: str, share: float, facts: Json) -> None:
        if share:
            findings.append(_finding(name, set_name, share, facts))

    for set_name, entry in entries.items():
        counts: Json = defaultdict(int, pairs=entry["pairs"], unit=_unit(sets[set_name]))
        for group in GROUPS:
            for kind, events in entry.get(group, {}).items():
                counts[kind] = events["count"]
                for example in events["examples"][:1]:
                    counts[f"{kind}_example"] = example["detail"]
        for name, (_, _, kinds, *_) in RULES.items():
            judge(name, set_name, sum(counts[kind] for kind in kinds) / entry["pairs"], counts)
        unknown, tokens = entry.get("unknown_tokens", (0, 1))
        judge("unknown_tokens", set_name, unknown / tokens, counts)
    train = sets["train"]
    for name, share, facts in of_values:
        if share >= RULES[name][0]:
            judge(name, "train", share, {"pairs": train["pairs"], "unit": _unit(train), **facts})
    longer = train["length_bias"]["longer_wins"]
    accuracy = max(longer, 1 - longer)
    if accuracy >= max(LENGTH_MATTERS, 0.5 + 1.5 / sqrt(train["pairs"])):  # 3 deviations of a coin
        judge("length_bias", "train", accuracy, _length_facts(train))
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
