"""JSON lines that another process is writing: only new bytes are read, torn and damaged lines are passed over."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from math import nan
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rather.tracking.json_lines import current_name

CHUNK = 4 << 20
REMEMBERED = 256  # bytes before the place that was read up to: by them a file that was cut and written again is known
Record = dict[str, Any]


class Growing:
    """A file that grows, or that a resumed run cuts back to its checkpoint and writes again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewind()

    def rewind(self) -> None:
        self.place, self.damaged = 0, 0  # bytes read, and lines among them that are no record
        self._before = b""

    def was_cut(self) -> bool:
        """Whether what was read is no longer what stands there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place - len(self._before))
                return file.read(len(self._before)) != self._before
        except OSError:
            return self.place > 0

    def new(self) -> Iterator[Record]:
        """The records of all whole lines that came since; the last line may still be in the making."""
        with self.path.open("rb") as file:
            file.seek(self.place)
            rest = b""
            while data := file.read(CHUNK):
                whole, newline, rest = (rest + data).rpartition(b"\n")
                for line in whole.split(b"\n") if newline else ():
                    record = parsed(line)
                    self.damaged += record is None
                    if record is not None:
                        yield record
                self._passed(whole + newline)
                if (
                    len(rest) > CHUNK
                ):  # no line of ours: what has no end must not be read again each time
                    self.damaged += 1
                    self._passed(rest)
                    rest = b""

    def _passed(self, data: bytes) -> None:
        self.place += len(data)
        self._before = (self._before + data)[-REMEMBERED:]


def parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def records(path: Path) -> tuple[list[Record], int]:
    """All records of a small file, and how many lines are none. A file that is not there has no line."""
    file = Growing(path)
    try:
        return list(file.new()), file.damaged
    except FileNotFoundError:
        return [], 0
    except OSError:
        return [], 1


def newest_records(path: Path, most: int = 1 << 16) -> tuple[list[Record], int]:
    """The records of the last bytes of a file, newest first, and how many lines there are none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        lines = file.read(most).split(b"\n")
    whole = lines[1 if size > most else 0 : -1]
    found = [parsed(line) for line in reversed(whole)]
    return [record for record in found if record is not None], found.count(None)


class Column(NamedTuple):
    steps: array[int]
    values: array[float]


class Curves:
    """metrics.jsonl by columns: the steps and values of each metric."""

    def __init__(self, path: Path) -> None:
        self.file = Growing(path)
        self.columns: dict[str, Column] = {}
        self.turn = Lock()

    @property
    def points(self) -> int:
        columns = list(self.columns.values())  # another thread may be adding one
        return sum(len(column.steps) for column in columns)

    def update(self) -> None:
        if self.file.was_cut():
            self.file.rewind()
            self.columns = {}
        try:
            for record in self.file.new():
                self.file.damaged += not self._add(record)
        except OSError:
            return  # not there yet, or unreadable: what the list of runs says

    def _add(self, record: Record) -> bool:
        step = record.get("step")
        if not isinstance(step, int) or not 0 <= step < 1 << 60:
            return False
        for stored, value in record.items():
            name = current_name(stored)
            if name == "step" or not isinstance(value, int | float | None):
                continue
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = Column(array("q"), array("d"))
            column.steps.append(step)
            column.values.append(nan if value is None else _float(value))
        return True

    def lines(self, metric: str) -> dict[str, Column]:
        """A metric of training and, under their own names, of each held-out set."""
        asked = [name for name in self.columns if name == metric or is_held_out(name, metric)]
        return {
            name: self.columns[name]
            for name in sorted(asked, key=lambda name: (name != metric, name))
        }


def is_held_out(name: str, metric: str) -> bool:
    """Whether `name` is eval/<metric> or eval/<set>/<metric>."""
    return name == f"eval/{metric}" or (
        name.startswith("eval/") and name.split("/", 2)[2:] == [metric]
    )


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of 400 digits
        return nan
