"""What becomes of one key of another trainer. The table of a tool maps its keys to such rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rather.errors import ConfigError
from rather.files import MOST_DIGITS, JsonObject, parse_yaml

Given = Mapping[str, Any]  # the tool's keys, nested ones with dots; its defaults for unset keys
NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "no")

CONVERTED, CHANGED = "converted", "changed in meaning"
WRITTEN = "filled in from that tool's default"
NEEDLESS, LEFT_OUT = "not needed", "left out"
IMPOSSIBLE, UNKNOWN, MISSING = "not possible", "not known", "not determined"
OPEN = "to fill in"
INCOMPLETE = (MISSING, IMPOSSIBLE, UNKNOWN)
UNSET: Any = object()  # a default that depends on something which the source does not say
MACHINERY = "internal to that tool; no result depends on it"
NUMBER = re.compile(r"[+-]?(\d++\.?\d*+|\.\d++)([eE][+-]?\d++)?")
WORDS = {"true": True, "false": False, "none": None, "null": None}
MIXTURE = re.compile(  # names of models that are mixtures of experts
    r"(?i)(^|[^a-z])(\d+x\d+b|\d+b-?a\d|a\d+(\.\d+)?b|\w*moe|mixtral|deepseek-v[23]|gpt-oss)"
    r"($|[^a-z])"
)
VISION = re.compile(  # names of models and data sets
    r"(?i)(^|[^a-z])((intern)?(vl|vlm)|llava\w*|vision|omni|pixtral|idefics\w*|[a-z]*ocr|tts|asr|audio|"
    r"speech|minicpm-?[vo]|ovis\w*|janus\w*|emu\d?|textcaps|llama-?4|rlaif-v)($|[^a-z])"
)
# Models that see images here.
SEEING = re.compile(r"(?i)qwen(2\.?5-?vl|3-?vl|3\.?5)|llava-?(v1\.6|next)|smolvlm")
ONLINE = re.compile(r"(?i)(ppo|grpo|gspo|gdpo|rloo|xpo|online|nash|reinforce)")
KINDS = {"mixture": [MIXTURE], "vision": [VISION, SEEING]}  # of models, in conditions
SIGN = re.compile(r"(?:^|\s)([=~@>]|\?\??|!!?)(?:\s+|$)")  # of a line of a table
OPERATOR = re.compile(r" ?(\b(?:un)?set$|[<>]|!?=|~)")  # of a condition


class Outcome(NamedTuple):
    """What became of one key: values for keys of Rather, and a note."""

    status: str
    values: Mapping[str, Any] = MappingProxyType({})
    note: str = ""
    key: str = ""
    value: Any = None

    def refused(self, status: str, note: str) -> Outcome:
        return Outcome(status, note=note, key=self.key, value=self.value)

    @property
    def line(self) -> str:
        """Return all of it in one line; names of keys come from the file and may have several."""
        rather_values = ", ".join(f"{path}: {short(v)}" for path, v in self.values.items())
        text = f"{self.status}: {self.key}"
        text += "" if self.value is None else f" = {short(self.value)}"
        text += f" -> {rather_values}" if rather_values else ""
        return one_line(f"{text}; {self.note}" if self.note else text)


Rule = Callable[[Any, Given], Outcome]
Rules = dict[str, Rule]


class Unsupported(Exception):
    """A value that has no counterpart; the message says why."""


def gives(values: JsonObject, note: str = "") -> Outcome:
    """Return values of the same meaning; a note marks a change in meaning."""
    status = CONVERTED if values else NEEDLESS
    return Outcome(CHANGED if note else status, values, note)


NOT_NEEDED = gives({})


def one_line(text: str) -> str:
    return " ".join(text.split())


def short(value: Any) -> str:
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    text = "null" if value is None else one_line(text)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(value: str) -> Any:
    """Convert a value in a table: a number, a word such as `true`, a list, or a text."""
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    if len(value) <= MOST_DIGITS and NUMBER.fullmatch(value):
        return int(value) if value.lstrip("+-").isdigit() else float(value)
    return parse_yaml(value) if value[:1] == "[" else value


def pairs(text: str) -> dict[Any, Any]:
    """Return {"a": 1, "b": True} for `a=1 b=true`."""
    words = (word.partition("=") for word in text.split())
    return {plain(key): plain(text_of_value) for key, _, text_of_value in words}


def names_of(value: Any) -> list[str]:
    """Return the names in a list, or between commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [name.strip() for name in names]


def one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def rounds_instead(name: object) -> str:
    """Return a hint for trainers that generate answers while they train; "" for others."""
    if not ONLINE.search(str(name)):
        return ""
    return " To train on the model's own answers, see `rather rounds`."


class Line(NamedTuple):
    """The meaning of keys under conditions."""

    conditions: list[str]
    sign: str
    meaning: str

    def outcome(self, value: Any) -> Outcome:
        allowed, note, why = NOTHING, "off", self.meaning
        match self.sign:
            case "=":
                return _set(self.meaning, value)
            case ">":
                return _set(self.meaning, value)._replace(status=OPEN)
            case "~":
                return Outcome(NEEDLESS, note=why or MACHINERY)
            case "??":
                return Outcome(MISSING, note=why)
            case "!!":
                raise ConfigError(f"{short(value)} {why}{rounds_instead(value)}")
            case "@":
                words, _, why = self.meaning.partition("; ")
                allowed, note = tuple(map(plain, words.split())), "Rather always does this"
        if value in allowed:
            return Outcome(NEEDLESS, note=note)
        status = LEFT_OUT if self.sign == "?" else IMPOSSIBLE
        return Outcome(status, note=why or "Rather has no counterpart")


class Lines(list[Line]):
    """The rule of a key: the first line whose conditions hold; if none does, it is not needed."""

    def __call__(self, value: Any, given: Given) -> Outcome:
        for line in self:
            if all_hold(line.conditions, given, value):
                return line.outcome(value)
        return NOT_NEEDED


def facts(text: str) -> Rules:
    """Return the rules of a table, each line with names of keys, conditions, a sign, a meaning.

    `= path`: Rather's keys of the same meaning, or none; `path=a` has this value. Then, if wanted:
    `: a=b c=d`, their values by the tool's (`:: a=b`, of each in a list; others stay); `; note`:
    the meaning changes. `> path; note`: the user has to fill it in.
    `~ why`: not needed (nothing: internal to the tool). `! why`: not possible unless off.
    `? why`: left out unless off. `@ a b; why`: Rather always does this; no other value is possible.
    `?? why`: not determined. `!! why`: Rather has no such training.
    Names may fill several lines. A backslash at the end of a line continues it.
    """
    rules: dict[str, Lines] = {}
    names: list[str] = []
    for line in text.strip().splitlines():
        start, sign, meaning = (*SIGN.split(one_line(line), maxsplit=1), "", "")[:3]
        names_of_line, *conditions = start.split(" if ")
        names += names_of_line.split()
        if sign:
            for name in names:
                rules.setdefault(name, Lines()).append(Line(conditions, sign, meaning))
            names = []
    return {**rules}


def all_hold(conditions: list[str], given: Given, value: Any = None) -> bool:
    """Return whether all conditions hold.

    `set`: not null, 0, false, empty, "no" or "none"; `unset`: one of these; `!=none`: any value is
    written, also 0. `>1`; `<1`; `=a or b`; `!=a`; `~a or b`: contains a or b. With a key before
    it, the condition is about that key. `mixture key`, `vision key`: the name of a model.
    """
    return all(_holds(condition, given, value) for condition in conditions)


def _holds(condition: str, given: Given, value: Any) -> object:
    kind, _, key = condition.partition(" ")
    if kind in KINDS:
        return all(pattern.search(str(given.get(key))) for pattern in KINDS[kind])
    key, sign, names = OPERATOR.split(condition, maxsplit=1)
    setting: Any = given.get(key) if key else value
    words = names.split(" or ")
    match sign:
        case "set" | "unset":
            return (setting in NOTHING) == (sign == "unset")
        case ">":
            return setting and setting > int(names)
        case "<":
            return setting < int(names)
        case "~":
            return any(word in str(setting) for word in words)
    return (setting in map(plain, words)) == (sign == "=")


def _set(meaning: str, value: Any) -> Outcome:
    assignment, _, note = meaning.partition("; ")
    paths, is_list, renaming = assignment.partition(":: ")
    if not is_list:
        paths, _, renaming = assignment.partition(": ")
    renamed = pairs(renaming)
    is_empty = value is None and None not in renamed
    if is_list and not is_empty:
        names = [(name, renamed.get(name, name)) for name in names_of(value)]
        for name, rather_value in names:
            if rather_value is None:
                raise Unsupported(f"Rather has no loss {name}")
        value = one_or_all([rather_value for _, rather_value in names])
    elif renamed and not is_empty:
        if value not in renamed:
            supported = ", ".join(map(str, renamed))
            raise Unsupported(f"{value!r} has no counterpart; supported: {supported}")
        value = renamed[value]
    values = {}
    for word in paths.split():
        path, is_constant, constant = word.partition("=")
        if is_constant or not is_empty:
            values[path] = plain(constant) if is_constant else value
    if is_empty and not values:
        return Outcome(NEEDLESS, note="left to the default")
    return gives(values, note)
