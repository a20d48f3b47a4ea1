"""What happened to the rows: counts by reason, the place of each, and figures about the pairs that were kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rather.data.pairs import PairDataset, PairFile
from rather.data.read import Source

EXAMPLES = 5
CHANGES = (
    "boundary_moved", "double_bos", "double_eos", "eos_lost", "eos_text_removed", "special_token_escaped",
    "ties_skipped", "truncated_prompt", "truncated_response", "turn_not_scored",
)  # fmt: skip
GROUPS = ("dropped", "changed", "warned")
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
    """Where one thing happened: every place as a number, the first few with a sentence."""

    numbers: dict[int, array[int]] = field(default_factory=dict)  # by source
    examples: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers.values()))

    def add(self, source: int, number: int, detail: str = "") -> None:
        self.numbers.setdefault(source, array("q")).append(number)
        if detail and len(self.examples) < EXAMPLES:
            self.examples.append((source, number, detail))


@dataclass
class Counts:
    """Everything that is counted while a set is read."""

    sources: list[Source]
    rows: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    dropped: dict[str, Places] = field(default_factory=dict)
    noted: dict[str, Places] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rows, self.pairs = [0] * len(self.sources), [0] * len(self.sources)

    def add(self, source: int, head: Mapping[str, Any], pairs: int) -> None:
        self.rows[source] += head["rows"]
        self.pairs[source] += pairs
        for kinds, events in ((self.dropped, head["dropped"]), (self.noted, head["noted"])):
            for kind, number, detail in events:
                kinds.setdefault(kind, Places()).add(source, number, detail)
        self.ignored.update(head["ignored"])

    def note_repeats(self, file: PairFile) -> None:
        """Pairs that come again, and pairs that say the opposite of another."""
        pair, swapped = file.column("pair_hash"), file.column("swapped_hash")
        first = np.zeros(len(pair), bool)
        first[np.unique(pair, return_index=True)[1]] = True
        self.note_rows(file, np.flatnonzero(~first), "duplicate_pair", "the same pair came before")
        contradicted = np.flatnonzero(np.isin(swapped, pair))
        self.note_rows(
            file, contradicted, "contradictory_pair", "another row prefers the other answer"
        )

    def note_rows(self, file: PairFile, rows: NDArray[np.int64], kind: str, detail: str) -> None:
        if not len(rows):
            return
        sources, numbers = (
            file.column("source")[rows].tolist(),
            file.column("number")[rows].tolist(),
        )
        places = self.noted.setdefault(kind, Places())
        for source, number in zip(sources, numbers, strict=True):
            places.add(source, number, detail)

    def to_json(self) -> dict[str, Any]:
        """Files by their number: the same content elsewhere is the same data."""
        changed = {kind: places for kind, places in self.noted.items() if kind in CHANGES}
        warned = {kind: places for kind, places in self.noted.items() if kind not in CHANGES}
        return {
            "rows": sum(self.rows),
            "pairs": sum(self.pairs),
            "files": [
                {"kind": source.kind, "unit": source.unit, "rows": rows, "pairs": pairs}
                for source, rows, pairs in zip(self.sources, self.rows, self.pairs, strict=True)
            ],
            "dropped": self._listed(self.dropped),
            "changed": self._listed(changed),
            "warned": self._listed(warned),
            "ignored_columns": sorted(self.ignored),
        }

    def _listed(self, kinds: Mapping[str, Places]) -> dict[str, Any]:
        return {
            kind: {
                "count": places.count,
                "places": {
                    str(source): list(numbers) for source, numbers in places.numbers.items()
                },
                "examples": [
                    {"file": str(source), self.sources[source].unit: number, "detail": detail}
                    for source, number, detail in places.examples
                ],
            }
            for kind, places in sorted(kinds.items(), key=lambda item: (-item[1].count, item[0]))
        }


def with_paths(report: Mapping[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
    """The report with the names that the files have today."""
    names = [str(source.path) for source in sources]

    def named(entry: Mapping[str, Any]) -> dict[str, Any]:
        places: dict[str, list[int]] = {}
        for source, numbers in entry["places"].items():
            places.setdefault(names[int(source)], []).extend(numbers)
        examples = [
            {**example, "file": names[int(example["file"])]} for example in entry["examples"]
        ]
        return {**entry, "places": places, "examples": examples}

    return {
        **report,
        "files": [
            {"path": name, **entry} for name, entry in zip(names, report["files"], strict=True)
        ],
        **{
            group: {kind: named(entry) for kind, entry in report[group].items()} for group in GROUPS
        },
    }


def figures(pairs: PairDataset) -> dict[str, Any]:
    """How long prompts and answers are, and how often the chosen one is the longer: a model may learn just that."""
    if not len(pairs):
        return {}
    lengths = {name: pairs.lengths(name) for name in ("prompt", "chosen", "rejected")}
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
        "chosen_longer": round(float((lengths["chosen"] > lengths["rejected"]).mean()), 4),
        "rejected_longer": round(float((lengths["chosen"] < lengths["rejected"]).mean()), 4),
        "prompts": 1
        + int(
            np.count_nonzero(np.diff(np.sort(pairs.column("prompt_hash"))))
        ),  # faster than np.unique
    }


def leakage(train: PairDataset, held: PairDataset, report: dict[str, Any]) -> dict[str, Any]:
    """The report of an evaluation set with what it shares with the training data."""
    warned = dict(report["warned"])
    sources = [entry["path"] for entry in report["files"]]
    for kind, column in (
        ("in_training_data", "pair_hash"),
        ("prompt_in_training_data", "prompt_hash"),
    ):
        rows = np.flatnonzero(np.isin(held.column(column), train.column(column)))
        if len(rows):
            places: dict[str, list[int]] = {}
            for source, number in zip(
                held.column("source")[rows], held.column("number")[rows], strict=True
            ):
                places.setdefault(sources[source], []).append(int(number))
            warned[kind] = {"count": len(rows), "places": places, "examples": []}
    return {**report, "warned": warned}


TOO_LONG = ("prompt_too_long", "too_long")


def share_dropped(report: Mapping[str, Any]) -> tuple[int, int]:
    """Bad rows or pairs, and all there were. A pair that is only too long is not bad: overlong decides about it."""
    counts = {kind: entry["count"] for kind, entry in report["dropped"].items()}
    bad = sum(count for kind, count in counts.items() if kind not in TOO_LONG)
    return bad, sum(counts.values()) + report["pairs"]


def as_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """The dropped rows as plain text, for an error message."""
    for kind, entry in report["dropped"].items():
        yield f"  {entry['count']:>8}  {kind}: {MEANINGS[kind]}"
        for example in entry["examples"][:2]:
            number = example.get("line", example.get("row"))
            yield f"            {example['file']}:{number}: {example['detail']}"
