"""What becomes of one key of another trainer. The table of a tool maps its keys to such rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from rather.errors import ConfigError
from rather.files import JsonObject
from rather.tools.migrate.source import plain

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
MIXTURE = re.compile(  # names of models that are mixtures of experts
    r"(?i)(^|[^a-z])(\d+x\d+b|\d+b-?a\d|a\d+(\.\d+)?b|\w*moe|mixtral|deepseek-v[23]|gpt-oss)"
    r"($|[^a-z])"
)
SIGN = re.compile(r"(?:^|\s)([=~?@-]|!!?)(?:\s+|$)")  # of a line of a table
SECTIONS = {  # short names that the tables use
    "training": "actor_train.training_args",
    "model": "actor_train.model_args",
    "data": "actor_train.data_args",
    "strategy": "actor_train.strategy_args.strategy_config",
    "held_out": "validation.data_args",
}


class Outcome(NamedTuple):
    """What became of one key: values for keys of Rather, and a note."""

    status: str
    values: Mapping[str, Any] = MappingProxyType({})
    note: str = ""
    key: str = ""
    value: Any = None
    rejected: tuple[str, ...] = ()  # keys that the schema or the loss did not accept

    def refused(self, status: str, note: str) -> Outcome:
        return Outcome(status, note=note, key=self.key, value=self.value)

    @property
    def line(self) -> str:
        """Return all of it in one line."""
        ours = ", ".join(f"{path}: {short(v)}" for path, v in self.values.items())
        text = f"{self.status}: {self.key}"
        text += "" if self.value is None else f" = {short(self.value)}"
        text += f" -> {ours}" if ours else ""
        return f"{text}; {self.note}" if self.note else text


def short(value: Any) -> str:
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    text = "null" if value is None else " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


NOT_NEEDED = Outcome(NEEDLESS)
Rule = Callable[[Any, Given], Outcome]
Rules = dict[str, Rule]
Condition = Callable[[Any, Given], object]


class Unsupported(Exception):
    """A value that has no counterpart; the message says why."""


def full(path: str) -> str:
    """Return a key of Rather whose section may have a short name."""
    section, dot, name = path.partition(".")
    return SECTIONS.get(section, section) + dot + name if dot else path


def pairs(text: str) -> dict[Any, Any]:
    """Return {"a": 1, "b": True} for `a=1 b=true`."""
    words = (word.partition("=") for word in text.split())
    return {plain(key): plain(text_of_value) for key, _, text_of_value in words}


def keys(names: str) -> list[str]:
    """Return the names of keys in a text."""
    return names.split()


def facts(text: str) -> Rules:
    """Return the rules of a table, each with names of keys, a sign, and what they mean.

    `= path`: Rather's keys of the same meaning, or none. Then, if wanted: `: a=b c=d`, their values
    by the tool's (`:: a=b`, of each in a list; others stay); conditions; `; note`: the meaning
    changes.
    `~ why`: not needed (nothing: internal to the tool). `! why`: not possible unless off.
    `? why`: left out unless off. `@ a b; why`: Rather always does this; no other value is possible.
    `- why`: no value is possible. `!! why`: Rather has no such training.
    Names may fill several lines, and have conditions as well. A backslash at the end of a line
    continues it. Of several lines with a name, the first counts whose conditions hold; if none
    does, the key is not needed.
    """
    rules: Rules = {}
    lines: list[tuple[list[str], list[str], Rule]] = []
    names: list[str] = []
    for line in text.strip().splitlines():
        line = " ".join(line.split())
        start, sign, meaning = (*SIGN.split(line, maxsplit=1), "", "")[:3]
        names_of_line, *conditions = start.split(" if ")
        names += keys(names_of_line)
        if sign == "=":
            meaning, _, note = meaning.partition("; ")
            meaning, *further_conditions = meaning.split(" if ")
            lines.append((names, conditions + further_conditions, _same(meaning, note)))
        elif sign:
            lines.append((names, conditions, KINDS[sign](meaning)))
        names = [] if sign else names
    for names, conditions, rule in reversed(lines):
        for name in names:
            rules[name] = when(all_of(conditions), rule, rules.get(name, lambda *_: NOT_NEEDED))
    return rules


def defaults(text: str) -> JsonObject:
    """Return defaults from lines of `a=1 b=true` with conditions; the first that holds counts."""
    cases: dict[str, list[tuple[Condition, Any]]] = {}
    for line in text.strip().splitlines():
        values, *conditions = " ".join(line.split()).split(" if ")
        for key, default in pairs(values).items():
            cases.setdefault(key, []).append((all_of(conditions), default))
    return {key: partial(_first, cases_of_key) for key, cases_of_key in cases.items()}


def _first(cases: list[tuple[Condition, Any]], given: Given) -> Any:
    return next((default for holds, default in cases if holds(default, given)), UNSET)


def all_of(conditions: list[str]) -> Condition:
    """Return whether all conditions hold.

    `set`: not empty, 0 or false; `>1`; of other keys `key set`, `key>1`, `key=a|b`, `key!=a`;
    `key~a|b`, contains a or b; `mixture key`, a model.
    """
    tests = list(map(_condition, reversed(conditions)))
    return lambda value, given: all(holds(value, given) for holds in tests)


def gives(values: JsonObject, note: str = "") -> Outcome:
    """Return values of the same meaning; a note marks a change in meaning."""
    return Outcome(CHANGED if note else CONVERTED, values, note)


def to(path: str, convert: Mapping[Any, Any] | Callable[[Any], Any] = lambda value: value,
       *, note: str = "") -> Rule:  # fmt: skip
    """Set Rather's key, or several, of the same meaning; `convert` changes the value."""

    def rule(value: Any, given: Given) -> Outcome:
        if value is None:
            return Outcome(NEEDLESS, note="left to the default")
        changed = converted(convert, value) if isinstance(convert, Mapping) else convert(value)
        return gives(dict.fromkeys(path.split(), changed), note)

    return rule


def converted(convert: Mapping[Any, Any], value: Any) -> Any:
    if value not in convert:
        raise Unsupported(
            f"{value!r} has no counterpart; supported: {', '.join(map(str, convert))}"
        )
    return convert[value]


def _same(text: str, note: str) -> Rule:
    """Return the rule of a line with `=`."""
    path, colon, values = text.partition(": ")
    renamed_values = pairs(values)

    def renamed(value: Any, given: Given) -> Outcome:
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        if lost := [name for name in names if renamed_values.get(name, name) is None]:
            raise Unsupported(f"Rather has no loss {lost[0]}")
        losses = [renamed_values.get(name, name) for name in names]
        return gives({path[:-1]: one_or_all(losses)}, note)

    if path.endswith(":"):
        return renamed
    return to(path, renamed_values, note=note) if colon else to(path, note=note)


def names_of(value: Any) -> list[str]:
    """Return the names in a list, or between commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [name.strip() for name in names]


def one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _condition(text: str) -> Condition:
    if text.startswith("mixture "):
        return lambda value, given: MIXTURE.search(str(given.get(text[8:])))
    key, sign, names = re.split(r" ?(\bset$|>|!?=|~)", text, maxsplit=1)
    words = names.split("|")

    def holds(value: Any, given: Given) -> object:
        setting = given.get(key) if key else value
        if sign in ("set", ">"):
            return setting and (sign == "set" or setting > int(names))
        if sign == "~":
            return any(word in str(setting) for word in words)
        return (setting in map(plain, words)) == (sign == "=")

    return holds


def unless(allowed: Container[Any], note: str, status: str, why: str) -> Rule:
    """Accept the allowed values, for which nothing has to be set; the others have a status."""
    return lambda value, given: (
        Outcome(NEEDLESS, note=note) if value in allowed else Outcome(status, note=why)
    )


def never(why: str, *, off: tuple[Any, ...] = ()) -> Rule:
    """Reject every value except those that switch the feature off."""
    return unless((*NOTHING, *off), "off", IMPOSSIBLE, why)


def only(*allowed: Any, why: str) -> Rule:
    """Accept only what Rather always does."""
    return unless(allowed, "Rather always does this", IMPOSSIBLE, why)


def _always(text: str) -> Rule:
    values, _, why = text.partition("; ")
    return only(*map(plain, values.split()), why=why)


def needless(why: str) -> Rule:
    """Ignore a key: no result depends on it, or Rather always does this."""
    return lambda value, given: Outcome(NEEDLESS, note=why or MACHINERY)


def _refused(why: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        raise ConfigError(why)

    return rule


KINDS: dict[str, Callable[[str], Rule]] = {
    "~": needless,
    "!": never,
    "?": lambda why: unless(NOTHING, "off", LEFT_OUT, why),
    "@": _always,
    "-": lambda why: unless((None, ""), "", IMPOSSIBLE, why or "Rather has no counterpart"),
    "!!": _refused,
}
KTO, SFT = {"task": "unpaired"}, {"task": "sft", "pref_loss": "sft"}
REWARD = {"task": "reward", "pref_loss": "bradley_terry"}


ONLINE = re.compile(r"(?i)(ppo|grpo|gspo|gdpo|rloo|xpo|online|nash|reinforce)")


def rounds_instead(name: object) -> str:
    """Return a hint for trainers that generate answers while they train; "" for others."""
    if not ONLINE.search(str(name)):
        return ""
    return " To train on the model's own answers, see `rather rounds`."


def algorithm(names: Mapping[Any, str | Mapping[str, str] | None]) -> Rule:
    """Set the loss, or the task, that a name stands for; None: another key does. Refuse others."""

    def rule(value: Any, given: Given) -> Outcome:
        if value not in names:
            offered = ", ".join(str(name) for name in names if name)
            raise ConfigError(
                f"{value} is not a training that Rather offers; it converts {offered}."
                f"{rounds_instead(value)}"
            )
        loss = names[value]
        if not loss:
            return NOT_NEEDED
        return gives({"pref_loss": loss} if isinstance(loss, str) else dict(loss))

    return rule


def when(condition: Condition, rule: Rule, otherwise: Rule = lambda *_: NOT_NEEDED) -> Rule:
    """Apply a rule if the condition holds; otherwise the key is not needed."""
    return lambda value, given: (rule if condition(value, given) else otherwise)(value, given)
