"""What becomes of one key of another trainer. A table of a peer is a mapping: its key -> such a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Given = Mapping[
    str, Any
]  # a peer's keys, nested ones with dots, and its own defaults where nobody wrote them
NOTHING: tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "no")

KEPT, RENAMED, CHANGED = "kept", "renamed", "changed in meaning"
WRITTEN, NEEDLESS, IMPOSSIBLE, UNKNOWN = "written out", "not needed", "not possible", "not known"
OPEN = "to fill in"


@dataclass(frozen=True)
class Outcome:
    """Values for keys of ours, and what there is to say."""

    status: str
    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""


Rule = Callable[[Any, Given], Outcome]
Converter = Callable[[Any], Any]


class Refused(Exception):
    """A value that has no counterpart; the message says why."""


def to(
    path: str, convert: Converter | Mapping[Any, Any] | None = None, *, note: str = "", **more: Any
) -> Rule:
    """Our key of the same meaning. `convert` changes the value; `note` makes it a change in meaning.

    Keywords are further keys of ours that go with it, dots written as two underscores.
    """
    beside = {name.replace("__", "."): value for name, value in more.items()}

    def rule(value: Any, given: Given) -> Outcome:
        if value is None:
            return Outcome(NEEDLESS, note="left to the default")
        return Outcome(
            CHANGED if note else RENAMED, {path: converted(convert, value), **beside}, note
        )

    return rule


def converted(convert: Converter | Mapping[Any, Any] | None, value: Any) -> Any:
    if convert is None:
        return value
    if not isinstance(convert, Mapping):
        return convert(value)
    if value not in convert:
        raise Refused(f"{value!r} has no counterpart; there are {', '.join(map(str, convert))}")
    return convert[value]


def never(why: str, *, unless: tuple[Any, ...] = ()) -> Rule:
    """Not possible, unless the value asks for nothing."""

    def rule(value: Any, given: Given) -> Outcome:
        asks_nothing = value in NOTHING or value in unless
        return (
            Outcome(NEEDLESS, note="asks for nothing")
            if asks_nothing
            else Outcome(IMPOSSIBLE, note=why)
        )

    return rule


def needless(why: str) -> Rule:
    """Of the peer's machinery: no result depends on it, or it is always so here."""
    return lambda value, given: Outcome(NEEDLESS, note=why)


def only(*allowed: Any, why: str) -> Rule:
    """The one value that is always so here; any other is not possible."""
    return lambda value, given: (
        Outcome(NEEDLESS, note="always so") if value in allowed else Outcome(IMPOSSIBLE, note=why)
    )


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys."""
    return dict.fromkeys(names.split(), rule)
