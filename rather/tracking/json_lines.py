"""Strict JSON for files that other programs read, JSONL files to append to, and metrics.jsonl.

metrics.jsonl is the record of a run. Checkpoints store its length: no line is lost or doubled.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rather.errors import CheckpointError, DiskError

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


log = logging.getLogger(__name__)

Record = Mapping[str, float | int]


class MetricsFile:
    """Appends one JSON object per line; after each call the file holds whole lines only.

    A line that a full disk does not take is kept and written with a later one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._unwritten = b""

    def append(self, record: Record) -> None:
        already_failing = bool(self._unwritten)
        self._unwritten += json_line(record).encode()
        try:
            self._write()
        except OSError as error:
            if not already_failing:
                log.warning(
                    "%s: cannot be written (%s); new lines are kept in memory.",
                    self.path, error.strerror,
                )  # fmt: skip

    def position(self) -> int:
        """Return the length of the file, with every line on the disk."""
        try:
            self._write()
            os.fsync(self._descriptor)
        except OSError as error:
            waiting = f"{len(self._unwritten):,} bytes of metrics wait for room on the disk"
            raise DiskError(
                f"{self.path}: cannot be written ({error.strerror}); {waiting}."
            ) from error
        return self._size

    def truncate(self, position: int) -> None:
        """Cut the file to its length at a checkpoint; the run writes the later lines again."""
        ends_line = not position or os.pread(self._descriptor, 1, position - 1) == b"\n"
        if self._size < position or not ends_line:
            raise CheckpointError(
                f"{self.path}: has {self._size:,} bytes, but the checkpoint was saved when a line "
                f"ended at {position:,}: the file was cut or changed since. Restore it, or start "
                "from scratch with --overwrite or another exp_name."
            )
        os.ftruncate(self._descriptor, position)
        os.fsync(self._descriptor)
        self._size, self._unwritten = position, b""

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s: the last lines were lost (%s).", self.path, error.strerror)
        os.close(self._descriptor)

    def _write(self) -> None:
        """Write all or nothing: if a full disk takes half a line, that half is cut off again."""
        done = 0
        try:
            while done < len(self._unwritten):
                done += os.write(self._descriptor, self._unwritten[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done
        self._unwritten = b""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file that MetricsFile has written."""
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        nonfinite = {name: float(text) for name, text in fields.pop("nonfinite", {}).items()}
        yield fields | nonfinite


def json_line(record: Record) -> str:
    """Return one line of strict JSON with the fields in the given order.

    JSON has no NaN: such a value is null, and the last field says what it was, as in
    {"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}.
    """
    nonfinite = {key: str(value) for key, value in record.items() if not math.isfinite(value)}
    fields: dict[str, Any] = dict(record) | dict.fromkeys(nonfinite)
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, allow_nan=False) + "\n"
