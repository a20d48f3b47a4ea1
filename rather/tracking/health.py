"""The health watch: looks at each record of metrics.jsonl once and reports each finding once.

A resumed run looks at its records again, so a checkpoint needs nothing of this.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rather.tracking.health_rules import RULES, MetricsHistory, Severity
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

HEALTH = "health.jsonl"
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class HealthFinding:
    """One line of health.jsonl."""

    step: int
    name: str
    severity: Severity
    text: str
    number: float
    advice: str


class Health:
    """Applies the rules to the records of a run."""

    def __init__(self, total_steps: int, known: Iterable[str] = ()) -> None:
        self.history, self.known = MetricsHistory(total_steps), set(known)

    def look(self, record: Mapping[str, Any]) -> list[HealthFinding]:
        """Return what this record shows for the first time."""
        self.history.add(record)
        found = []
        for name, rule in RULES.items():
            if name not in self.known and (verdict := rule.find(self.history)):
                self.known.add(name)
                number, text, advice = verdict
                step = self.history.step
                found.append(HealthFinding(step, name, rule.severity, text, number, advice))
        return found


class HealthWatch:
    """A tracker that writes health.jsonl, from a run that has done `start_step` steps on."""

    def __init__(self, run_dir: Path, total_steps: int, start_step: int) -> None:
        self.file = run_dir / HEALTH
        before = read_findings(run_dir) if start_step else []
        kept = [one for one in before if one.step <= start_step]
        self.health = Health(total_steps, (one.name for one in kept))
        kept += [one for one in data_findings(run_dir) if one.name not in self.health.known]
        # Do not log again what the log has already: findings after the checkpoint come back, and
        # those of the data are in the data report.
        self.logged = {one.name for one in before + kept}
        self.file.unlink(missing_ok=True)
        self._write(kept)
        for record in _records(run_dir / "metrics.jsonl"):
            self.log(0, record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        found = self.health.look(metrics)
        self._write(found)
        for one in found:
            if one.name not in self.logged:
                level = logging.INFO if one.severity == "info" else logging.WARNING
                log.log(level, "health, step %d: %s %s", one.step, one.text, one.advice)
        self.logged |= {one.name for one in found}

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: every line is in the file already."""

    def _write(self, findings: list[HealthFinding]) -> None:
        if findings:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(strict_json(asdict(one)) + "\n" for one in findings)


def read_findings(run_dir: Path) -> list[HealthFinding]:
    """Return the lines of health.jsonl, without damaged lines and those of other versions."""
    names = HealthFinding.__dataclass_fields__.keys()
    records = _records(run_dir / HEALTH)
    return [HealthFinding(**fields) for fields in records if fields.keys() == names]


def counts(run_dir: Path) -> dict[str, int]:
    """Return the number of findings by severity."""
    found = [one.severity for one in read_findings(run_dir)]
    return {severity: found.count(severity) for severity in SEVERITIES}


def data_findings(run_dir: Path) -> Iterator[HealthFinding]:
    """Yield the problems that were found in the pairs before the run, without mere information."""
    try:
        report = json.loads((run_dir / "data_report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for one in report.get("look", {}).get("findings", ()):
        if one["severity"] != "info":
            place = "data" if one["set"] == "train" else f"data/{one['set']}"
            fields = {name: one[name] for name in ("severity", "text", "advice")}
            yield HealthFinding(0, f"{place}/{one['name']}", number=float(one["number"]), **fields)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file up to a line, or a character, that a kill has cut."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            return
        if isinstance(fields, dict):
            yield fields
