"""What becomes of one key of another trainer. The table of a tool maps its keys to such rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rather.errors import ConfigError

Given = Mapping[str, Any]  # the tool's keys, nested ones with dots; its defaults for unset keys
NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "no")

KEPT, RENAMED, CHANGED = "kept", "renamed", "changed in meaning"
WRITTEN = "filled in from that tool's default"
NEEDLESS, LEFT_OUT = "not needed", "left out"
IMPOSSIBLE, UNKNOWN, MISSING = "not possible", "not known", "not determined"
OPEN = "to fill in"
INCOMPLETE = (MISSING, IMPOSSIBLE, UNKNOWN)
UNSET: Any = object()  # a default that depends on something which the source does not say
MACHINERY = "internal to that tool; no result depends on it"
MIXTURE = re.compile(  # names of models that are mixtures of experts
    r"(?i)(^|[^a-z])(\d+x\d+b|\d+b-?a\d|a\d+(\.\d+)?b|\w*moe|mixtral|deepseek-v[23]|gpt-oss)($|[^a-z])"
)
SECTIONS = {  # short names that the tables use
    "training": "actor_train.training_args",
    "model": "actor_train.model_args",
    "data": "actor_train.data_args",
    "strategy": "actor_train.strategy_args.strategy_config",
    "held_out": "validation.data_args",
}


@dataclass(frozen=True)
class Outcome:
    """Values for keys of Rather, and a note."""

    status: str
    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""


NOT_NEEDED = Outcome(NEEDLESS)
Rule = Callable[[Any, Given], Outcome]
Converter = Callable[[Any], Any]


class Unsupported(Exception):
    """A value that has no counterpart; the message says why."""


def full(path: str) -> str:
    """Return a key of Rather whose section may have a short name."""
    section, dot, name = path.partition(".")
    return SECTIONS.get(section, section) + dot + name if dot else path


def facts(text: str) -> dict[str, Rule]:
    """Return the rules of a table, each with names of keys, a sign, and what they mean.

    `=`: Rather's key of the same meaning (`; note`: the meaning changes). `~`: why the key is not
    needed (nothing: internal to the tool). `!`: why it is not possible. `?`: why it is left out.
    Names may fill several lines.
    """
    rules: dict[str, Rule] = {}
    names: list[str] = []
    for line in text.strip().splitlines():
        keys, sign, rest = (*re.split(r"\s([=~!?])(?:\s+|$)", line, maxsplit=1), "", "")[:3]
        names += keys.split()
        if sign == "=":
            path, _, note = rest.partition("; ")
            rules |= dict.fromkeys(names, to(path, note=note))
        elif sign:
            kind = {"~": needless, "!": never, "?": left_out}[sign]
            rules |= dict.fromkeys(names, kind(rest or MACHINERY))
        names = [] if sign else names
    return rules


def gives(values: dict[str, Any], note: str = "") -> Outcome:
    """Return values of the same meaning; a note marks a change in meaning."""
    return Outcome(CHANGED if note else RENAMED, values, note)


def to(path: str, convert: Converter | Mapping[Any, Any] | None = None, *, note: str = "") -> Rule:
    """Set Rather's key of the same meaning; `convert` changes the value."""

    def rule(value: Any, given: Given) -> Outcome:
        if value is None:
            return Outcome(NEEDLESS, note="left to the default")
        return gives({path: converted(convert, value)}, note)

    return rule


def converted(convert: Converter | Mapping[Any, Any] | None, value: Any) -> Any:
    if convert is None:
        return value
    if not isinstance(convert, Mapping):
        return convert(value)
    if value not in convert:
        raise Unsupported(
            f"{value!r} has no counterpart; supported: {', '.join(map(str, convert))}"
        )
    return convert[value]


def never(why: str, *, unless: tuple[Any, ...] = ()) -> Rule:
    """Reject every value except those that switch the feature off."""
    return lambda value, given: (
        Outcome(NEEDLESS, note="off")
        if value in NOTHING or value in unless
        else Outcome(IMPOSSIBLE, note=why)
    )


def left_out(why: str) -> Rule:
    """Leave a feature out that no result of the training depends on, and report it."""
    return lambda value, given: (
        Outcome(NEEDLESS, note="off") if value in NOTHING else Outcome(LEFT_OUT, note=why)
    )


KTO, SFT = {"task": "unpaired"}, {"task": "sft", "pref_loss": "sft"}
REWARD = {"task": "reward", "pref_loss": "bradley_terry"}


def algorithm(names: Mapping[Any, str | Mapping[str, str] | None]) -> Rule:
    """Set the loss, or the task, that a name stands for; None: another key does. Refuse others."""

    def rule(value: Any, given: Given) -> Outcome:
        if value not in names:
            known = ", ".join(map(str, names))
            raise ConfigError(
                f"{value} is not a training that Rather offers; it converts {known}."
            )
        loss = names[value]
        if not loss:
            return NOT_NEEDED
        return gives({"pref_loss": loss} if isinstance(loss, str) else dict(loss))

    return rule


def by(key: str, values: Mapping[Any, Any], otherwise: Any = UNSET) -> Callable[[Given], Any]:
    """Return a default that depends on another key."""
    return lambda given: values.get(given.get(key), otherwise)


def of_mixture(model: str, value: Any) -> Callable[[Given], Any]:
    """Return a default that only mixtures of experts have."""
    return lambda given: value if MIXTURE.search(str(given.get(model))) else UNSET


def needless(why: str) -> Rule:
    """Ignore a key: no result depends on it, or Rather always does this."""
    return lambda value, given: Outcome(NEEDLESS, note=why)


def only(*allowed: Any, why: str) -> Rule:
    """Accept only what Rather always does."""
    return lambda value, given: (
        Outcome(NEEDLESS, note="Rather always does this")
        if value in allowed
        else Outcome(IMPOSSIBLE, note=why)
    )


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """Use the same rule for several keys."""
    return dict.fromkeys(names.split(), rule)


def keys(names: str) -> frozenset[str]:
    """Return the names of keys in a text."""
    return frozenset(names.split())


def when(condition: Callable[[Any, Given], object], rule: Rule) -> Rule:
    """Apply a rule if the condition holds; otherwise the key is not needed."""
    return lambda value, given: rule(value, given) if condition(value, given) else NOT_NEEDED


def if_set(path: str) -> Rule:
    """Set the key unless the value is empty, 0 or false."""
    return when(lambda value, given: value, to(path))


def if_given(key: str, wanted: Any, path: str) -> Rule:
    """Set the key if another one has this value."""
    return when(lambda value, given: given.get(key) == wanted, to(path))
