"""Strict JSON for files that other programs read, and JSONL files to append to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# These characters end a line for str.splitlines and JavaScript, but not for JSON.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON. JSON has no NaN: non-finite numbers become texts.

    Lone surrogates, which UTF-8 cannot encode, are escaped.
    """
    finite = json.loads(json.dumps(value, default=_plain), parse_constant=lambda x: str(float(x)))
    text = json.dumps(finite, indent=indent, ensure_ascii=False)
    return text.translate(_LINE_ENDS).encode("utf-8", errors="backslashreplace").decode("utf-8")


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Append one record; a kill may have left half a line, after which it starts a new line."""
    line = f"{strict_json(record)}\n".encode()
    with file.open("ab+") as out:
        if out.tell():
            out.seek(-1, 2)
            line = line if out.read(1) == b"\n" else b"\n" + line
        out.write(line)


def current_name(metric: str) -> str:
    """Return the name that a metric has today, given the name in a file of any version."""
    return metric.replace("logps/falling", "logps/chosen_below_reference")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
