"""Read rows of any known format as pairs of text, or as a counted reason why not.

A format is one decorated function, in a file of this folder or in a file that `--import` names:

    from rather.data.formats import data_format

    @data_format("question", "good", "bad")
    def good_and_bad(row):
        return row["question"], (row["good"], row["bad"])

Its name is the value for `data_args.format`. The columns are those that a row must have; with
`format: auto` a row is read by the format that was registered last among those whose columns it
has. The function returns the prompt and (chosen, rejected), the prompt and `Ranked` answers, or the
prompt and a `Single` answer.
Prompts and answers are text or lists of messages. It may raise `DropReason`.

Every pair ends as plain text (all three strings) or as a conversation (all three lists of
messages), so that nothing later has to ask where a row came from.
"""

from __future__ import annotations

import difflib
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from typing import Any, NamedTuple

from rather.config.plugins import Registry, did_you_mean
from rather.data.images import PARTS, PLACEHOLDER, references
from rather.data.json_rows import DropReason
from rather.data.messages import (
    NO_MEDIA,
    REFERENCES,
    Turns,
    as_turns,
    check_roles,
    text_or_turns,
    wrong_type,
)
from rather.errors import LIMITS, DataError
from rather.files import parse_json

Row = Mapping[str, Any]
ANSWERS = ("chosen", "rejected")
GRADES = ("label", "kto_tag", "score")
EXTRAS = ("weight", "margin", "soft_label", "id", "tools", "chat_template_kwargs")
IMAGES = ("images", "image")
REJECTED_IMAGES = "rejected_images"  # ms-swift's: those of the prompt again
MEDIA = ("videos", "video", "audios", "audio")
IMAGES_REFUSED = "images_refused"  # why a row is dropped
TEXT_ONLY = f"only text is read here; {LIMITS}"
GENERATED = ("ended", "response_ids", "prompt_ids", "tokens_digest")  # by `rather generate`
OPTIONAL = ("input", "system", "history", "ranks", "scores", *GENERATED, *GRADES, *EXTRAS, *IMAGES)
NO_ANSWER = object()  # the rejected side of a single answer
TOKENISED = "tokenised"  # rows of token ids: see tokens.py
ONE_ANSWER = (
    "missing_key",
    "the row has one answer, not a pair; to train on it, set task: unpaired for labels, task: "
    "reward with pref_loss: regression for scores, or task: sft",
)
NO_SCORES = (
    "missing_key",
    "no scores: give rows with responses and scores, or one answer and a score",
)
RANGES = {"weight": (0, math.inf), "margin": (-math.inf, math.inf), "soft_label": (0, 1)}


class FormatError(DataError):
    """The function of a data format has a mistake."""


class Single(NamedTuple):
    """One answer to a prompt; the columns label and score say how good it is."""

    answer: Any


class OwnTokens(NamedTuple):
    """The tokens that a model wrote: the prompt's, and those of one or more answers."""

    digest: str  # of the tokenizer and template that they belong to
    prompt: list[int]
    answers: list[list[int]]

    def only(self, *which: int) -> OwnTokens:
        return self._replace(answers=[self.answers[i] for i in which])


class Ranked(NamedTuple):
    """Answers to one prompt; a smaller rank is a better answer, NaN an unknown one."""

    answers: list[Any]
    ranks: list[float]
    ended: list[bool] | None = None  # of sampled answers: False if a limit cut it off
    tokens: OwnTokens | None = None


Couple = tuple[Any, Any, Mapping[str, Any]]  # chosen, rejected, further fields of TextPair
Reader = Callable[[Row], tuple[Any, tuple[Any, Any] | Ranked | Single]]


class DataFormat(NamedTuple):
    """A known form of rows: how it is read, and the columns it needs or may have."""

    read: Reader
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    single: bool = False  # gives one answer, which is not a pair

    def fits(self, columns: set[str]) -> bool:
        has_one_of = not self.one_of or not columns.isdisjoint(self.one_of)
        return columns.issuperset(self.needs) and has_one_of


FORMATS: Registry[DataFormat] = Registry("data format", "rather.data.formats")


def data_format(
    *needs: str,
    may: tuple[str, ...] = (),
    one_of: tuple[str, ...] = (),
    single: bool = False,
) -> Callable[[Reader], Reader]:
    """Register a function that reads rows with these columns. Its name becomes the format's."""

    def register(read: Reader) -> Reader:
        FORMATS.add(read.__name__, DataFormat(read, needs, may, one_of, single), read.__module__)
        return read

    return register


def require(row: Row, *names: str) -> None:
    """Check that keys are there: one that is null has a wrong type, one that is not is missing."""
    for name in names:
        if name not in row:
            keys = list(map(str, row))
            near = difflib.get_close_matches(name, keys, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            present = ", ".join(keys[:20]) or "no keys"
            raise DropReason("missing_key", f"no key {name!r}{hint}; the row has {present}")
        if row[name] is None:
            raise DropReason("bad_type", f"{name} is null; it needs a value")


def number_of(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a value that must be a finite number from `low` to `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or not low <= value <= high:
        raise wrong_type(where, f"a number from {low:g} to {high:g}", value)
    return float(value)


def extras_of(row: Row) -> dict[str, Any]:
    """Return what a row may say about its pairs in any format."""
    _refuse_media(row)
    columns = {name: row[name] for name in EXTRAS if row.get(name) is not None}
    extras: dict[str, Any] = {
        name: number_of(columns[name], name, *limits)
        for name, limits in RANGES.items()
        if name in columns
    }
    if "id" in columns:
        row_id = columns["id"]
        if isinstance(row_id, bool) or not isinstance(row_id, str | int):
            raise wrong_type("id", "text or a whole number", row_id)
        extras["id"] = str(row_id)
    nested = (("tools", "tools", list), ("chat_template_kwargs", "template_kwargs", dict))
    for name, meant, kind in nested:
        if columns.get(name):
            extras[meant] = _nested(columns[name], name, kind)
    return extras


def _refuse_media(row: Row) -> None:
    for name in MEDIA:
        if _has_value(row, name):
            raise DropReason("bad_type", f"the row has a column {name}: {NO_MEDIA}")
    if _has_value(row, REJECTED_IMAGES) and row[REJECTED_IMAGES] != row.get("images"):
        raise DropReason(
            "bad_type", f"{REJECTED_IMAGES}: images are read in prompts only, for both answers"
        )


def _has_value(row: Row, name: str) -> bool:
    column = row.get(name)
    return column is not None and not (isinstance(column, Sized) and len(column) == 0)


def has_images(row: Row) -> bool:
    """Return whether a row, as it is in its file, names images."""
    if any(_has_value(row, name) for name in IMAGES):
        return True
    for column in row.values():
        messages = column if isinstance(column, list) else [column]
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            if any(isinstance(part, dict) and part.get("type") in PARTS for part in parts):
                return True
    return False


def place_images(prompt: str | Turns, row: Row, refuse: str) -> tuple[str | Turns, tuple[str, ...]]:
    """Return the prompt with a placeholder for each of its images, and the images in their order.

    If a prompt has images but no place for them, they come before its first question, as in TRL.
    `refuse` says why images are not read; it is empty if they are.
    """
    turns = as_turns(prompt, "user") or as_turns("", "user")
    has_parts = any(REFERENCES in turn for turn in turns)
    columns = [row[name] for name in IMAGES if _has_value(row, name)]
    if refuse and (columns or has_parts):
        raise DropReason(IMAGES_REFUSED, f"the row has images, but {refuse}")
    # A row with an empty column lost its images if its text has places for them.
    if refuse or not (has_parts or set(IMAGES).intersection(row)):
        return prompt, ()
    images = _only_column(columns)
    places = list(chain.from_iterable(map(_places_of, turns)))
    turns = tuple({key: turn[key] for key in turn if key != REFERENCES} for turn in turns)
    if not places:
        places = [None] * len(images)
        turns = _with_places_first(turns, len(images))
    placed = turns[0]["content"] if isinstance(prompt, str) else turns
    return placed, _filled(places, images)


def _only_column(columns: Sequence[Any]) -> list[str]:
    if len(columns) > 1:
        raise DropReason("bad_type", f"the row has the columns {' and '.join(IMAGES)}; keep one")
    return references(columns[0]) if columns else []


def _filled(places: Sequence[str | None], images: Sequence[str]) -> tuple[str, ...]:
    """Return the image of each place: its own, or the next of the row."""
    unnamed = places.count(None)
    if unnamed != len(images):
        raise DropReason(
            "image_count",
            f"the prompt has {unnamed} places for images ({PLACEHOLDER} or image parts), the row "
            f"has {len(images)} images",
        )
    remaining = iter(images)
    return tuple(image or next(remaining) for image in places)


def _places_of(turn: Mapping[str, Any]) -> list[str | None]:
    """Return an entry for each image of a turn: its name, or None for the next of the row."""
    if turn["role"] == "assistant":
        _refuse_in_answer(turn)
        return []
    count = turn["content"].count(PLACEHOLDER)
    images: list[str | None] = turn.get(REFERENCES, [None] * count)
    if len(images) != count:
        raise DropReason("image_count", f"a message has image parts and the text {PLACEHOLDER}")
    return images


def _with_places_first(turns: Turns, count: int) -> Turns:
    """Return the turns with places for images before the first question."""
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
    content = PLACEHOLDER * count + turns[first]["content"]
    return (*turns[:first], {**turns[first], "content": content}, *turns[first + 1 :])


def _nested(content: Any, name: str, kind: type) -> Any:
    """Return a list or a mapping, which tables often have as JSON text."""
    if isinstance(content, str):
        try:
            content = parse_json(content)
        except ValueError as error:
            raise DropReason("bad_type", f"{name} is text but not JSON ({error})") from error
    if not isinstance(content, kind):
        raise wrong_type(name, f"a {kind.__name__}", content)
    return content


@dataclass(frozen=True)
class TextPair:
    """One preference pair: all strings, or all conversations (the answers continue the prompt).

    A single answer is a `chosen` one whose `rejected` is empty; it may have a label or a score.
    """

    prompt: str | Turns
    chosen: str | Turns
    rejected: str | Turns
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    margin: float = math.nan
    soft_label: float = math.nan
    label: float = math.nan
    score: float = math.nan
    id: str = ""
    tokens: OwnTokens | None = None
    images: tuple[str, ...] = ()  # paths and data URLs, one for each placeholder of the prompt
    image_dir: str = ""  # the folder that paths are in

    @property
    def answers(self) -> list[str | Turns]:
        return [self.chosen, self.rejected] if self.rejected else [self.chosen]


class RowPairs(NamedTuple):
    """What one row gives: pairs, reasons of dropped pairs, how many were skipped by kind, and
    unused columns."""

    pairs: list[TextPair]
    dropped: list[DropReason]
    skipped: Mapping[str, int]
    ignored: list[str]


def check_format(name: str, key: str) -> None:
    """Raise a ConfigError about `key` if there is no format with this name."""
    if name not in ("auto", TOKENISED):
        FORMATS.find(name, key)


@dataclass(frozen=True)
class RowLayout:
    """How rows are read: format, names of columns, and which pairs ranked answers give.

    The fields and their names are part of the address of cached data.
    """

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # Rather's name -> the file's
    ranked_pairs: str = "all"
    rows: str = "pairs"  # or single answers: "labelled", "scored", or any "answers"
    label_threshold: float | None = None
    min_gap: float | None = None  # of the scores of ranked answers
    max_length_gap: int | None = None  # tokens
    refuse_images: str = TEXT_ONLY  # why images are not read; empty if they are
    image_dirs: Sequence[str] = ()  # of each data file

    def __post_init__(self) -> None:
        check_format(self.format, "data_args.format")
        readable = {*EXTRAS, *IMAGES}.union(
            *((*form.needs, *form.may) for form in FORMATS.values())
        )
        for name in self.columns:
            if name not in readable:
                hint = did_you_mean(name, sorted(readable))
                raise DataError(f"data_args.columns: {name!r} is not a column that is read{hint}")


def read_row(row: Row, layout: RowLayout) -> RowPairs:
    """Return all pairs of one row."""
    try:
        columns = layout.columns
        require(row, *(theirs for ours, theirs in columns.items() if ours not in OPTIONAL))
        mapped_names = {*columns, *columns.values()}
        renamed = {name: content for name, content in row.items() if name not in mapped_names}
        renamed |= {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
        form = _format_of(renamed, layout)
        prompt, answers = read_by(form, renamed)
        prompt = text_or_turns(prompt, "the prompt")
        extras = extras_of(renamed)
        prompt, extras["images"] = place_images(prompt, renamed, layout.refuse_images)
        couples, skipped = _couples(answers, renamed, layout)
    except DropReason as reason:
        if reason.reason == "missing_key" and layout.columns:
            reason.detail += f"; data_args.columns is {dict(layout.columns)}"
        return RowPairs([], [reason], {}, [])
    used = {*form.needs, *form.may, *EXTRAS, *IMAGES}.difference(
        GRADES if layout.rows == "answers" else ()
    )
    row_pairs = RowPairs([], [], skipped, [name for name in renamed if name not in used])
    for chosen, rejected, grade in couples:
        try:
            row_pairs.pairs.append(_pair(prompt, chosen, rejected, {**extras, **grade}))
        except DropReason as reason:
            row_pairs.dropped.append(reason)
    return row_pairs


def read_by(form: DataFormat, row: Row) -> tuple[Any, Any]:
    """Call the function of a format; a mistake in it is an error that names its line."""
    try:
        prompt, answers = form.read(row)
    except DropReason:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if frame.filename == __file__:
            text = "it must return the prompt and (chosen, rejected), Ranked or Single answers"
        else:
            text = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        raise FormatError(f"data format '{form.read.__name__}' failed: {text}") from error
    return prompt, answers


def _couples(answers: Any, row: Row, layout: RowLayout) -> tuple[list[Couple], Counter[str]]:
    """Return pairs or single answers, and how many were skipped, by kind.

    Of a pair that gives single answers, the chosen one is desirable and the rejected one is not.
    """
    rows = layout.rows
    skipped: Counter[str] = Counter()
    if isinstance(answers, Single):
        return [(answers.answer, NO_ANSWER, _grade(row, layout))], skipped
    if isinstance(answers, Ranked):
        usable = _usable_answers(answers, skipped)
        if rows == "scored":
            return _scored_answers(answers, usable), skipped
        which = layout.ranked_pairs if rows == "pairs" else "best_vs_worst"
        pairs = _ranked(answers, usable, which, layout.min_gap, skipped)
    elif rows == "scored":
        raise DropReason(*NO_SCORES)
    else:
        pairs = [(*answers, {})]
    if rows == "pairs":
        return pairs, skipped
    if rows == "answers":
        return [(chosen, NO_ANSWER, {}) for chosen, _, _ in pairs], skipped
    couples: list[Couple] = []
    for chosen, rejected, _ in pairs:
        couples.append((chosen, NO_ANSWER, {"label": 1.0}))
        couples.append((rejected, NO_ANSWER, {"label": 0.0}))
    return couples, skipped


def _usable_answers(ranked: Ranked, skipped: Counter[str]) -> list[int]:
    """Return which answers with a rank are used; sampled ones must be complete and new."""
    usable: list[int] = []
    for i, answer in enumerate(ranked.answers):
        if math.isnan(ranked.ranks[i]):
            skipped["unscored_answer"] += 1
        elif ranked.ended is None:
            usable.append(i)
        elif not ranked.ended[i]:
            skipped["cut_answer"] += 1
        elif isinstance(answer, str) and not answer.strip():
            skipped["empty_answer"] += 1
        elif any(answer == ranked.answers[earlier] for earlier in usable):
            skipped["duplicate_answer"] += 1
        else:
            usable.append(i)
    return usable


def _grade(row: Row, layout: RowLayout) -> dict[str, float]:
    """Return the label or score of a single answer."""
    if layout.rows == "pairs":
        raise DropReason(*ONE_ANSWER)
    if layout.rows == "labelled":
        return {"label": _label(row, layout.label_threshold)}
    if layout.rows == "scored":
        require(row, "score")
        return {"score": number_of(row["score"], "score")}
    return {}


def _scored_answers(ranked: Ranked, usable: Sequence[int]) -> list[Couple]:
    couples: list[Couple] = []
    for i in usable:
        tokens = ranked.tokens and ranked.tokens.only(i)
        grade = {"score": -ranked.ranks[i], "tokens": tokens}
        couples.append((ranked.answers[i], NO_ANSWER, grade))
    return couples


def _label(row: Row, threshold: float | None) -> float:
    """Return 1 for a desirable answer, 0 for an undesirable one."""
    name = next((name for name in ("label", "kto_tag") if row.get(name) is not None), "label")
    if threshold is not None:
        name = name if row.get(name) is not None else "score"
        require(row, name)
        return float(number_of(row[name], name) >= threshold)
    if name not in row and row.get("score") is not None:
        raise DropReason(
            "missing_key", "no key 'label', but a score; set data_args.label_threshold"
        )
    require(row, name)
    label = row[name]
    if isinstance(label, str):
        label = {"true": True, "false": False}.get(label.strip().lower(), label)
    if label not in (0, 1):
        raise wrong_type(
            name, "true or false, 1 or 0 (for scores, set data_args.label_threshold)", label
        )
    return float(label)


def _format_of(row: Row, layout: RowLayout) -> DataFormat:
    if layout.format != "auto":
        data_format = FORMATS[layout.format]
        require(row, *data_format.needs)
        if not data_format.fits(_columns_with_values(row)):
            raise DropReason("missing_key", f"the row has none of {', '.join(data_format.one_of)}")
        return data_format
    if form := matching_format(row, layout):
        return form
    columns = _columns_with_values(row)
    if "responses" not in columns:
        _refuse_unknown(row, columns, layout)
    return FORMATS["ranked"]  # it reports that ranks or scores are missing


def matching_format(row: Row, layout: RowLayout) -> DataFormat | None:
    """Return the last registered format whose columns a row has; None if it has those of none."""
    columns = _columns_with_values(row)
    for name in reversed(list(FORMATS)):
        form = FORMATS[name]
        if form.single and layout.rows == "pairs":
            continue
        if form.fits(columns):
            return form
    return None


def _columns_with_values(row: Row) -> set[str]:
    return {name for name, content in row.items() if content is not None}


def _refuse_unknown(row: Row, columns: set[str], layout: RowLayout) -> None:
    """Raise the reason why no format can read a row with these columns."""
    has_answers = bool(columns.intersection(ANSWERS))
    single_forms = [form for form in FORMATS.values() if form.single]
    has_one_answer = any(columns.issuperset(form.needs) for form in single_forms)
    if has_one_answer and layout.rows == "pairs" and not has_answers:
        raise DropReason(*ONE_ANSWER)
    if layout.rows != "pairs":
        require(row, "prompt", "completion")
    if not has_answers:
        keys = ", ".join(list(map(str, row))[:20]) or "no keys"
        raise DropReason(
            "missing_key",
            f"no two answers to compare: no key 'chosen'; the row has {keys}; {LIMITS}",
        )
    require(row, *ANSWERS)


def _ranked(
    ranked: Ranked, usable: Sequence[int], which: str, min_gap: float | None, skipped: Counter[str]
) -> list[Couple]:
    """Return pairs of better and worse answers; count those that are skipped."""
    answers = [text_or_turns(answer, "an answer") for answer in ranked.answers]
    if len(answers) < 2:
        raise DropReason(
            "too_few_answers", f"a ranked row needs two answers or more, found {len(answers)}"
        )
    order = sorted(usable, key=lambda i: ranked.ranks[i])
    pairs: list[Couple] = []
    for better, worse in _ranked_pairs(order, which):
        gap = ranked.ranks[worse] - ranked.ranks[better]
        if gap == 0:
            skipped["ties_skipped"] += 1
        elif min_gap is not None and gap < min_gap:
            skipped["small_gap"] += 1
        else:
            tokens = ranked.tokens and ranked.tokens.only(better, worse)
            pairs.append((answers[better], answers[worse], {"tokens": tokens}))
    return pairs


def _ranked_pairs(order: Sequence[int], which: str) -> list[tuple[int, int]]:
    """Return the pairs of answers, which are sorted from the best to the worst."""
    if which == "all":
        return list(combinations(order, 2))
    if which == "adjacent":
        return list(pairwise(order))
    worse = order[1:] if which == "best_vs_rest" else order[1:][-1:]
    return [(order[0], i) for i in worse]


def _pair(prompt: str | Turns, chosen: Any, rejected: Any, extras: dict[str, Any]) -> TextPair:
    answers = {"chosen": chosen, "rejected": rejected}
    if rejected is NO_ANSWER:
        answers = {"the answer": chosen}
    sides: dict[str, Any] = {name: text_or_turns(answer, name) for name, answer in answers.items()}
    empty = [name for name, answer in sides.items() if is_empty(answer)]
    if empty:
        raise DropReason("empty_response", f"{' and '.join(empty)}: nothing but white space")
    if not all(isinstance(content, str) for content in (prompt, *sides.values())):
        # an empty conversation is an empty question
        prompt = as_turns(prompt, "user") or as_turns("", "user")
        sides = {name: as_turns(answer, "assistant") for name, answer in sides.items()}
        for answer in sides.values():
            for turn in answer:
                _refuse_in_answer(turn)
        check_roles(prompt, *sides.values())
    first, *second = sides.values()
    if second == [first]:
        raise DropReason(
            "identical_text", "chosen and rejected are the same text: there is nothing to prefer"
        )
    return TextPair(prompt, first, *(second or [""]), **extras)


def _refuse_in_answer(turn: Mapping[str, Any]) -> None:
    if REFERENCES in turn:
        raise DropReason("bad_image", "an answer has images; they are read in prompts only")


def is_empty(answer: str | Turns) -> bool:
    """Return whether an answer has no text and calls no tool."""
    if isinstance(answer, str):
        return not answer.strip()
    return not answer or (not answer[-1]["content"].strip() and "tool_calls" not in answer[-1])


def texts(pair: TextPair) -> list[str]:
    """Return all text that came from the row's author."""
    contents = []
    for content in (pair.prompt, *pair.answers):
        contents += [turn["content"] for turn in as_turns(content, "")]
    return contents


# Rather's own formats are registered before those of users: the last one that fits a row is taken.
from rather.data.formats import standard  # noqa: E402, F401
