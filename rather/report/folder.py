"""What a run folder tells, read as it stands: a run may be writing to it, and any of its files may be missing."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rather.config.redaction import redact
from rather.errors import ConfigError
from rather.run_folder.incidents import INCIDENTS
from rather.run_folder.layout import DATA_REPORT, FINISHED, PLAN, RUN_REPORT, STARTS
from rather.tracking.json_lines import current_name

METRICS, HEALTH, ANSWERS = "metrics.jsonl", "health.jsonl", "answers.jsonl"
MOST_STEPS = 1 << 53  # whole numbers up to there are themselves as floats
NO_LINE_OF_OURS = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
BETWEEN = "\n\0\n"  # stands in no text, and no pattern of a secret reaches over it


@dataclass
class Column:
    """One metric: the steps it was told at, and its values."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, steps: array[int], values: array[float]) -> None:
        """Of lines that tell more, or less, than others; these may come between those."""
        if self.steps:
            both = sorted(
                zip([*self.steps, *steps], [*self.values, *values], strict=True),
                key=lambda point: point[0],
            )
            steps, values = (
                array("q", [step for step, _ in both]),
                array("d", [value for _, value in both]),
            )
        self.steps, self.values = steps, values


Columns = dict[str, Column]  # by metric; those of held-out pairs begin with eval/


@dataclass(frozen=True)
class Folder:
    """Everything the report is made of, without secrets."""

    path: Path
    metrics: Columns
    starts: list[dict[str, Any]]
    health: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    incidents: list[dict[str, Any]]
    data: dict[str, Any]
    times: dict[str, Any]  # report.json
    plan: dict[str, Any]
    finished: bool

    @staticmethod
    def of(path: Path) -> Folder:
        if not (path / METRICS).is_file():
            raise ConfigError(
                f"{path}: holds no run, {METRICS} is missing; name the folder of a run, <output_dir>/<exp_name>."
            )
        lines = {"starts": STARTS, "health": HEALTH, "answers": ANSWERS, "incidents": INCIDENTS}
        told: dict[str, Any] = {field: list(_lines(path / name)) for field, name in lines.items()}
        told |= {
            "data": _object(path / DATA_REPORT),
            "times": _object(path / RUN_REPORT),
            "plan": _object(path / PLAN),
        }
        columns = columns_of(_lines(path / METRICS))
        return Folder(path, columns, finished=(path / FINISHED).exists(), **without_secrets(told))

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


def columns_of(records: Iterable[dict[str, Any]]) -> Columns:
    """Line by line into arrays, one for all lines with the same names: half the time of one by one."""
    tables: dict[tuple[str, ...], array[float]] = {}
    for record in records:
        with suppress(*NO_LINE_OF_OURS):
            record |= {name: float(told) for name, told in record.pop("nonfinite", {}).items()}
            row = array("d", record.values())
            if 0 <= record["step"] < MOST_STEPS:
                tables.setdefault(tuple(record), array("d")).extend(row)
    columns: Columns = {}
    for names, table in tables.items():
        steps = array("q", map(int, table[names.index("step") :: len(names)]))
        for place, name in enumerate(names):
            column = columns.setdefault(current_name(name), Column())
            column.add(steps, table[place :: len(names)])
    return columns


def without_secrets(value: Any) -> Any:
    """Every text redacted, all at once: one by one they would take seconds."""
    clean = iter(redact(BETWEEN.join(_texts(value))).split(BETWEEN))
    return _replaced(value, clean)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    """The same structure with its texts replaced, in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {key: _replaced(each, texts) for key, each in value.items()}
    return [_replaced(each, texts) for each in value] if isinstance(value, list) else value


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; one that is just being written is left out, and so is one that is damaged."""
    with suppress(OSError), file.open("rb") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def _object(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
