"""The names of the files in a run folder. Imports no torch: the board reads folders without it."""

from __future__ import annotations

from pathlib import Path

from rather.errors import ConfigError

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
STARTS = "starts.jsonl"
INCIDENTS = "incidents.jsonl"
HEALTH = "health.jsonl"
ANSWERS = "answers.jsonl"
REFERENCE_LOG = "reference.log"  # the reference log-probs that the run used
RUN_REPORT = "report.json"
DATA_REPORT = "data_report.json"
PLAN = "plan.json"  # the forecast next to the measurements
REPORT_PAGE = "report.html"
# The step of the exported model: written after the export, removed before training.
FINISHED = ".finished"


def refuse_other_folder(path: Path) -> None:
    """Raise unless a folder is one of a run; name the runs in it."""
    if not (path / METRICS).is_file():
        runs = [str(file.parent) for file in sorted(path.glob(f"*/{METRICS}"))[:3]]
        hint = " or ".join(runs) or "<output_dir>/<exp_name>"
        raise ConfigError(f"{path}: not a run folder ({METRICS} is missing); give {hint}.")
