"""The runs under a folder: rows of the list, curves, findings, and how configs differ."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from rather.config.values import FORGETTING
from rather.files import JsonObject, own, parse_yaml, yaml_text
from rather.run_folder import control
from rather.run_folder.names import (
    ANSWERS,
    CONFIG,
    DATA_REPORT,
    FINISHED,
    HEALTH,
    INCIDENTS,
    METRICS,
    REPORT_PAGE,
    RUN_REPORT,
    STARTS,
)
from rather.tools.report.folder import MetricsReader, newest_records
from rather.tools.report.page import downsample
from rather.tracking.health import urgency
from rather.tracking.json_lines import flatten, read_lines, read_object
from rather.tracking.outcome import result_of

RESULT_LINES = 4  # after these come answers, which the board shows itself
EVENTS = (INCIDENTS, HEALTH, ANSWERS)
MARKS = {METRICS, control.LOCK, FINISHED, "LATEST", DATA_REPORT}  # one of them makes a run folder
DEPTH = 4  # folders between the given one and a run
LISTED = re.compile(r"^(?:pretrain|pref_loss|loss_type|ipo):.*(?:\n[ -].*)*", re.MULTILINE)
EXPONENT = re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?\d+")  # a number that YAML 1.1 reads as text
POINTS = 1000  # of a drawn line
MOST_KEPT = 20_000_000  # points of all runs in memory, 16 bytes each
MOST_EVENTS = 64 << 20  # bytes of such a file
LAST_EVENTS = 500  # lines shown of each file of EVENTS


class FolderProblem(Exception):
    """A file of a run folder cannot be read as what it should be; the message is one sentence."""


class RunList:
    """All runs under a folder, known by their ids: what a request says never becomes a path."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, Lock()
        self._found: dict[str, Path] = {}
        self._rows: dict[str, tuple[tuple[Any, ...], JsonObject]] = {}
        self._curves: OrderedDict[str, MetricsReader] = OrderedDict()

    def rows(self) -> list[JsonObject]:
        """Return all runs as they are now, by name."""
        with self._lock:
            folders = sorted(_runs_in(self.folder, DEPTH))
            self._found = {digest(path.relative_to(self.folder)): path for path in folders}
            return [self._row(run, path) for run, path in self._found.items()]

    def path(self, run: str) -> Path | None:
        if run not in self._found:
            self.rows()
        return self._found.get(run)

    def _row(self, run: str, path: Path) -> JsonObject:
        files = (METRICS, RUN_REPORT, STARTS, CONFIG, *EVENTS)
        stamps = tuple(stamp(path / name) for name in files)
        if run not in self._rows or self._rows[run][0] != stamps:
            self._rows[run] = stamps, _row_of(path)
        name = path.relative_to(self.folder).as_posix() if path != self.folder else path.name
        row = {"id": run, "name": name, **self._rows[run][1]}
        row |= {"state": _state(path, row), "report": (path / REPORT_PAGE).is_file()}
        # A new line of metrics changes only `version`: what people are reading stays open.
        row["version"] = digest(stamps, row["state"])
        row["story"] = digest(stamps[3:], row["state"], row["report"])
        return row

    def curves(self, run: str, path: Path, metrics: Sequence[str]) -> JsonObject:
        """Return the requested metrics, training and held-out, and the names of all metrics."""
        with self._lock:
            reader = self._curves.setdefault(run, MetricsReader(path / METRICS))
            self._curves.move_to_end(run)
            points = {name: metrics_reader.points for name, metrics_reader in self._curves.items()}
            while len(points) > 1 and sum(points.values()) > MOST_KEPT:
                del points[self._curves.popitem(last=False)[0]]  # the least recently used
        with reader.lock:
            columns = reader.update()
            lines: JsonObject = {}
            for metric in metrics:
                held_out = re.compile(rf"eval/([^/]+/)?{re.escape(metric)}")
                sets = sorted(filter(held_out.fullmatch, columns))
                names = [metric, *(name for name in sets if not name.startswith(FORGETTING))]
                logged = [name for name in names if name in columns]
                lines[metric] = {name: downsample(*columns[name], POINTS) for name in logged}
            names = sorted(name for name in columns if not name.startswith("eval/"))
            return {"lines": lines, "metrics": names, "damaged": reader.file.damaged}

    def details(self, path: Path) -> JsonObject:
        """Return config and events of a run, and what is wrong with its folder."""
        problems = []
        details: JsonObject = {"folder": str(path), "config": {}}
        details["result"] = " ".join(result_of(read_object(path / RUN_REPORT))[:RESULT_LINES])
        try:
            details["config"] = read_config(path)
        except FolderProblem as problem:
            problems.append(str(problem))
        for name in EVENTS:
            lines, damaged = _events(path / name)
            if name == HEALTH:  # by harm, not by time
                lines.sort(key=lambda one: urgency(str(one.get("name")), str(one.get("severity"))))
            left_out = max(0, len(lines) - LAST_EVENTS)
            shown = lines[:LAST_EVENTS] if name == HEALTH else lines[left_out:]
            details[name.removesuffix(".jsonl")] = {"lines": shown, "left_out": left_out}
            if damaged:
                problems.append(f"{name}: {damaged} damaged lines are left out")
        return {**details, "problems": problems}


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield run folders that are not inside each other; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            inside = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:
        return
    marks, within = MARKS & inside.keys(), list[Path]()
    if depth and marks <= {control.LOCK}:  # a lock alone: a new run, or a sweep with its runs
        folders = [name for name, is_folder in inside.items() if is_folder and name[0] != "."]
        within = [run for name in folders for run in _runs_in(folder / name, depth - 1)]
    yield from within or ([folder] if marks else [])


# --- a row of the list ---


def digest(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def stamp(file: Path) -> tuple[int, int] | None:
    """Return size and time of a file; None if it is missing."""
    with suppress(OSError):
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    return None


def _row_of(path: Path) -> JsonObject:
    row: JsonObject = dict.fromkeys(("step", "total", "loss", "accuracy", "held_out"))
    problems = []
    for read in (_newest_numbers, _model_and_loss):
        try:
            row |= read(path)
        except FolderProblem as problem:
            problems.append(str(problem))
    row |= {name.removesuffix(".jsonl"): len(_events(path / name)[0]) for name in EVENTS[:2]}
    start: JsonObject = {}
    with suppress(OSError, IndexError):
        start = newest_records(path / STARTS)[0][0]
    row["total"] = _number(start, "total_steps")
    row |= _times(path, start)
    return row | {"problem": "; ".join(problems)}


def _times(path: Path, start: JsonObject) -> JsonObject:
    """Return when the last start began, its seconds, and when it last wrote, by its own records.

    Files that were copied have other dates. A report with no more steps than the run started from
    is of the start before.
    """
    report = read_object(path / RUN_REPORT)
    seconds = _number(report, "seconds")
    if (_number(start, "step") or 0) >= (_number(report, "steps") or 1):
        seconds = None
    began = None
    with suppress(TypeError, ValueError):
        began = datetime.fromisoformat(start["time"]).timestamp() if "time" in start else None
    changed = began + (seconds or 0.0) if began else None
    return {"began": began, "seconds": seconds, "changed": changed}


def _events(file: Path) -> tuple[list[JsonObject], int]:
    """Return the records of a file and its damaged lines; one that is too large is damaged."""
    size = stamp(file)
    return ([], 1) if size and size[0] > MOST_EVENTS else read_lines(file)


def _newest_numbers(path: Path) -> JsonObject:
    try:
        records, damaged = newest_records(path / METRICS)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FolderProblem(f"{METRICS} cannot be read ({error.strerror})") from error
    if damaged:
        raise FolderProblem(f"{METRICS}: {damaged} of its last lines are damaged")
    trained = next((record for record in records if "loss" in record), {})
    held_out = next((record for record in records if "eval/loss" in record), {})
    step = _number(records[0], "step") if records else None
    return {
        "step": step if isinstance(step, int) else None,
        "loss": _number(trained, "loss"),
        "accuracy": _number(trained, "rewards/accuracies"),
        "held_out": _number(held_out, "eval/rewards/accuracies"),
    }


def _number(record: JsonObject, name: str) -> float | None:
    number = record.get(name)
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


def _model_and_loss(path: Path) -> JsonObject:
    """Parse only the lines of these keys: all of 200 configs would take seconds."""
    text = _config_text(path)
    settings = _settings("".join(f"{block}\n" for block in LISTED.findall(text)))
    model = settings.get("pretrain")
    if model is None:
        model = _settings(text).get("actor_train.model_args.model_name_or_path")
    loss = settings.get("loss_type")
    if not loss:
        loss = "ipo" if settings.get("ipo") else settings.get("pref_loss")
    names = loss if isinstance(loss, list) else [loss or ""]
    return {"model": str(model or ""), "loss_type": " + ".join(map(str, names))}


def _state(path: Path, row: JsonObject) -> str:
    """running: its lock is held; ended: it exported a model; stopped: can be resumed; or failed.

    unknown since ...: a process on another machine may hold its lock.
    """
    activity = control.activity(path)
    if activity == "running":
        return activity
    if row["problem"]:
        return "damaged"
    if (path / FINISHED).exists():
        return "ended"
    if activity:
        return activity
    saved = control.latest(path)
    return "stopped" if saved and saved[0] >= (row["step"] or 0) else "failed"


# --- config ---


def read_config(path: Path) -> JsonObject:
    """Return every key, such as actor_train.data_args.file_name, with its value."""
    return _settings(_config_text(path))


def _config_text(path: Path) -> str:
    try:
        return yaml_text(path / CONFIG, own)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise FolderProblem(f"{CONFIG} cannot be read as text") from error


def _settings(text: str) -> JsonObject:
    try:
        settings = parse_yaml(text) if text else {}
    except ValueError as error:
        raise FolderProblem(f"{CONFIG} is not YAML ({error})") from error
    if not isinstance(settings, dict):
        raise FolderProblem(f"{CONFIG} contains no settings")
    return flatten(settings)


def differences(configs: Sequence[JsonObject]) -> list[tuple[str, list[str | None]]]:
    """Return each key on which configs differ, with its value in each; None if it is not set.

    A missing key and null are the same, and so are two spellings of a number, as 1e-4 and 0.0001.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [_value_text(config.get(key)) for config in configs]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _value_text(value: Any) -> str | None:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=str)
