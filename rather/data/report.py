"""What happened to the rows: counts by reason and place, and figures about the pairs kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rather.data.pairs import IDS, PairDataset, PairFile
from rather.data.read import DataFile

EXAMPLES = 5
CHANGES = (
    "boundary_moved", "double_bos", "double_eos", "eos_lost", "eos_text_removed",
    "special_token_escaped", "ties_skipped", "truncated_prompt", "truncated_response",
    "turn_not_scored",
)  # fmt: skip
GROUPS = ("dropped", "changed", "warned")
TOO_LONG = ("prompt_too_long", "too_long")
MEANINGS = {
    "bad_encoding": "not valid in the file's encoding",
    "bad_json": "not valid JSON",
    "bad_mask": "a mask that does not fit its tokens",
    "bad_roles": "turns in an order that no conversation has",
    "bad_type": "a value of the wrong type",
    "bad_unicode": "half of a surrogate pair",
    "boundary_moved": "the prompt's last tokens change when the answer follows",
    "contradictory_pair": "the same two answers preferred the other way round elsewhere",
    "control_characters": "control, zero-width or text-direction characters",
    "damaged_gzip": "gzip data that breaks off",
    "double_bos": "several BOS became one",
    "double_eos": "several end tokens became one",
    "duplicate_pair": "the same pair again",
    "empty_prompt": "nothing is asked",
    "empty_response": "an answer of white space",
    "eos_lost": "a cut answer without its end token",
    "eos_text_removed": "EOS written as text at the end of an answer",
    "glued_boundary": "prompt and answer run together; set data_args.separator",
    "identical_after_truncation": "both answers are the same tokens",
    "identical_text": "both answers are the same text",
    "in_training_data": "the same pair is in the training data",
    "missing_key": "a needed key is missing",
    "no_eos": "the tokenizer has no EOS to end an answer",
    "nothing_scored": "no token left to score",
    "prompt_in_training_data": "the same prompt is in the training data",
    "prompt_mismatch": "the two answers belong to different prompts",
    "prompt_too_long": "the prompt alone fills sequence_length",
    "row_too_large": "a gigantic row",
    "special_token_escaped": "special-token text made plain",
    "special_token_text": "text of special tokens, which can forge turns",
    "template_error": "the chat template refuses the row",
    "ties_skipped": "answers of equal rank",
    "too_deep": "values nested too deeply",
    "too_few_answers": "fewer than two ranked answers",
    "too_long": "longer than sequence_length",
    "truncated": "the file ends in the middle of a row",
    "truncated_prompt": "prompt cut on the left",
    "truncated_response": "answers cut on the right",
    "turn_not_scored": "an earlier turn that cannot be found",
}


@dataclass
class Places:
    """Where one thing happened: every row as a number, the first few with a sentence."""

    numbers: dict[int, array[int]] = field(default_factory=dict)  # by source
    examples: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers.values()))


class RowCounts:
    """Counts everything that happens while the files of a set are read."""

    def __init__(self, sources: Sequence[DataFile]) -> None:
        self.sources = sources
        self.rows, self.pairs = [0] * len(sources), [0] * len(sources)
        self.groups: dict[str, dict[str, Places]] = {group: {} for group in GROUPS}
        self.ignored: set[str] = set()

    def add(self, source: int, head: Mapping[str, Any], pairs: int) -> None:
        """Add what a child reports about a chunk."""
        self.rows[source] += head["rows"]
        self.pairs[source] += pairs
        self.ignored.update(head["ignored"])
        for kind, number, detail in head["dropped"]:
            self._add_place("dropped", kind, source, number, detail)
        for kind, number, detail in head["noted"]:
            group = "changed" if kind in CHANGES else "warned"
            self._add_place(group, kind, source, number, detail)

    def _add_place(self, group: str, kind: str, source: int, number: int, detail: str) -> None:
        places = self.groups[group].setdefault(kind, Places())
        places.numbers.setdefault(source, array("q")).append(number)
        if detail and len(places.examples) < EXAMPLES:
            places.examples.append((source, number, detail))

    def add_repeats(self, file: PairFile) -> None:
        """Add pairs that come again, and pairs that prefer the opposite of another."""
        pair, swapped = file.column("pair_hash"), file.column("swapped_hash")
        source, number = file.column("source"), file.column("number")
        again = np.ones(len(pair), bool)
        again[np.unique(pair, return_index=True)[1]] = False
        for kind, found, detail in (
            ("duplicate_pair", again, "the same pair came before"),
            ("contradictory_pair", np.isin(swapped, pair), "another row prefers the other answer"),
        ):
            for i in np.flatnonzero(found):
                self._add_place("warned", kind, int(source[i]), int(number[i]), detail)

    def to_json(self) -> dict[str, Any]:
        """Return the report. It has numbers of files: the same content elsewhere is the same."""
        files = zip(self.sources, self.rows, self.pairs, strict=True)
        return {
            "rows": sum(self.rows),
            "pairs": sum(self.pairs),
            "files": [
                {"kind": source.kind, "unit": source.unit, "rows": rows, "pairs": pairs}
                for source, rows, pairs in files
            ],
            **{
                group: {
                    kind: {
                        "count": places.count,
                        "places": {str(s): list(numbers) for s, numbers in places.numbers.items()},
                        "examples": [
                            {"file": str(s), self.sources[s].unit: number, "detail": detail}
                            for s, number, detail in places.examples
                        ],
                    }
                    for kind, places in sorted(
                        kinds.items(), key=lambda item: (-item[1].count, item[0])
                    )
                }
                for group, kinds in self.groups.items()
            },
            "ignored_columns": sorted(self.ignored),
        }


def with_paths(report: Mapping[str, Any], sources: Sequence[DataFile]) -> dict[str, Any]:
    """Return the report with the names that the files have today."""
    names = [str(source.path) for source in sources]

    def named(entry: Mapping[str, Any]) -> dict[str, Any]:
        places: dict[str, list[int]] = {}
        for source, numbers in entry["places"].items():
            places.setdefault(names[int(source)], []).extend(numbers)
        examples = [{**each, "file": names[int(each["file"])]} for each in entry["examples"]]
        return {**entry, "places": places, "examples": examples}

    files = zip(names, report["files"], strict=True)
    groups = {
        group: {kind: named(entry) for kind, entry in report[group].items()} for group in GROUPS
    }
    return {**report, "files": [{"path": name, **entry} for name, entry in files], **groups}


def figures(pairs: PairDataset) -> dict[str, Any]:
    """Return how long prompts and answers are, and how often the chosen one is the longer."""
    if not len(pairs):
        return {}
    lengths = {name: pairs.lengths(name) for name in IDS}
    chosen, rejected = lengths["chosen"], lengths["rejected"]
    different = np.diff(np.sort(pairs.column("prompt_hash")))  # faster than np.unique
    return {
        "tokens": {
            name: {
                "median": float(np.median(n)),
                "p95": float(np.percentile(n, 95)),
                "max": int(n.max()),
            }
            for name, n in lengths.items()
        },
        "total_tokens": int(pairs.tokens.sum()),
        "chosen_longer": round(float((chosen > rejected).mean()), 4),
        "rejected_longer": round(float((chosen < rejected).mean()), 4),
        "prompts": 1 + int(np.count_nonzero(different)),
    }


def leakage(train: PairDataset, held: PairDataset, report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of an evaluation set with what it shares with the training data."""
    warned = dict(report["warned"])
    for kind, column in (
        ("in_training_data", "pair_hash"),
        ("prompt_in_training_data", "prompt_hash"),
    ):
        shared = np.isin(held.column(column), train.column(column))
        places: dict[str, list[int]] = {}
        for source, number in zip(
            held.column("source")[shared], held.column("number")[shared].tolist(), strict=True
        ):
            places.setdefault(report["files"][source]["path"], []).append(number)
        if places:
            warned[kind] = {"count": int(shared.sum()), "places": places, "examples": []}
    return {**report, "warned": warned}


def share_dropped(report: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bad rows or pairs, and all. One that is only too long is not bad."""
    counts = {kind: entry["count"] for kind, entry in report["dropped"].items()}
    bad = sum(count for kind, count in counts.items() if kind not in TOO_LONG)
    return bad, sum(counts.values()) + report["pairs"]


def as_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """Yield the dropped rows as plain text, for an error message."""
    for kind, entry in report["dropped"].items():
        yield f"  {entry['count']:>8}  {kind}: {MEANINGS[kind]}"
        for example in entry["examples"][:2]:
            number = example.get("line", example.get("row"))
            yield f"            {example['file']}:{number}: {example['detail']}"
