"""The runs under a folder: what the list shows of each, its curves, its findings, and in what its config differs."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import yaml

from rather.board.tail_jsonl import Curves, Record, newest_records, records
from rather.report import thinned
from rather.run_folder import control

METRICS, CONFIG, REPORT = "metrics.jsonl", "config.yaml", "report.html"
FINISHED, RUN_REPORT, STARTS = (
    ".finished",
    "report.json",
    "starts.jsonl",
)  # rather.run_folder.layout's: torch is behind it
STORIES = ("incidents.jsonl", "health.jsonl", "answers.jsonl")
MARKS = {
    METRICS,
    control.LOCK,
    FINISHED,
    "LATEST",
    "data_report.json",
}  # one of them makes a folder that of a run
DEPTH = 4  # folders between the one that is named and a run
LISTED = re.compile(r"^(?:pretrain|pref_loss|loss_type|ipo):.*(?:\n[ -].*)*", re.MULTILINE)
LARGEST_CONFIG = 1 << 20  # bytes, as of a config that is loaded
POINTS = 1000  # of a line that is drawn
MOST_KEPT = 20_000_000  # points of all runs in memory, 16 bytes each
LAST_STORIES = 500  # lines shown of each kind


class Problem(Exception):
    """A file that cannot be read as what it should be; told as one sentence."""


@dataclass
class Summary:
    """What the list shows of one run, as of the stamps of its files."""

    stamps: tuple[Any, ...] = ()
    row: dict[str, Any] = field(default_factory=dict)


class Story(NamedTuple):
    lines: list[Record]
    damaged: int
    left_out: int


class Runs:
    """Of all runs under a folder. A run is known by its id: what a request says never becomes a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Path] = {}
        self._summaries: dict[str, Summary] = {}
        self._curves: OrderedDict[str, Curves] = OrderedDict()
        self._turn = Lock()

    def rows(self) -> list[dict[str, Any]]:
        """All runs as they are now, by name."""
        with self._turn:
            self._found = {run_id(self.folder, path): path for path in find_runs(self.folder)}
            return [self._row(run, path) for run, path in self._found.items()]

    def path(self, run: str) -> Path | None:
        if run not in self._found:
            self.rows()
        return self._found.get(run)

    def _row(self, run: str, path: Path) -> dict[str, Any]:
        summary = self._summaries.setdefault(run, Summary())
        stamps = tuple(
            _stamp(path / name) for name in (METRICS, RUN_REPORT, STARTS, CONFIG, *STORIES)
        )
        if stamps != summary.stamps:
            summary.stamps, summary.row = stamps, _row_of(path)
        holder = control.holder(path)
        name = path.relative_to(self.folder).as_posix() if path != self.folder else path.name
        row = {
            "id": run,
            "name": name,
            **summary.row,
            "state": _state(path, summary.row, running=holder is not None),
        }
        row["report"] = (path / REPORT).is_file()
        # A line of metrics changes the first alone: what people are reading of the run stays as it is.
        row["version"] = _digest(stamps, row["state"])
        row["story"] = _digest(stamps[3:], row["state"], row["report"])
        return row

    # --- one run ---

    def curves(
        self, run: str, path: Path, metrics: Sequence[str], points: int = POINTS
    ) -> dict[str, Any]:
        """The asked metrics, long lines thinned, and the names of all there are."""
        known = self._kept(run, path)
        with known.turn:
            known.update()
            drawn = {metric: known.lines(metric) for metric in metrics}
            lines = {
                metric: {
                    name: thinned(column.steps, column.values, points)
                    for name, column in found.items()
                }
                for metric, found in drawn.items()
            }
            names = sorted(name for name in known.columns if not name.startswith("eval/"))
            return {"lines": lines, "metrics": names, "damaged": known.file.damaged}

    def _kept(self, run: str, path: Path) -> Curves:
        """The columns of a run; those that nobody has asked for longest are given up where there are too many."""
        with self._turn:
            known = self._curves.setdefault(run, Curves(path / METRICS))
            self._curves.move_to_end(run)
            while (
                len(self._curves) > 1
                and sum(each.points for each in self._curves.values()) > MOST_KEPT
            ):
                self._curves.popitem(last=False)
            return known

    def details(self, path: Path) -> dict[str, Any]:
        """What a run tells besides numbers: incidents, findings, answers, and what is wrong with its folder."""
        problems = []
        told: dict[str, Any] = {"folder": str(path), "config": {}}
        try:
            told["config"] = read_config(path)
        except Problem as problem:
            problems.append(str(problem))
        for name in STORIES:
            story = _story(path / name)
            told[name.removesuffix(".jsonl")] = story._asdict()
            if story.damaged:
                problems.append(f"{name}: {story.damaged} lines are damaged and left out")
        return {**told, "problems": problems}


def find_runs(folder: Path) -> list[Path]:
    """Run folders, at most DEPTH deep and not inside each other; links are not followed."""
    return sorted(_runs_in(folder, DEPTH))


def _runs_in(folder: Path, deep: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return
    marks = MARKS & {name for name, _ in inside}
    within: list[Path] = []
    if deep and marks <= {
        control.LOCK
    }:  # of a run that has just begun, or of a sweep, whose runs lie in it
        folders = [name for name, is_folder in inside if is_folder and not name.startswith(".")]
        within = [run for name in folders for run in _runs_in(folder / name, deep - 1)]
    yield from within or ([folder] if marks else [])


def run_id(folder: Path, path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path.relative_to(folder)), digest_size=6).hexdigest()


# --- the line of a run in the list ---


def _digest(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _stamp(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    return None


def _row_of(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("step", "total", "loss", "accuracy", "held_out"))
    problems = []
    try:
        row |= _newest_numbers(path / METRICS)
    except Problem as problem:
        problems.append(str(problem))
    try:
        row |= _listed_settings(path)
    except Problem as problem:
        problems.append(str(problem))
    row |= {name.removesuffix(".jsonl"): len(records(path / name)[0]) for name in STORIES[:2]}
    with suppress(OSError):
        starts, _ = newest_records(path / STARTS)
        row["total"] = _number(starts[0].get("total_steps")) if starts else None
    return row | _times(path) | {"problem": "; ".join(problems)}


def _newest_numbers(file: Path) -> dict[str, Any]:
    try:
        found, damaged = newest_records(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Problem(f"{file.name} cannot be read ({error.strerror})") from error
    if damaged:
        raise Problem(f"{file.name}: {damaged} of its last lines are damaged")
    trained = next((record for record in found if "loss" in record), {})
    held_out = next((record for record in found if "eval/loss" in record), {})
    steps = [record["step"] for record in found[:1] if isinstance(record.get("step"), int)]
    return {
        "step": steps[0] if steps else None,
        "loss": _number(trained.get("loss")),
        "accuracy": _number(trained.get("rewards/accuracies")),
        "held_out": _number(held_out.get("eval/rewards/accuracies")),
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _listed_settings(path: Path) -> dict[str, Any]:
    """Model and loss. Only their lines are read as YAML: all of 200 configs would take seconds."""
    text = _config_text(path)
    if text is None:
        return {"model": "", "loss_type": ""}
    found: dict[str, Any] = {}
    for block in LISTED.findall(text):
        found |= _mapping(block)
    model = found.get("pretrain")
    if model is None:
        model = flat(_mapping(text)).get("actor_train.model_args.model_name_or_path")
    loss = found.get("loss_type") or ("ipo" if found.get("ipo") else found.get("pref_loss"))
    named = loss if isinstance(loss, list) else [loss or ""]
    return {"model": str(model or ""), "loss_type": " + ".join(map(str, named))}


def _times(path: Path) -> dict[str, Any]:
    """When the run last wrote a line, and for how long its last start has been going or went."""
    last, began = _stamp(path / METRICS), _stamp(path / CONFIG)
    seconds = (last[1] - began[1]) / 1e9 if last and began else None
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        report = path / RUN_REPORT
        if not began or report.stat().st_mtime_ns >= began[1]:  # else of the start before
            told = _number(json.loads(report.read_text(encoding="utf-8"))["seconds"])
            seconds = max(told or 0.0, seconds or 0.0)
    return {
        "changed": last[1] / 1e9 if last else None,
        "seconds": seconds if seconds and seconds > 0 else None,
    }


def _state(path: Path, row: Mapping[str, Any], *, running: bool) -> str:
    """running: a process holds its lock. ended: it left a model. stopped: saved, to go on. failed: neither."""
    if running:
        return "running"
    if row["problem"]:
        return "damaged"
    if (path / FINISHED).exists():
        return "ended"
    saved = control.latest(path)
    return "stopped" if saved and saved.step >= (row["step"] or 0) else "failed"


# --- config ---


def read_config(path: Path) -> dict[str, Any]:
    """Every key, such as actor_train.data_args.file_name, with its value."""
    text = _config_text(path)
    return {} if text is None else flat(_mapping(text))


def _config_text(path: Path) -> str | None:
    file = path / CONFIG
    try:
        if file.stat().st_size > LARGEST_CONFIG:
            raise Problem(f"{CONFIG} is larger than a config can be")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Problem(f"{CONFIG} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Problem(f"{CONFIG} is not text") from error


def _mapping(text: str) -> dict[str, Any]:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise Problem(
                f"{CONFIG} has aliases, which no run writes"
            )  # they can unfold to billions of values
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Problem(f"{CONFIG} is not YAML") from error
    if not isinstance(found, dict):
        raise Problem(f"{CONFIG} holds no settings")
    return found


def flat(values: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Each key on which configs differ, with the value in each; None where one does not have it."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    found = [
        (key, [_shown(config[key]) if key in config else None for config in configs])
        for key in keys
    ]
    return [(key, values) for key, values in found if len(set(values)) > 1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _story(file: Path) -> Story:
    lines, damaged = records(file)
    return Story(lines[-LAST_STORIES:], damaged, max(0, len(lines) - LAST_STORIES))
