"""Read rows of any known format as pairs of text, or as a counted reason why not.

Every pair ends as plain text (all three strings) or as a conversation (all three lists of
messages), so that nothing later has to ask where a row came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from rather.config.plugins import did_you_mean
from rather.data.formats.registry import (
    EXTRAS,
    FORMATS,
    DataFormat,
    Ranked,
    Row,
    data_format,
    extras_of,
    require,
)
from rather.data.formats.standard import ANSWERS
from rather.data.json_rows import DropReason
from rather.data.messages import Turns, as_turns, check_roles, text_or_turns
from rather.errors import LIMITS, DataError

__all__ = ["EXTRAS", "FORMATS", "DropReason", "Ranked", "data_format", "extras_of"]

TOKENISED = "tokenised"  # rows of token ids: see tokens.py
OPTIONAL = ("input", "system", "history", "ranks", "scores", *EXTRAS)


@dataclass(frozen=True)
class TextPair:
    """One preference pair: all strings, or all conversations (the answers continue the prompt)."""

    prompt: str | Turns
    chosen: str | Turns
    rejected: str | Turns
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    margin: float = math.nan
    soft_label: float = math.nan
    id: str = ""


class RowPairs(NamedTuple):
    """What one row gives: pairs, reasons of dropped pairs, skipped ties and unused columns."""

    pairs: list[TextPair]
    dropped: list[DropReason]
    ties: int
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

    def __post_init__(self) -> None:
        check_format(self.format, "data_args.format")
        known = set(EXTRAS).union(*((*form.needs, *form.may) for form in FORMATS.values()))
        for name in self.columns:
            if name not in known:
                hint = did_you_mean(name, sorted(known))
                raise DataError(f"data_args.columns: {name!r} is not a column that is read{hint}")

    def imported_sources(self) -> list[str]:
        """Return the text of users' files that decide how rows are read; `auto` may use any."""
        names = FORMATS if self.format == "auto" else [self.format]
        return sorted({source for name in names if (source := FORMATS.source_of(name))})


def read_row(row: Row, layout: RowLayout) -> RowPairs:
    """Return all pairs of one row."""
    try:
        columns = layout.columns
        require(row, *(theirs for ours, theirs in columns.items() if ours not in OPTIONAL))
        taken = {*columns, *columns.values()}
        named = {name: value for name, value in row.items() if name not in taken}
        named |= {ours: row.get(theirs) for ours, theirs in columns.items()}
        form = _format_of(named, layout)
        prompt, answers = form.read(named)
        prompt = text_or_turns(prompt, "the prompt")
        extras = extras_of(named)
        couples, ties = [answers], 0
        if isinstance(answers, Ranked):
            couples, ties = _couples(answers, layout.ranked_pairs)
    except DropReason as reason:
        return RowPairs([], [reason], 0, [])
    used = {*form.needs, *form.may, *EXTRAS}
    found = RowPairs([], [], ties, [name for name in named if name not in used])
    for chosen, rejected in couples:
        try:
            found.pairs.append(_pair(prompt, chosen, rejected, extras))
        except DropReason as reason:
            found.dropped.append(reason)
    return found


def _format_of(row: Row, layout: RowLayout) -> DataFormat:
    if layout.format != "auto":
        require(row, *FORMATS[layout.format].needs)
        return FORMATS[layout.format]
    given = {name for name, value in row.items() if value is not None}
    for name in reversed(list(FORMATS)):
        form = FORMATS[name]
        if given.issuperset(form.needs) and (not form.one_of or given.intersection(form.one_of)):
            return form
    if "responses" not in given:
        if not given.intersection(ANSWERS):
            keys = ", ".join(list(map(str, row))[:20]) or "no keys"
            detail = f"no two answers to compare: no key 'chosen'; the row has {keys}; {LIMITS}"
            raise DropReason("missing_key", detail)
        require(row, *ANSWERS)
    return FORMATS["ranked"]  # it reports that ranks or scores are missing


def _couples(ranked: Ranked, which: str) -> tuple[list[tuple[Any, Any]], int]:
    """Return pairs of better and worse answers, and how many were skipped because they tie."""
    answers = [text_or_turns(answer, "an answer") for answer in ranked.answers]
    if len(answers) < 2:
        detail = f"a ranked row needs two answers or more, found {len(answers)}"
        raise DropReason("too_few_answers", detail)
    order = sorted(range(len(answers)), key=lambda i: ranked.ranks[i])
    couples = list(combinations(order, 2))  # all
    if which != "all":  # best_vs_rest, best_vs_worst
        rest = order[1:] if which == "best_vs_rest" else order[-1:]
        couples = [(order[0], other) for other in rest]
    better = [(answers[a], answers[b]) for a, b in couples if ranked.ranks[a] < ranked.ranks[b]]
    return better, len(couples) - len(better)


def _pair(prompt: str | Turns, chosen: Any, rejected: Any, extras: dict[str, Any]) -> TextPair:
    chosen, rejected = text_or_turns(chosen, "chosen"), text_or_turns(rejected, "rejected")
    sides = {"chosen": chosen, "rejected": rejected}
    if empty := [name for name, answer in sides.items() if is_empty(answer)]:
        raise DropReason("empty_response", f"{' and '.join(empty)}: nothing but white space")
    if not all(isinstance(part, str) for part in (prompt, chosen, rejected)):
        # an empty conversation is an empty question
        prompt = as_turns(prompt, "user") or as_turns("", "user")
        chosen, rejected = as_turns(chosen, "assistant"), as_turns(rejected, "assistant")
        check_roles(prompt, chosen, rejected)
    if chosen == rejected:
        detail = "chosen and rejected are the same text: there is nothing to prefer"
        raise DropReason("identical_text", detail)
    return TextPair(prompt, chosen, rejected, **extras)


def is_empty(answer: str | Turns) -> bool:
    """Return whether an answer has no text and calls no tool."""
    if isinstance(answer, str):
        return not answer.strip()
    return not answer or (not answer[-1]["content"].strip() and "tool_calls" not in answer[-1])


def texts(pair: TextPair) -> list[str]:
    """Return all text that came from the row's author."""
    parts = (as_turns(part, "") for part in (pair.prompt, pair.chosen, pair.rejected))
    return [turn["content"] for part in parts for turn in part]
