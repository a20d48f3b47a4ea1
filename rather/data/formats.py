"""A row of any known shape -> pairs of text, or a counted reason why not.

A shape is a function from a row to prompt and answers; `SHAPES` lists them with the columns that tell them, in the
order in which they are tried. Every answer ends as plain text (all three strings) or as a conversation (all three
lists of messages), so that nothing later has to ask where a row came from.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, TypeGuard

from rather.data.json_rows import Bad
from rather.data.messages import (
    Message,
    Refused,
    Turns,
    as_turns,
    check_roles,
    kind_of,
    text_of,
    text_or_turns,
    turns_of,
)
from rather.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TextPair:
    """One preference pair as text: all strings, or all conversations (the answers continue the prompt)."""

    prompt: str | Turns
    chosen: str | Turns
    rejected: str | Turns
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    margin: float = math.nan
    soft_label: float = math.nan
    id: str = ""


class Pairs(NamedTuple):
    """What one row gives: pairs, pairs refused with their reason, how many ties were skipped, unused columns."""

    pairs: list[TextPair]
    refused: list[Bad]
    ties: int
    ignored: list[str]


class Ranked(NamedTuple):
    """Answers to one prompt; a smaller rank is a better answer."""

    answers: list[Any]
    ranks: list[float]


# ---- shapes: row -> (prompt, chosen and rejected) or (prompt, ranked answers)

Shaped = tuple[str | Turns, Any]


def _instruction(row: Row) -> Shaped:
    question = text_of(row["instruction"], "instruction")
    extra = row.get("input")
    if extra is not None and text_of(extra, "input").strip():
        question = f"{question}\n{extra}"
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Refused(
            "bad_type",
            f"history must be a list of [question, answer] lists, found {kind_of(history)}",
        )
    turns: list[Message] = (
        [{"role": "system", "content": text_of(row["system"], "system")}]
        if row.get("system")
        else []
    )
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise Refused("bad_type", "history must hold [question, answer] lists")
        turns += [
            {"role": role, "content": text_of(text, "history")}
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
    prompt = (*turns, {"role": "user", "content": question}) if turns else question
    return prompt, (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )


def _prompt(row: Row) -> Shaped:
    prompt = _with_system(row, text_or_turns(row["prompt"], "prompt"))
    chosen, rejected = (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )
    if _is_whole(chosen) and _is_whole(
        rejected
    ):  # the answers repeat the prompt, as in UltraFeedback
        common, answers = _whole(chosen, rejected)
        return _merged(as_turns(prompt, "user"), common), answers
    return prompt, (chosen, rejected)


def _merged(prompt: Turns, common: Turns) -> Turns:
    """The prompt and the common beginning as one: each may hold a system turn or earlier turns that the other omits."""
    (system, asked), (own_system, begun) = _parted(prompt), _parted(common)
    if not any(text for _, text in _said(asked)):
        asked = ()
    shorter, longer = sorted((asked, begun), key=len)
    if _said(longer)[len(longer) - len(shorter) :] != _said(shorter):
        raise Refused(
            "prompt_mismatch",
            "the prompt is not what the conversations of chosen and rejected begin with",
        )
    if system and own_system and _said(system) != _said(own_system):
        raise Refused(
            "prompt_mismatch",
            "the system prompt is not the one of the conversations of chosen and rejected",
        )
    return (*(own_system or system), *longer)


def _parted(turns: Turns) -> tuple[Turns, Turns]:
    """The system turn, if there is one, and the others."""
    first = 1 if turns and turns[0]["role"] in ("system", "developer") else 0
    return turns[:first], turns[first:]


def _said(turns: Turns) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"].strip()) for turn in turns]


def _with_system(row: Row, prompt: str | Turns) -> str | Turns:
    if not row.get("system"):
        return prompt
    return (
        {"role": "system", "content": text_of(row["system"], "system")},
        *as_turns(prompt, "user"),
    )


def _is_whole(answer: str | Turns) -> TypeGuard[Turns]:
    return (
        not isinstance(answer, str)
        and bool(answer)
        and answer[0]["role"] in ("system", "developer", "user")
    )


def _conversation(row: Row) -> Shaped:
    chosen, rejected = (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )
    if isinstance(chosen, str) and isinstance(rejected, str):
        dialogues = _dialogue(chosen), _dialogue(rejected)
        if dialogues[0] and dialogues[1]:
            return _whole(*dialogues)
        return _common_text(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise Refused(
            "bad_type",
            "without a prompt, chosen and rejected must both be text or both be conversations",
        )
    if not (_is_whole(chosen) and _is_whole(rejected)):
        raise Refused(
            "prompt_mismatch",
            "without a prompt column both conversations must begin with the question",
        )
    return _whole(chosen, rejected)


def _whole(chosen: Turns, rejected: Turns) -> tuple[Turns, tuple[Turns, Turns]]:
    """The common beginning of two conversations is the prompt."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if chosen == rejected:
        same = max((i for i, turn in enumerate(chosen) if turn["role"] == "assistant"), default=0)
    if not same or any(
        rest and rest[0]["role"] != "assistant" for rest in (chosen[same:], rejected[same:])
    ):
        raise Refused(
            "prompt_mismatch",
            f"chosen and rejected answer different questions (they differ at turn {same + 1})",
        )
    return chosen[:same], (chosen[same:], rejected[same:])


_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")


def _dialogue(text: str) -> Turns:
    """'\\n\\nHuman: ...\\n\\nAssistant: ...' (HH-RLHF) as messages; nothing if the text is not like that."""
    begin, *parts = _SPEAKER.split(text)
    if begin.strip() or len(parts) < 4:
        return ()
    names = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        {"role": names[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    )


def _common_text(chosen: str, rejected: str) -> Shaped:
    """The common beginning of two texts, back to the last line end or space in it: no word is cut."""
    short = min(len(chosen), len(rejected))
    same = next((i for i in range(short) if chosen[i] != rejected[i]), short)
    common = chosen[:same]
    cut = max(common.rfind("\n"), common.rfind(" ")) + 1
    return chosen[:cut], (chosen[cut:], rejected[cut:])


def _messages(row: Row) -> Shaped:
    return _with_system(row, turns_of(row["messages"], "messages")), (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )


def _context(row: Row) -> Shaped:
    prompt = text_or_turns(row["context"], "context")
    return prompt, (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )


def _conversations(row: Row) -> Shaped:
    prompt = _with_system(row, turns_of(row["conversations"], "conversations"))
    return prompt, (
        text_or_turns(row["chosen"], "chosen"),
        text_or_turns(row["rejected"], "rejected"),
    )


def _rejected_response(row: Row) -> Shaped:
    turns = turns_of(row["messages"], "messages")
    if not turns or turns[-1]["role"] != "assistant":
        raise Refused(
            "bad_roles",
            "messages must end with the chosen assistant turn where rejected_response is given",
        )
    return _with_system(row, turns[:-1]), (
        turns[-1:],
        text_or_turns(row["rejected_response"], "rejected_response"),
    )


def _completions(row: Row) -> Shaped:
    entries = row["completions"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Refused(
            "bad_type",
            f"completions must be a list of objects with rank and completion, found {kind_of(entries)}",
        )
    answers = [text_or_turns(_given(entry, "completion"), "completion") for entry in entries]
    ranks = [_number(_given(entry, "rank"), "rank") for entry in entries]
    return text_or_turns(row["context"], "context"), Ranked(answers, ranks)


def _responses(row: Row) -> Shaped:
    answers = row["responses"]
    if not isinstance(answers, list):
        raise Refused("bad_type", f"responses must be a list, found {kind_of(answers)}")
    if row.get("ranks") is not None:
        ranks = _numbers(row["ranks"], "ranks", len(answers))
    elif row.get("scores") is not None:
        ranks = [-score for score in _numbers(row["scores"], "scores", len(answers))]
    else:
        raise Refused(
            "missing_key", "responses need ranks (1 is best) or scores (more is better) beside them"
        )
    return _any_prompt(row), Ranked(
        [text_or_turns(answer, "responses") for answer in answers], ranks
    )


def _any_prompt(row: Row) -> str | Turns:
    name = next(
        (
            name
            for name in ("prompt", "messages", "conversations", "context")
            if row.get(name) is not None
        ),
        None,
    )
    if name:
        return _with_system(row, text_or_turns(row[name], name))
    if row.get("instruction") is not None:
        return _instruction({**row, "chosen": "", "rejected": ""})[0]
    raise _missing("prompt", row)


def _given(entry: Row, name: str) -> Any:
    if entry.get(name) is None:
        raise _missing(name, entry)
    return entry[name]


def _numbers(value: Any, where: str, count: int) -> list[float]:
    if not isinstance(value, list) or len(value) != count:
        raise Refused("bad_type", f"{where} must be a list with one number per response ({count})")
    return [_number(entry, where) for entry in value]


def _number(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float:
    number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
    if not number or not low <= value <= high:
        above = f" of at least {low:g}" if low > -math.inf else ""
        allowed = f" from {low:g} to {high:g}" if high < math.inf else above
        raise Refused("bad_type", f"{where} must be a number{allowed}, found {kind_of(value)}")
    return float(value)


@dataclass(frozen=True)
class Shape:
    """A known form of rows: the columns that tell it, those it may have, and how it is read."""

    needs: tuple[str, ...]
    read: Callable[[Row], Shaped]
    may: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def fits(self, given: set[str]) -> bool:
        return given.issuperset(self.needs) and (
            not self.one_of or not given.isdisjoint(self.one_of)
        )


_ANSWERS = ("chosen", "rejected")
_PROMPTS = (
    "prompt",
    "messages",
    "conversations",
    "context",
    "instruction",
    "input",
    "history",
    "system",
)
SHAPES = {
    "ranked": Shape(
        ("responses",), _responses, ("ranks", "scores", *_PROMPTS), one_of=("ranks", "scores")
    ),
    "nemo": Shape(("context", "completions"), _completions),
    "swift": Shape(("messages", "rejected_response"), _rejected_response, ("system",)),
    "instruction": Shape(("instruction", *_ANSWERS), _instruction, ("input", "history", "system")),
    "prompt": Shape(("prompt", *_ANSWERS), _prompt, ("system",)),
    "messages": Shape(("messages", *_ANSWERS), _messages, ("system",)),
    "llama_factory": Shape(("conversations", *_ANSWERS), _conversations, ("system",)),
    "colossal": Shape(("context", *_ANSWERS), _context),
    "conversation": Shape(_ANSWERS, _conversation),
}
TOKENISED = "tokenised"  # rows that are no text: see tokenised.py
EXTRAS = ("weight", "margin", "soft_label", "id", "tools", "chat_template_kwargs")
OPTIONAL = ("input", "system", "history", "ranks", "scores", *EXTRAS)
COLUMNS = frozenset(EXTRAS).union(*((*shape.needs, *shape.may) for shape in SHAPES.values()))


@dataclass(frozen=True)
class Layout:
    """How rows are to be read: shape, names of columns, and which pairs ranked answers give."""

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # our name -> the file's
    ranked_pairs: str = "all"

    def __post_init__(self) -> None:
        known = (*SHAPES, TOKENISED)
        if self.format != "auto" and self.format not in known:
            raise DataError(f"data_args.format: {self.format!r} is not known{_hint(self.format, known)}; "
                            f"known are auto, {', '.join(known)}.")  # fmt: skip
        for name in self.columns:
            if name not in COLUMNS:
                raise DataError(f"data_args.columns: {name!r} is not a column that is read{_hint(name, COLUMNS)}; "
                                f"known are {', '.join(sorted(COLUMNS))}.")  # fmt: skip


def read_row(row: Row, layout: Layout) -> Pairs:
    """All pairs of one row."""
    try:
        named = _renamed(row, layout.columns)
        shape = _shape(named, layout)
        prompt, answers = shape.read(named)
        extras = extras_of(named)
        pairs, ties = (
            _ranked(answers, layout.ranked_pairs) if isinstance(answers, Ranked) else ([answers], 0)
        )
    except Refused as refused:
        return Pairs([], [refused.bad], 0, [])
    kept: list[TextPair] = []
    bad: list[Bad] = []
    for chosen, rejected in pairs:
        try:
            kept.append(_checked(prompt, chosen, rejected, extras))
        except Refused as refused:
            bad.append(refused.bad)
    used = {*shape.needs, *shape.may, *EXTRAS}
    return Pairs(kept, bad, ties, [name for name in named if name not in used])


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    if not columns:
        return row
    for ours, theirs in columns.items():
        if row.get(theirs) is None and ours not in OPTIONAL:
            _complain(theirs, row)
    taken = set(columns.values())
    named = {
        name: value for name, value in row.items() if name not in taken and name not in columns
    }
    return {**named, **{ours: row.get(theirs) for ours, theirs in columns.items()}}


def _shape(row: Row, layout: Layout) -> Shape:
    if layout.format != "auto":
        shape = SHAPES[layout.format]
        for name in shape.needs:
            if row.get(name) is None:
                _complain(name, row)
        return shape
    given = {name for name, value in row.items() if value is not None}
    for shape in SHAPES.values():
        if shape.fits(given):
            return shape
    if "responses" in given:
        return SHAPES["ranked"]  # it says that ranks or scores are missing
    for name in _ANSWERS:
        _complain(name, row)
    raise _missing("prompt", row)


def _complain(name: str, row: Row) -> None:
    """A key that is there and null is a wrong type; one that is not there is missing."""
    if name in row and row[name] is None:
        raise Refused("bad_type", f"{name} is null; it must be text or messages")
    if name not in row:
        raise _missing(name, row)


def _missing(name: str, row: Row) -> Refused:
    present = [str(key) for key in row]
    return Refused(
        "missing_key",
        f"no key {name!r}{_hint(name, present)}; the row has {', '.join(present[:20]) or 'no keys'}",
    )


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, [str(key) for key in known], 1, 0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def extras_of(row: Row) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if row.get("weight") is not None:
        extras["weight"] = _number(row["weight"], "weight", 0.0)
    if row.get("margin") is not None:
        extras["margin"] = _number(row["margin"], "margin")
    if row.get("soft_label") is not None:
        extras["soft_label"] = _number(row["soft_label"], "soft_label", 0.0, 1.0)
    if row.get("id") is not None:
        if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
            raise Refused(
                "bad_type", f"id must be text or a whole number, found {kind_of(row['id'])}"
            )
        extras["id"] = str(row["id"])
    if row.get("tools"):
        extras["tools"] = _decoded(row["tools"], "tools", list)
    if row.get("chat_template_kwargs"):
        extras["template_kwargs"] = _decoded(
            row["chat_template_kwargs"], "chat_template_kwargs", dict
        )
    return extras


def _decoded(value: Any, where: str, kind: type) -> Any:
    """Tables often hold nested values as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Refused("bad_type", f"{where} is text but not JSON ({error})") from error
    if not isinstance(value, kind):
        raise Refused("bad_type", f"{where} must be a {kind.__name__}, found {kind_of(value)}")
    return value


def _ranked(ranked: Ranked, which: str) -> tuple[list[tuple[Any, Any]], int]:
    """Pairs of better and worse answers, and how many were left out because they tie."""
    answers, ranks = ranked
    if len(answers) < 2:
        raise Refused(
            "too_few_answers", f"a ranked row needs two answers or more, found {len(answers)}"
        )
    order = sorted(range(len(answers)), key=lambda i: ranks[i])
    couples = {
        "all": list(combinations(order, 2)),
        "best_vs_rest": [(order[0], other) for other in order[1:]],
        "best_vs_worst": [(order[0], order[-1])],
    }[which]
    different = [(better, worse) for better, worse in couples if ranks[better] < ranks[worse]]
    return [(answers[better], answers[worse]) for better, worse in different], len(couples) - len(
        different
    )


def _checked(
    prompt: str | Turns, chosen: str | Turns, rejected: str | Turns, extras: dict[str, Any]
) -> TextPair:
    empty = [
        name for name, answer in (("chosen", chosen), ("rejected", rejected)) if is_empty(answer)
    ]
    if empty:
        raise Refused("empty_response", f"{' and '.join(empty)}: nothing but white space")
    if not all(isinstance(part, str) for part in (prompt, chosen, rejected)):
        prompt = as_turns(prompt, "user") or as_turns(
            "", "user"
        )  # an empty conversation is an empty question
        chosen, rejected = as_turns(chosen, "assistant"), as_turns(rejected, "assistant")
        check_roles(prompt, (chosen, rejected))
    if chosen == rejected:
        raise Refused(
            "identical_text", "chosen and rejected are the same text: there is nothing to prefer"
        )
    return TextPair(prompt, chosen, rejected, **extras)


def is_empty(answer: str | Turns) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    return not answer or (not answer[-1]["content"].strip() and "tool_calls" not in answer[-1])


def texts(pair: TextPair) -> list[str]:
    """All text that came from the row's author."""
    parts = (pair.prompt, pair.chosen, pair.rejected)
    return [
        text
        for part in parts
        for text in ([part] if isinstance(part, str) else [m["content"] for m in part])
    ]
