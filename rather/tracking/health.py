"""The watch over a run: each record of metrics.jsonl is looked at once, each finding is told once.

A run that goes on looks at its records again, so that nothing of this has to be in a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rather.tracking.health_history import History
from rather.tracking.health_rules import RULES, Severity
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

HEALTH = "health.jsonl"
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One line of health.jsonl."""

    step: int
    name: str
    severity: Severity
    text: str
    number: float
    advice: str


class Health:
    """What is found in a run, by what it has told so far."""

    def __init__(self, total_steps: int, known: Iterable[str] = ()) -> None:
        self.history, self.known = History(total_steps), set(known)

    def look(self, record: Mapping[str, Any]) -> list[Finding]:
        """What this record shows for the first time."""
        self.history.add(record)
        found = []
        for name, rule in RULES.items():
            if name not in self.known and (told := rule.find(self.history)):
                self.known.add(name)
                found.append(
                    Finding(
                        self.history.step, name, rule.severity, told.text, told.number, told.advice
                    )
                )
        return found


class Watch:
    """A tracker: writes health.jsonl in the folder of a run that has done `start_step` steps."""

    def __init__(self, run_dir: Path, total_steps: int, start_step: int) -> None:
        self.file = run_dir / HEALTH
        before = read_findings(run_dir) if start_step else []
        self.told = {
            one.name for one in before
        }  # also what comes again, because it was found after the checkpoint
        kept = [one for one in before if one.step <= start_step]
        self.health = Health(total_steps, (one.name for one in kept))
        kept += [one for one in data_findings(run_dir) if one.name not in self.health.known]
        self.told |= {one.name for one in kept}  # those of the data are in the report of the data
        self._write(kept, mode="w") if kept else self.file.unlink(missing_ok=True)
        for record in _records(run_dir / "metrics.jsonl"):
            self._tell(self.health.look(record))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._tell(self.health.look(metrics))

    def close(self, *, failed: bool = False) -> None:
        """Every line is in the file already."""

    def _tell(self, found: list[Finding]) -> None:
        if not found:
            return
        self._write(found, mode="a")
        for one in found:
            if one.name not in self.told:
                level = logging.INFO if one.severity == "info" else logging.WARNING
                log.log(level, "health, step %d: %s %s", one.step, one.text, one.advice)
            self.told.add(one.name)

    def _write(self, findings: list[Finding], *, mode: str) -> None:
        with self.file.open(mode, encoding="utf-8") as file:
            file.writelines(strict_json(asdict(one)) + "\n" for one in findings)


def read_findings(run_dir: Path) -> list[Finding]:
    """Those of health.jsonl; of a line that a kill has torn, or another version wrote, nothing."""
    names = set(Finding.__dataclass_fields__)
    return [Finding(**fields) for fields in _records(run_dir / HEALTH) if fields.keys() == names]


def counts(run_dir: Path) -> dict[str, int]:
    """Findings of a run by severity, for its report."""
    found = [one.severity for one in read_findings(run_dir)]
    return {severity: found.count(severity) for severity in SEVERITIES}


def data_findings(run_dir: Path) -> Iterator[Finding]:
    """What was found in the pairs before the run, and is worth a warning."""
    try:
        report = json.loads((run_dir / "data_report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for one in report.get("look", {}).get("findings", ()):
        if one["severity"] != "info":
            place = "data" if one["set"] == "train" else f"data/{one['set']}"
            text, advice = one["text"], one["advice"]
            yield Finding(
                0, f"{place}/{one['name']}", one["severity"], text, float(one["number"]), advice
            )


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(
            encoding="utf-8", errors="replace"
        ).splitlines()  # a kill may tear a letter, too
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            return
        if isinstance(fields, dict):
            yield fields
