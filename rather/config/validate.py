"""Values -> DPOConfig, or one ConfigError with every problem: key path, source line, and what to
do."""

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
from rather.config.roll import roll_keys
from rather.config.schema import FOR_A_RUN, DPOConfig
from rather.errors import ConfigError

COMMAND_LINE = "command line"
ALIASES = {"gpu": "cuda"}  # what users write -> the value, where no similar word would be found
Names = tuple[str, ...]  # a key path in parts: names in a mapping may contain dots
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origins:
    """Where values come from: lines of the file, its defaults list, the command line."""

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Set[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)

    def of(self, path: str) -> str | None:
        """Return the source of exactly this key; None if it is not set."""
        if any(_is_inside(key, path) for key in self.overridden):
            return COMMAND_LINE
        if path in self.lines:
            return f"{self.file}:{self.lines[path]}"
        values: Any = self.written if "defaults" in self.lines else None
        for name in path.split("."):
            if not isinstance(values, Mapping) or name not in values:
                return None
            values = values[name]
        return f"{self.file}:{self.lines['defaults']}, defaults list"

    def near(self, path: str) -> str:
        """Return ' (dpo.yaml:31)' for a message: the line of the key, or of a group around it,
        or the file."""
        while path:
            if source := self.of(path):
                return f" ({source})"
            path = path.rpartition(".")[0]
        return f" ({self.file})" if self.file else ""

    def order(self, path: str) -> tuple[int, int]:
        """Sort messages as in the file, those of the command line last."""
        if self.of(path) == COMMAND_LINE:
            return (2, 0)
        return (0, self.lines[path]) if path in self.lines else (1, 0)


def _is_inside(path: str, group: str) -> bool:
    return path == group or path.startswith(f"{group}.")


def validated(
    data: Mapping[str, Any], origins: Origins, found: Mapping[Names, str] = MappingProxyType({})
) -> DPOConfig:
    """Return the config, or raise one ConfigError with all problems, including those already
    `found`.

    Keys with a problem are removed and the rest is validated again, so that a bad value does not
    hide an impossible combination elsewhere. Combinations that depend on a removed key are not
    reported.
    """
    ignored, refused = roll_keys(data)
    found = {**refused, **found}
    problems = {".".join(names): text for names, text in found.items()}
    broken = set(problems)
    for names in (*ignored, *found):
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
                broken |= {path} if path in table() else {path, nearest(path) or path}
                data = without(data, names)
    if problems:
        ordered = sorted(problems, key=origins.order)
        raise ConfigError([f"{path}{origins.near(path)}: {problems[path]}" for path in ordered])
    for path, text in ((".".join(names), text) for names, text in ignored.items() if text):
        log.warning("%s%s: %s", path, origins.near(path), text)
    return config


def without(data: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a copy of nested values without one key."""
    first, *rest = names
    if rest:
        return {**data, first: without(data[first], tuple(rest))}
    return {name: value for name, value in data.items() if name != first}


def _field_problems(error: ValidationError, data: Mapping[str, Any]) -> dict[Names, str]:
    """Return one sentence per key; pydantic has several errors for a value that fits no member
    of a union."""
    found: dict[Names, str] = {}
    for item in error.errors():
        if item["type"] == "cross_field":
            continue
        # Only the first part of pydantic's location is in the data; the rest names members of a
        # union.
        names: Names = ()
        value: Any = data
        for name in item["loc"]:
            if not isinstance(value, Mapping) or name not in value:
                break
            names, value = (*names, str(name)), value[name]
        path = ".".join(names)
        detail = str(item["ctx"]["error"]) if item["type"] == "value_error" else ""
        is_unknown = item["type"] == "extra_forbidden"
        text = f"unknown key{suggestion(path)}" if is_unknown else _refusal(path, value, detail)
        found.setdefault(names, text)
    return found


def _refusal(path: str, value: Any, detail: str) -> str:
    key = table().get(path) or table()[path.rpartition(".")[0]]
    text = repr(value) if value is not None else "null"
    shown = "the value" if looks_secret(path) else text if len(text) <= 80 else f"{text[:77]}..."
    if detail:
        return f"{shown} cannot be used: {detail}"
    if path == "parity" and value == "trl-0.2x":
        return "'trl-0.2x' was removed; rather 0.1.0 is the last version that has it"
    is_entry = path != key.path  # of a mapping, such as one environment variable
    text = f"{shown} is not {f'an entry of {key.path}: ' if is_entry else ''}{key.expects}"
    if key.section:
        text += f" ({', '.join(key.section.model_fields)})"
    near = difflib.get_close_matches(ALIASES.get(str(value), str(value)), key.choices, n=1)
    if near:
        text += f"; did you mean '{near[0]}'?"
    elif key.why and isinstance(value, int | float):
        text += f": {key.why}"
    elif isinstance(value, str) and type(key.default) in (int, float):
        text += f", such as {key.default:g}"
    if isinstance(value, int | float) and (is_entry or key.only_text):
        text += "; write it in quotes if it is meant as text"
    return text


def _cross_problems(error: ValidationError, broken: set[str]) -> Iterator[tuple[str, str]]:
    for item in error.errors():
        for key, text, *others in item["ctx"]["problems"]:
            if not any(
                _is_inside(each, other) or _is_inside(other, each)
                for each in (key, *others)
                for other in broken
            ):
                yield key, text
