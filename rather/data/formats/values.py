"""Checks of single values of a row."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterable
from typing import Any

from rather.data.formats.registry import Row
from rather.data.json_rows import DropReason
from rather.data.messages import wrong_type

EXTRAS = ("weight", "margin", "soft_label", "id", "tools", "chat_template_kwargs")


def hint(name: str, known: Iterable[Any]) -> str:
    """Return a hint at a similar name, or nothing."""
    near = difflib.get_close_matches(name, [str(key) for key in known], 1, 0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def missing_key(name: str, row: Row) -> DropReason:
    """Return the reason for a row without a needed key."""
    present = ", ".join([str(key) for key in row][:20]) or "no keys"
    return DropReason("missing_key", f"no key {name!r}{hint(name, row)}; the row has {present}")


def number_of(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a value that must be a finite number from `low` to `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or not low <= value <= high:
        least = f" of at least {low:g}" if low > -math.inf else ""
        allowed = f" from {low:g} to {high:g}" if high < math.inf else least
        raise wrong_type(where, f"a number{allowed}", value)
    return float(value)


def extras_of(row: Row) -> dict[str, Any]:
    """Return what a row may say about its pairs in any format."""
    given = {name: row[name] for name in EXTRAS if row.get(name) is not None}
    extras: dict[str, Any] = {}
    for name, low, high in (("weight", 0, math.inf), ("margin", -math.inf, math.inf),
                            ("soft_label", 0, 1)):  # fmt: skip
        if name in given:
            extras[name] = number_of(given[name], name, low, high)
    if "id" in given:
        if isinstance(given["id"], bool) or not isinstance(given["id"], str | int):
            raise wrong_type("id", "text or a whole number", given["id"])
        extras["id"] = str(given["id"])
    for name, field, kind in (
        ("tools", "tools", list),
        ("chat_template_kwargs", "template_kwargs", dict),
    ):
        value = given.get(name)
        if value:
            if isinstance(value, str):  # tables often have nested values as JSON text
                try:
                    value = json.loads(value)
                except ValueError as error:
                    detail = f"{name} is text but not JSON ({error})"
                    raise DropReason("bad_type", detail) from error
            if not isinstance(value, kind):
                raise wrong_type(name, f"a {kind.__name__}", value)
            extras[field] = value
    return extras
