"""Reads a run folder for the report and the board.

A run may be writing to it, and any file may be missing.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rather.config.redaction import redact
from rather.files import JsonObject, own
from rather.run_folder.names import (
    ANSWERS,
    DATA_REPORT,
    FINISHED,
    HEALTH,
    INCIDENTS,
    METRICS,
    PLAN,
    RUN_REPORT,
    STARTS,
    refuse_other_folder,
)  # fmt: skip
from rather.tracking.json_lines import (
    JsonLines,
    current_name,
    parse_object,
    read_lines,
    read_object,
)

log = logging.getLogger(__name__)

MOST_STEPS = 1 << 53
BETWEEN = "\n\0\n"  # occurs in no text, and no pattern of a secret reaches across it


def newest_records(path: Path, most: int = 1 << 16) -> tuple[list[JsonObject], int]:
    """Return the records in the last bytes of a file, newest first, and the damaged lines."""
    with open(path, "rb", opener=own) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        lines = file.read(most).split(b"\n")
    records = [parse_object(line) for line in reversed(lines[1 if size > most else 0 : -1])]
    return [record for record in records if record is not None], records.count(None)


class MetricColumn(NamedTuple):
    steps: array[int]
    values: array[float]


MetricColumns = dict[str, MetricColumn]  # by metric; those of held-out pairs begin with eval/


class MetricsReader:
    """metrics.jsonl by columns."""

    def __init__(self, path: Path) -> None:
        self.file, self.lock = JsonLines(path), Lock()
        self.columns: MetricColumns = {}

    @property
    def points(self) -> int:
        columns = list(self.columns.values())  # another thread may add one
        return sum(len(column.steps) for column in columns)

    def update(self) -> MetricColumns:
        """Read what is new, and return all columns."""
        if self.file.was_cut():
            self.file, self.columns = JsonLines(self.file.path), {}
        with suppress(OSError):  # missing or unreadable: the list of runs says so
            for record in self.file.new():
                step, nonfinite = record.pop("step", None), record.pop("nonfinite", None)
                if not isinstance(step, int) or not 0 <= step < MOST_STEPS:
                    self.file.damaged += 1
                    continue
                # A value that JSON cannot hold is null, and its text is in `nonfinite`.
                record |= nonfinite if isinstance(nonfinite, dict) else {}
                for name, number in record.items():
                    with suppress(TypeError, ValueError, OverflowError):
                        number = nan if number is None else float(number)
                        self._add(current_name(name), step, number)
        return self.columns

    def _add(self, name: str, step: int, value: float) -> None:
        if name not in self.columns:
            self.columns[name] = MetricColumn(array("q"), array("d"))
        self.columns[name].steps.append(step)
        self.columns[name].values.append(value)


class Folder:
    """Everything that the report is made of, without secrets."""

    def __init__(self, path: Path) -> None:
        refuse_other_folder(path)
        self.path, self.finished = path, (path / FINISHED).exists()
        self.name = Path(os.path.abspath(path)).name  # the path may be "."
        self.metrics = MetricsReader(path / METRICS).update()
        self.step = max((column.steps[-1] for column in self.metrics.values()), default=0)
        lists = [read_lines(path / name)[0] for name in (STARTS, HEALTH, ANSWERS, INCIDENTS)]
        objects = [read_object(path / name) for name in (DATA_REPORT, RUN_REPORT, PLAN)]
        lists, objects = without_secrets([lists, objects])
        self.starts, self.health, self.answers, self.incidents = lists
        self.data, self.times, self.plan = objects

    def texts_of(self, digests: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return the shortened texts of training pairs; empty if they are not known."""
        from rather.tools.report.pair_texts import PairTexts  # slow: tokenizer and data

        try:
            texts = PairTexts.of(self.path)
            listed = [digest for digest in digests if digest in texts.places]
            shown = [texts.shortened(texts.places[digest]) for digest in listed]
        except Exception:  # the page is worth more than these texts
            log.debug("the texts of the pairs cannot be read", exc_info=True)
            return {}
        return dict(zip(listed, without_secrets(shown), strict=True))

    @property
    def total_steps(self) -> int | None:
        return self.starts[-1]["total_steps"] if self.starts else None

    def total(self, metric: str) -> float:
        return sum(self.metrics[metric].values) if metric in self.metrics else 0.0


def without_secrets(value: Any) -> Any:
    """Redact every text of a value; all texts at once, as one by one would take seconds."""
    texts: list[str] = []
    _each_text(value, texts.append)
    clean = iter(redact(BETWEEN.join(texts)).split(BETWEEN))
    return _each_text(value, lambda _: next(clean))


def _each_text(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a value with all its texts changed, always in the same order."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_text(inner, change) for key, inner in value.items()}
    return [_each_text(inner, change) for inner in value] if isinstance(value, list) else value
