"""What happened to the rows: counts by reason, with the place of every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rather.data.read import DataFile

Json = dict[str, Any]  # an object of a JSON file

EXAMPLES = 5
CHANGES = (
    "boundary_moved", "double_bos", "double_eos", "eos_lost", "eos_text_removed",
    "special_token_escaped", "ties_skipped", "truncated_prompt", "truncated_response",
    "prompt_changed", "turn_not_scored", "cut_answer", "duplicate_answer", "empty_answer", "unscored_answer", "small_gap", "length_gap", "own_tokens",
    "tokens_changed",
)  # fmt: skip
GROUPS = ("dropped", "changed", "warned")
TOO_LONG = ("prompt_too_long", "too_long")
MEANINGS = dict(
    line.split(": ", 1)
    for line in """\
answer_lost: the template leaves out a part of an answer
bad_image: an image that is missing, damaged, too large or not allowed
bad_encoding: not valid in the file's encoding
bad_json: not valid JSON
bad_csv: another number of cells than the header
bad_mask: a mask that does not fit its tokens
bad_roles: turns in an order that no conversation has
bad_type: a value of the wrong type
bad_unicode: half of a surrogate pair
boundary_moved: the prompt's last tokens change when the answer follows
contradictory_pair: the same two answers preferred the other way round elsewhere
contradictory_label: the same answer with the other label elsewhere
control_characters: control, zero-width or text-direction characters
cut_answer: an answer that a limit cut off
damaged_gzip: gzip data that breaks off
double_bos: several BOS became one
double_eos: several end tokens became one
duplicate_answer: the same answer to a prompt again
duplicate_pair: the same one again
empty_answer: a sampled answer of white space
empty_prompt: nothing is asked
empty_response: an answer of white space
end_as_text: the template ends answers with text instead of a token
eos_lost: a cut answer without its end token
eos_text_removed: EOS written as text at the end of an answer
glued_boundary: prompt and answer run together; set data_args.separator
identical_after_truncation: both answers are the same tokens
identical_text: both answers are the same text
image_count: another number of images than of places for them
images_refused: images, which are not read here
in_training_data: the same pair is in the training data
length_gap: answers whose lengths differ by more than max_length_gap
missing_key: a needed key is missing
no_eos: no token from which a model could learn where an answer ends
nothing_scored: no token left to score
own_tokens: the model's own tokens, which its text would not become
prompt_changed: the template changes the prompt when the answer follows; the prompt at inference is trained
prompt_differs: generation starts from another prompt than the one that is trained
prompt_in_training_data: the same prompt is in the training data
prompt_lost: the template leaves out what is asked
prompt_mismatch: the two answers belong to different prompts
prompt_too_long: the prompt alone fills sequence_length
row_too_large: a gigantic row
small_gap: scores that differ by less than min_gap
special_token_escaped: special-token text made plain
special_token_text: text of special tokens, which can forge turns
template_error: the chat template refuses the row
ties_skipped: answers of equal rank
tokens_changed: the text becomes other tokens than the model wrote
too_deep: values nested too deeply
too_few_answers: fewer than two ranked answers
too_long: longer than sequence_length
truncated: the file ends in the middle of a row
truncated_prompt: prompt cut on the left
truncated_response: answers cut on the right
turn_not_scored: an earlier turn that cannot be found
unscored_answer: an answer whose score is null
""".splitlines()
)


class RowCounts:
    """Counts everything that happens while the files of a set are read.

    Files are numbers here, so that the report of the same content elsewhere is the same.
    """

    def __init__(self, sources: Sequence[DataFile]) -> None:
        self.rows = 0
        self.files: list[Json] = [
            {"kind": source.kind, "unit": source.unit, "rows": 0, "pairs": 0} for source in sources
        ]
        self.groups: dict[str, Json] = {group: {} for group in GROUPS}
        self.ignored: set[str] = set()

    def add(self, source: int, head: Json, pairs: int) -> None:
        """Add what a child reports about a chunk."""
        file = self.files[source]
        file_name = str(source)
        file["rows"] += head["rows"]
        file["pairs"] += pairs
        self.rows += head["rows"]
        self.ignored.update(head["ignored"])
        events = [("dropped", event) for event in head["dropped"]]
        for event in head["noted"]:
            events.append(("changed" if event[0] in CHANGES else "warned", event))
        for group, (kind, number, detail) in events:
            new: Json = {"count": 0, "places": {}, "examples": []}
            entry = self.groups[group].setdefault(kind, new)
            entry["count"] += 1
            entry["places"].setdefault(file_name, []).append(number)
            if detail and len(entry["examples"]) < EXAMPLES:
                example = {"file": file_name, file["unit"]: number, "detail": detail}
                entry["examples"].append(example)

    def to_json(self) -> Json:
        """Return the report, the most frequent kinds first."""
        groups = {
            group: dict(sorted(kinds.items(), key=lambda item: (-item[1]["count"], item[0])))
            for group, kinds in self.groups.items()
        }
        pairs = sum(file["pairs"] for file in self.files)
        totals = {"rows": self.rows, "pairs": pairs, "files": self.files}
        return {**totals, **groups, "ignored_columns": sorted(self.ignored)}


def add_paths(report: Json, sources: Sequence[DataFile]) -> None:
    """Replace the numbers of files by the names that they have today."""
    names = [str(source.path) for source in sources]
    report["files"] = [
        {"path": name, **file} for name, file in zip(names, report["files"], strict=True)
    ]
    for entry in _entries(report):
        numbers_of_files = entry["places"].items()
        entry["places"] = {names[int(source)]: numbers for source, numbers in numbers_of_files}
        for example in entry["examples"]:
            example["file"] = names[int(example["file"])]


def _entries(report: Json) -> Iterator[Json]:
    """Yield what is reported of each kind of event."""
    for group in GROUPS:
        yield from report[group].values()


def check_report(report: Json, pairs: int) -> None:
    """Raise unless a report that was read from a file has the form of `to_json` and fits the pairs.

    A KeyError, IndexError, TypeError, ValueError or AttributeError says what is wrong.
    """
    files = report["files"]
    numbers = [report["rows"], report["pairs"], *report.get("unknown_tokens", ())]
    texts = [*report["ignored_columns"], report["template"]["name"], report["template"]["sha256"]]
    for file in files:
        numbers += [file["rows"], file["pairs"]]
        texts += [file["kind"], file["unit"]]
    for entry in _entries(report):
        numbers.append(entry["count"])
        for source, rows in entry["places"].items():
            numbers += [int(source), *rows]
        for example in entry["examples"]:
            numbers.append(int(example["file"]))
            numbers.append(example.get("line", example.get("row")))
            texts.append(example["detail"])
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a count of the report is not a number")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text of the report is not a text")
    if not sum(file["pairs"] for file in files) == report["pairs"] == pairs:
        raise ValueError(f"the report counts other pairs than the {pairs} of the file")


def share_dropped(report: Json) -> tuple[int, int]:
    """Return the bad rows or pairs, and all. One that is only too long is not bad."""
    counts = {kind: entry["count"] for kind, entry in report["dropped"].items()}
    bad = sum(count for kind, count in counts.items() if kind not in TOO_LONG)
    return bad, sum(counts.values()) + report["pairs"]


def as_lines(report: Json) -> Iterable[str]:
    """Yield the dropped rows as plain text, for an error message."""
    for kind, entry in report["dropped"].items():
        yield f"  {entry['count']:>8}  {kind}: {MEANINGS[kind]}"
        for example in entry["examples"][:2]:
            number = example.get("line", example.get("row"))
            yield f"            {example['file']}:{number}: {example['detail']}"
