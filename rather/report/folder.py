"""Reads a run folder for the report and the board: a run may be writing to it, and any file may be
missing.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rather.config.redaction import redact
from rather.errors import ConfigError
from rather.report.document import Record as Record
from rather.tracking.json_lines import current_name

# The names of rather.run_folder.layout, which imports torch; the board must start without it.
METRICS, CONFIG, STARTS = "metrics.jsonl", "config.yaml", "starts.jsonl"
INCIDENTS, HEALTH, ANSWERS = "incidents.jsonl", "health.jsonl", "answers.jsonl"
RUN_REPORT, DATA_REPORT, PLAN = "report.json", "data_report.json", "plan.json"
REPORT_PAGE, FINISHED = "report.html", ".finished"

CHUNK = 4 << 20  # bytes read at a time; no line is longer
REMEMBERED = (
    256  # bytes before the current position, to notice a file that was cut and written again
)
MOST_STEPS = 1 << 53
BETWEEN = "\n\0\n"  # occurs in no text, and no pattern of a secret reaches across it


class JsonLines:
    """A file of JSON lines that another process appends to, or cuts back to a checkpoint.

    Each call of `new` reads only new bytes; a torn last line waits, and damaged lines are counted
    and skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewind()

    def rewind(self) -> None:
        self.position, self.damaged = 0, 0
        self._before = b""

    def was_cut(self) -> bool:
        """Return whether the bytes before the position are no longer those that were read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position - len(self._before))
                return file.read(len(self._before)) != self._before
        except OSError:
            return self.position > 0

    def new(self) -> Iterator[Record]:
        """Yield the records of all complete lines since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            rest = b""
            while data := file.read(CHUNK):
                whole, newline, rest = (rest + data).rpartition(b"\n")
                for line in whole.split(b"\n") if newline else ():
                    record = _object(line)
                    self.damaged += record is None
                    if record is not None:
                        yield record
                self._advance(whole + newline)
                if len(rest) > CHUNK:  # otherwise an endless line would be read again at each call
                    self.damaged += 1
                    self._advance(rest)
                    rest = b""

    def _advance(self, data: bytes) -> None:
        self.position += len(data)
        self._before = (self._before + data)[-REMEMBERED:]


def _object(text: bytes) -> Record | None:
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def read_object(file: Path) -> Record:
    """Return the object in a JSON file; {} if there is none."""
    with suppress(OSError):
        return _object(file.read_bytes()) or {}
    return {}


def records(path: Path) -> tuple[list[Record], int]:
    """Return all records of a small file, and the number of damaged lines; a missing file has no
    lines.
    """
    lines = JsonLines(path)
    try:
        return list(lines.new()), lines.damaged
    except OSError as error:
        return [], int(not isinstance(error, FileNotFoundError))


def newest_records(path: Path, most: int = 1 << 16) -> tuple[list[Record], int]:
    """Return the records in the last bytes of a file, newest first, and the number of damaged
    lines.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        lines = file.read(most).split(b"\n")
    found = [_object(line) for line in reversed(lines[1 if size > most else 0 : -1])]
    return [record for record in found if record is not None], found.count(None)


class MetricColumn(NamedTuple):
    steps: array[int]
    values: array[float]


MetricColumns = dict[str, MetricColumn]  # by metric; those of held-out pairs begin with eval/


class MetricsReader:
    """metrics.jsonl by columns."""

    def __init__(self, path: Path) -> None:
        self.file = JsonLines(path)
        self.columns: MetricColumns = {}
        self.lock = Lock()

    @property
    def points(self) -> int:
        columns = list(self.columns.values())  # another thread may add one
        return sum(len(column.steps) for column in columns)

    def update(self) -> MetricColumns:
        """Read what is new, and return all columns."""
        if self.file.was_cut():
            self.file.rewind()
            self.columns = {}
        with suppress(OSError):  # missing or unreadable: the list of runs says so
            for record in self.file.new():
                self.file.damaged += not self._add(record)
        return self.columns

    def _add(self, record: Record) -> bool:
        step, nonfinite = record.pop("step", None), record.pop("nonfinite", None)
        if not isinstance(step, int) or not 0 <= step < MOST_STEPS:
            return False
        # A value that JSON cannot hold is null, and its text is in `nonfinite`.
        for name, value in (record | (nonfinite if isinstance(nonfinite, dict) else {})).items():
            with suppress(TypeError, ValueError, OverflowError):
                number = nan if value is None else float(value)
                name = current_name(name)
                if name not in self.columns:
                    self.columns[name] = MetricColumn(array("q"), array("d"))
                self.columns[name].steps.append(step)
                self.columns[name].values.append(number)
        return True


@dataclass(frozen=True)
class Folder:
    """Everything that the report is made of, without secrets."""

    path: Path
    metrics: MetricColumns
    starts: list[Record]
    health: list[Record]
    answers: list[Record]
    incidents: list[Record]
    data: Record
    times: Record  # report.json
    plan: Record
    finished: bool

    @staticmethod
    def of(path: Path) -> Folder:
        if not (path / METRICS).is_file():
            raise ConfigError(
                f"{path}: not a run folder ({METRICS} is missing); give <output_dir>/<exp_name>."
            )
        lines = {"starts": STARTS, "health": HEALTH, "answers": ANSWERS, "incidents": INCIDENTS}
        objects = {"data": DATA_REPORT, "times": RUN_REPORT, "plan": PLAN}
        found: Record = {field: records(path / name)[0] for field, name in lines.items()}
        found |= {field: read_object(path / name) for field, name in objects.items()}
        metrics = MetricsReader(path / METRICS).update()
        return Folder(path, metrics, finished=(path / FINISHED).exists(), **without_secrets(found))

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.path)).name  # the path may be "."

    @property
    def step(self) -> int:
        return max((column.steps[-1] for column in self.metrics.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        return self.starts[-1]["total_steps"] if self.starts else None

    def total(self, metric: str) -> float:
        return sum(self.metrics[metric].values) if metric in self.metrics else 0.0


def without_secrets(value: Any) -> Any:
    """Return the value with every text redacted; all texts at once, as one by one would take
    seconds.
    """
    clean = iter(redact(BETWEEN.join(_texts(value))).split(BETWEEN))

    def replace(value: Any) -> Any:
        if isinstance(value, str):
            return next(clean)
        if isinstance(value, dict):
            return {key: replace(each) for key, each in value.items()}
        return [replace(each) for each in value] if isinstance(value, list) else value

    return replace(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts, in the order in which `without_secrets` replaces them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
