"""The health watch: looks at each record of metrics.jsonl once and writes each finding once.

A resumed run looks at its records again, so a checkpoint needs nothing of this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rather.config.redaction import redact
from rather.tracking.health.rules import RULES, Found, Health, HealthFinding, HealthRule, Severity
from rather.tracking.json_lines import append_line, read_lines, read_object
from rather.tracking.outcome import is_unchanged, percent, skipped_text
from rather.tracking.trackers import Tracker

log = logging.getLogger(__name__)

HEALTH = "health.jsonl"
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


class HealthWatch(Tracker):
    """A tracker that writes health.jsonl, from a run that has done `start_step` steps on."""

    def __init__(
        self, run_dir: Path, total_steps: int, start_step: int, unit: str = "pairs"
    ) -> None:
        self.file = run_dir / HEALTH
        before = read_findings(run_dir) if start_step else []
        # The rules read all lines again, below: a longer run is not over where a shorter one was.
        again = {*AT_END, *RULES}
        valid = [
            finding
            for finding in before
            if finding.step <= start_step and finding.name not in again
        ]
        self.health = Health(total_steps, unit, known={finding.name for finding in valid})
        valid += [
            finding for finding in data_findings(run_dir) if finding.name not in self.health.known
        ]
        # Do not log again what the log has already: findings after the checkpoint come back, and
        # those of the data are in the data report.
        self.logged = {finding.name for finding in before + valid}
        self.file.unlink(missing_ok=True)
        for finding in valid:
            append_line(self.file, asdict(finding))
        for record in read_lines(run_dir / "metrics.jsonl")[0]:
            self.log(0, record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for finding in self.health.look(metrics):
            append_line(self.file, asdict(finding))
            if finding.name not in self.logged:
                log.warning("health, step %d: %s %s", finding.step, finding.text, finding.advice)
            self.logged.add(finding.name)

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: every line is in the file already."""


# --- the end of a run ---

SKIPPED = 0.1  # of the steps; float16 skips a few until it has found its loss scale
KEPT = 0.5  # of the update
SHRUNK = 0.1  # of the size that the weights had; a run changes it by a few percent
# Root mean square. That of real models is between 0.01 and 1; at this size no text changes the
# output by more than rounding.
NOTHING = 1e-6
AT_END = {
    "run_failed": HealthRule(
        "serious",
        "the run ended with exit code {number} (steps done: {steps}). {error}",
        "The log has the details{more}.",
    ),
    "weights_unchanged": HealthRule(
        "serious",
        "the weights did not change (updates made: {number}).",
        "Look at lr and grad_norm in the metrics: raise learning_rate or beta, shorten the warm-up.",
    ),
    "steps_skipped": HealthRule(
        "serious",
        "{skipped}.",
        "Train in bf16 or fp32 if float16 overflows{more}.",
    ),
    "weights_vanished": HealthRule(
        "serious",
        "the weights have a size of {number:.2g} (root mean square), and had {before:.2g}: the model "
        "answers the same to every text.",
        "Lower weight_decay and learning_rate (each step multiplies weights by 1 - their product); "
        "if the size was as small before, the model in pretrain is damaged.",
    ),
    "update_lost": HealthRule(
        "serious",
        "the written file keeps only {kept} of the update.",
        "Export with rounding: dithered or --dtype fp32.",
    ),
}


def record_end(run_dir: Path, outcome: Mapping[str, Any], error: Exception | None) -> None:
    """Append what is wrong with a run that has ended to health.jsonl; a resume removes it."""
    steps, skipped, kept = outcome["steps"], outcome["skipped_steps"], outcome.get("kept_share")
    facts: dict[str, Found] = {}
    if error:
        code, text = getattr(error, "exit_code", 1), redact(str(error) or type(error).__name__)
        facts["run_failed"] = {"number": code, "steps": steps, "error": text}
    elif is_unchanged(outcome):
        facts["weights_unchanged"] = {"number": outcome["updates"]}
    if not error and steps and skipped / steps >= SKIPPED:
        facts["steps_skipped"] = {"number": skipped, "skipped": skipped_text(outcome)}
    if kept is not None and kept < KEPT:
        facts["update_lost"] = {"number": kept, "kept": percent(kept)}
    size, before = outcome.get("weight_size"), outcome.get("weight_size_before", 0.0)
    if size is not None and size < max(NOTHING, SHRUNK * before):
        facts["weights_vanished"] = {"number": size, "before": before}
    has_incidents = (run_dir / "incidents.jsonl").exists()
    incidents = (
        "; incidents.jsonl describes NaN, Inf, spikes and lost workers" if has_incidents else ""
    )
    for name, values in facts.items():
        finding = AT_END[name].finding(steps, name, {**values, "more": incidents})
        if not error:  # the command prints an error itself
            log.warning("health, step %d: %s %s", finding.step, finding.text, finding.advice)
        try:
            append_line(run_dir / HEALTH, asdict(finding))
        except OSError as problem:
            log.warning("%s: %s", run_dir / HEALTH, problem.strerror)


def read_findings(run_dir: Path) -> list[HealthFinding]:
    """Return the lines of health.jsonl, without damaged lines and those of other versions."""
    names = HealthFinding.__dataclass_fields__.keys()
    records, _ = read_lines(run_dir / HEALTH)
    return [HealthFinding(**fields) for fields in records if fields.keys() == names]


def urgency(name: str, severity: str) -> tuple[int, int]:
    """Return the key that sorts findings by harm: a failed run, a bad model, then the data."""
    level = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    first = ("run_failed", "model_wrecked", "labels_reversed")
    if name in first:
        return level, first.index(name)
    return level, len(first) + name.startswith("data/")


def counts(run_dir: Path) -> dict[str, int]:
    """Return the number of findings by severity."""
    severities = [finding.severity for finding in read_findings(run_dir)]
    return {severity: severities.count(severity) for severity in SEVERITIES}


def data_findings(run_dir: Path) -> Iterator[HealthFinding]:
    """Yield the problems that were found in the pairs before the run, without mere information."""
    for finding in read_object(run_dir / "data_report.json").get("look", {}).get("findings", ()):
        if finding["severity"] != "info":
            group = "data" if finding["set"] == "train" else f"data/{finding['set']}"
            fields = {name: finding[name] for name in ("severity", "text", "advice")}
            yield HealthFinding(
                0, f"{group}/{finding['name']}", number=float(finding["number"]), **fields
            )
