"""The registry of data formats, and checks of single values that formats share.

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
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sized
from typing import Any, NamedTuple

from rather.config.plugins import Registry
from rather.data.json_rows import DropReason
from rather.data.messages import wrong_type
from rather.errors import LIMITS
from rather.files import parse_json

Row = Mapping[str, Any]
EXTRAS = ("weight", "margin", "soft_label", "id", "tools", "chat_template_kwargs")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
RANGES = {"weight": (0, math.inf), "margin": (-math.inf, math.inf), "soft_label": (0, 1)}


class Single(NamedTuple):
    """One answer to a prompt; the columns label and score say how good it is."""

    answer: Any


class Ranked(NamedTuple):
    """Answers to one prompt; a smaller rank is a better answer."""

    answers: list[Any]
    ranks: list[float]


Reader = Callable[[Row], tuple[Any, tuple[Any, Any] | Ranked | Single]]


class DataFormat(NamedTuple):
    """A known form of rows: how it is read, and the columns it needs or may have."""

    read: Reader
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    single: bool = False  # gives one answer, which is not a pair


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
    for name in MEDIA:
        value = row.get(name)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise DropReason(
                "bad_type", f"the row has a column {name}, but only text is read; {LIMITS}"
            )
    given = {name: row[name] for name in EXTRAS if row.get(name) is not None}
    extras: dict[str, Any] = {
        name: number_of(given[name], name, *limits)
        for name, limits in RANGES.items()
        if name in given
    }
    if "id" in given:
        if isinstance(given["id"], bool) or not isinstance(given["id"], str | int):
            raise wrong_type("id", "text or a whole number", given["id"])
        extras["id"] = str(given["id"])
    nested = (("tools", "tools", list), ("chat_template_kwargs", "template_kwargs", dict))
    for name, field, kind in nested:
        if value := given.get(name):
            if isinstance(value, str):  # tables often have nested values as JSON text
                try:
                    value = parse_json(value)
                except ValueError as error:
                    detail = f"{name} is text but not JSON ({error})"
                    raise DropReason("bad_type", detail) from error
            if not isinstance(value, kind):
                raise wrong_type(name, f"a {kind.__name__}", value)
            extras[field] = value
    return extras
