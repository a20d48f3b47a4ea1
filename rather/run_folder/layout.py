"""The run folder: its files, which checkpoint to resume, and what --overwrite may delete."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.config.load import dump_yaml
from rather.config.schema import DPOConfig
from rather.errors import ConfigError, DiskError
from rather.tracking.json_lines import strict_json
from rather.tracking.trackers import TRACKER_IDS

log = logging.getLogger(__name__)

REFERENCE_LOG = "reference.log"  # the reference log-probs that the run used
RUN_REPORT = "report.json"
PLAN = "plan.json"  # the forecast next to the measurements
DATA_REPORT = "data_report.json"
TRACE = "trace.json"
STARTS = "starts.jsonl"
REPORT_PAGE = "report.html"
# The step of the exported model: written after the export, removed before training.
FINISHED = ".finished"
OWN_NAMES = (
    "metrics.jsonl", "config.yaml", DATA_REPORT, "checkpoint-*", ".tmp-*", ".old-*", ".pieces-*",
    "LATEST", "model", "best_model", "adapter", "best_adapter", REFERENCE_LOG, RUN_REPORT, TRACE,
    TRACKER_IDS, FINISHED, "incidents.jsonl", PLAN, STARTS, REPORT_PAGE,
    "health.jsonl", "answers.jsonl",
)  # fmt: skip


def checkpoint_to_resume(config: DPOConfig) -> Checkpoint | None:
    """Return the checkpoint to resume according to resume_from_checkpoint; None for a new run."""
    wanted, run_dir = config.resume_from_checkpoint, config.run_dir
    if config.overwrite:
        _clear(run_dir)
        return None
    if wanted is False:
        # Data that was refused leaves a data report.
        if any(path.name != DATA_REPORT for path in _own_files(run_dir)):
            raise ConfigError(
                f"resume_from_checkpoint: false, but {run_dir} contains a run. Resume it (auto, or "
                "the path of a checkpoint), choose another exp_name, or start from scratch with "
                "--overwrite."
            )
        return None
    full = config.checkpoint_config.verify == "full"
    if wanted is True or wanted == "auto":
        newest = checkpoint.newest_good(run_dir, full=full)
    else:
        newest = checkpoint.open_checkpoint(Path(wanted).expanduser(), full=full)
    if newest and not full:
        log.warning(
            "checkpoint_config.verify: size: only names, sizes and state of %s are verified",
            newest.path,
        )
    return newest


def named_checkpoint(config: DPOConfig) -> Path | None:
    """Return the checkpoint whose path resume_from_checkpoint gives."""
    given = config.resume_from_checkpoint
    return (
        Path(given).expanduser().resolve() if isinstance(given, str) and given != "auto" else None
    )


def metrics_position(config: DPOConfig, newest: Checkpoint | None) -> int:
    """Return the bytes of metrics.jsonl at the checkpoint; 0 for a checkpoint of another run."""
    if newest is None or not _is_of(config, newest):
        return 0
    return int(newest.state["metrics_bytes"])


def _is_of(config: DPOConfig, newest: Checkpoint) -> bool:
    """Return whether a checkpoint, or its copy elsewhere, belongs to this folder's metrics."""
    folder, file = newest.path.parent.resolve(), config.run_dir / "metrics.jsonl"
    if folder == config.run_dir.resolve():
        return True
    if folder != config.checkpoint_copy_dir.resolve() or not file.exists():
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return bool(json.loads(lines.readline())["step"] <= newest.step)
    except (ValueError, KeyError, TypeError):  # not a line that Rather wrote
        return False


def reference_log(config: DPOConfig, newest: Checkpoint | None) -> Path:
    """Return the log of the reference log-probs that the run used; a new run starts a new one.

    A checkpoint of another run brings the log next to it.
    """
    file = config.run_dir / REFERENCE_LOG
    if newest is None:
        file.unlink(missing_ok=True)
        return file
    other = newest.path.parent / REFERENCE_LOG
    if other.exists() and other.resolve() != file.resolve():
        shutil.copyfile(other, file)
    return file


def trace_file(config: DPOConfig, newest: Checkpoint | None) -> Path | None:
    """Return the file of the timeline, if `trace` is set; a new run starts a new one."""
    if not config.trace:
        return None
    file = config.run_dir / TRACE
    if newest is None:
        file.unlink(missing_ok=True)
    return file


def write_run_files(config: DPOConfig, data_report: Mapping[str, Any]) -> None:
    resumable = config.model_copy(update={"overwrite": False})  # training with this file resumes
    try:
        (config.run_dir / "config.yaml").write_text(dump_yaml(resumable), encoding="utf-8")
        write_data_report(config.run_dir, data_report)
    except OSError as error:
        raise DiskError(
            f"{error.filename or config.run_dir}: cannot be written ({error.strerror})."
        ) from error


def write_data_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Write the data report, also of data that was refused."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json(run_dir / DATA_REPORT, report)


def write_run_report(run_dir: Path, report: Mapping[str, Any], name: str = RUN_REPORT) -> None:
    """Write a report; nothing depends on it, so a full disk loses the report, not the run."""
    try:
        _write_json(run_dir / name, report)
    except OSError as error:
        log.warning("%s: cannot be written (%s)", run_dir / name, error.strerror)


def mark_unfinished(run_dir: Path) -> None:
    (run_dir / FINISHED).unlink(missing_ok=True)


def mark_finished(run_dir: Path, step: int) -> None:
    (run_dir / FINISHED).write_text(f"{step}\n", encoding="utf-8")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(strict_json(value, indent=1) + "\n", encoding="utf-8")


def _own_files(run_dir: Path) -> list[Path]:
    return [path for pattern in OWN_NAMES for path in run_dir.glob(pattern)]


def _clear(run_dir: Path) -> None:
    """Remove what a run writes, and nothing else."""
    for path in _own_files(run_dir):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
