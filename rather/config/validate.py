"""Values -> DPOConfig, or one ConfigError with every problem: key path, where it was written, the way out."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rather.config.keys import nearest, suggestion, table
from rather.config.redaction import looks_secret
from rather.config.roll import strangers
from rather.config.schema import FOR_A_RUN, DPOConfig
from rather.errors import ConfigError

COMMAND_LINE = "command line"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origins:
    """Where values come from: lines of the file, its defaults list, the command line."""

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Set[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)

    def of(self, path: str) -> str | None:
        """The source of exactly this key; None when nobody wrote it."""
        if any(path == key or key.startswith(f"{path}.") for key in self.overridden):
            return COMMAND_LINE
        if path in self.lines:
            return f"{self.file}:{self.lines[path]}"
        if "defaults" in self.lines and _holds(self.written, path):
            return f"{self.file}:{self.lines['defaults']}, defaults list"
        return None

    def near(self, path: str) -> str:
        """' (dpo.yaml:31)' for a message: the line of the key, else of the group around it, else the file."""
        while path:
            if source := self.of(path):
                return f" ({source})"
            path = path.rpartition(".")[0]
        return f" ({self.file})" if self.file else ""

    def order(self, path: str) -> tuple[int, int]:
        """Messages stand in the order of the file, those of the command line last."""
        if self.of(path) == COMMAND_LINE:
            return (2, 0)
        return (0, self.lines[path]) if path in self.lines else (1, 0)


def _holds(values: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


Names = tuple[str, ...]  # a key path in parts: names in a mapping may hold dots of their own


def validated(
    data: Mapping[str, Any], origins: Origins, found: Mapping[Names, str] = MappingProxyType({})
) -> DPOConfig:
    """The config, or one ConfigError with all problems, those already `found` among them.

    Keys with a problem are taken out and the rest is judged again, so that a bad value does not hide an
    impossible combination elsewhere; combinations that depend on a key taken out are left unsaid.
    """
    aside, refused = strangers(data)
    found = {**refused, **found}
    problems = {".".join(names): text for names, text in found.items()}
    broken = set(problems)
    for names in (*aside, *found):
        data = without(data, names)
    while True:
        try:
            config = DPOConfig.model_validate(data, context=FOR_A_RUN)
            break
        except ValidationError as error:
            fields = _field_problems(error, data)
            if not fields:
                problems |= dict(_cross_problems(error, broken))
                break
            for names, text in fields.items():
                path = ".".join(names)
                problems[path] = text
                broken |= {path, nearest(path) or path} if path not in table() else {path}
                data = without(data, names)
    if problems:
        ordered = sorted(problems, key=origins.order)
        raise ConfigError([f"{path}{origins.near(path)}: {problems[path]}" for path in ordered])
    for path, text in ((".".join(names), text) for names, text in aside.items() if text):
        log.warning("%s%s: %s", path, origins.near(path), text)
    return config


def without(data: Mapping[str, Any], names: Names) -> dict[str, Any]:
    first, *rest = names
    if not rest:
        return {name: value for name, value in data.items() if name != first}
    return {
        name: without(value, tuple(rest)) if name == first else value
        for name, value in data.items()
    }


def _field_problems(error: ValidationError, data: Mapping[str, Any]) -> dict[Names, str]:
    """Key path -> sentence, one per key, though a value that fits no member of a union has several errors."""
    found: dict[Names, str] = {}
    for item in error.errors():
        if item["type"] == "cross_field":
            continue
        names, value = _locate(item["loc"], data)
        if item["type"] == "extra_forbidden":
            text = f"unknown key{suggestion('.'.join(names))}"
        else:
            detail = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
            text = _refusal(".".join(names), value, detail)
        found.setdefault(names, text)
    return found


def _locate(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> tuple[Names, Any]:
    """The part of pydantic's location that is in the data (the rest names union members), and its value."""
    names: list[str] = []
    value: Any = data
    for name in loc:
        if not isinstance(value, Mapping) or name not in value:
            break
        names.append(str(name))
        value = value[name]
    return tuple(names), value


def _refusal(path: str, value: Any, detail: str) -> str:
    key = table().get(path) or table()[path.rpartition(".")[0]]
    shown = "the value" if looks_secret(path) else _shown(value)
    if detail:
        return f"{shown} cannot be used: {detail}"
    inside = path != key.path  # an entry of a mapping, such as one environment variable
    text = f"{shown} is not {'what ' + key.path + ' holds: ' if inside else ''}{key.expects}"
    if key.section:
        text += f" ({', '.join(key.section.model_fields)})"
    near = difflib.get_close_matches(str(value), key.choices, n=1)
    if near:
        text += f"; did you mean '{near[0]}'?"
    elif key.why and isinstance(value, int | float):
        text += f": {key.why}"
    elif isinstance(value, str) and type(key.default) in (int, float):
        text += f", such as {key.default:g}"
    if isinstance(value, int | float) and (inside or key.only_text):
        text += "; write it in quotes if it is meant as text"
    return text


def _shown(value: Any) -> str:
    text = repr(value) if value is not None else "null"
    return text if len(text) <= 80 else text[:77] + "..."


def _cross_problems(error: ValidationError, broken: set[str]) -> Iterator[tuple[str, str]]:
    for item in error.errors():
        for problem in item["ctx"]["problems"]:
            if not any(
                _related(key, other) for key in (problem.key, *problem.others) for other in broken
            ):
                yield problem.key, problem.text


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
