"""JSON that every reader takes, and files of one record a line to which the starts of a run append."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Ends of a line to Python's splitlines and to JavaScript, not to JSON.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON has no NaN: such a number is told as a text. Half a character, which UTF-8 has not, becomes its escape."""
    text = json.dumps(
        _finite(value), indent=indent, ensure_ascii=False, default=str, allow_nan=False
    )
    return text.translate(_LINE_ENDS).encode("utf-8", errors="backslashreplace").decode("utf-8")


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """A line of its own also after half a line, which a kill has left."""
    line = f"{strict_json(record)}\n".encode()
    with file.open("ab+") as out:
        if out.tell():
            out.seek(-1, 2)
            line = line if out.read(1) == b"\n" else b"\n" + line
        out.write(line)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
