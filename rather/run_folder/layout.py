"""The run folder: what lies in it, which checkpoint goes on, whose it is, and what starting anew may delete."""

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
PLAN = "plan.json"  # the forecast, and what was measured beside it
DATA_REPORT = "data_report.json"
TRACE = "trace.json"
STARTS = "starts.jsonl"
REPORT_PAGE = "report.html"
FINISHED = ".finished"  # tells the step of the exported model: written after the export, removed before training
OWN_NAMES = (
    "metrics.jsonl", "config.yaml", DATA_REPORT, "checkpoint-*", ".tmp-*", ".old-*", ".pieces-*", "LATEST",
    "model", "best_model", "adapter", "best_adapter", REFERENCE_LOG, RUN_REPORT, TRACE, TRACKER_IDS, FINISHED,
    "incidents.jsonl", PLAN, STARTS, REPORT_PAGE, "health.jsonl", "answers.jsonl",
)  # fmt: skip


def checkpoint_to_resume(config: DPOConfig) -> Checkpoint | None:
    """The checkpoint that this run continues, or None for a fresh start, as resume_from_checkpoint says."""
    wanted, run_dir = config.resume_from_checkpoint, config.run_dir
    if config.overwrite:
        _clear(run_dir)
        return None
    if wanted is False:
        if any(
            path.name != DATA_REPORT for path in _own_files(run_dir)
        ):  # refused data leaves that too
            raise ConfigError(
                f"resume_from_checkpoint: false, but {run_dir} holds a run. Go on with it (auto, or the path of a "
                "checkpoint), choose another exp_name, or start anew with --overwrite."
            )
        return None
    full = config.checkpoint_config.verify == "full"
    if wanted is True or wanted == "auto":
        newest = checkpoint.newest_good(run_dir, full=full)
    else:
        newest = checkpoint.open_checkpoint(Path(wanted).expanduser(), full=full)
    if newest and not full:
        log.warning(
            "checkpoint_config.verify: size: of %s only names, sizes and state are verified",
            newest.path,
        )
    return newest


def named_checkpoint(config: DPOConfig) -> Path | None:
    """The one that the config goes on from by its path."""
    given = config.resume_from_checkpoint
    return (
        Path(given).expanduser().resolve() if isinstance(given, str) and given != "auto" else None
    )


def metrics_position(config: DPOConfig, newest: Checkpoint | None) -> int:
    """How much of metrics.jsonl the checkpoint stands for. A checkpoint of another run brings no lines along."""
    if newest is None or not _is_of(config, newest):
        return 0
    return int(newest.state["metrics_bytes"])


def _is_of(config: DPOConfig, newest: Checkpoint) -> bool:
    """Whether a checkpoint stands for the lines that lie in this run's folder, where its copy may have come alone."""
    folder, file = newest.path.parent.resolve(), config.run_dir / "metrics.jsonl"
    if folder == config.run_dir.resolve():
        return True
    if folder != config.checkpoint_copy_dir.resolve() or not file.exists():
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return bool(json.loads(lines.readline())["step"] <= newest.step)
    except (ValueError, KeyError, TypeError):  # no line of ours
        return False


def reference_log(config: DPOConfig, newest: Checkpoint | None) -> Path:
    """Where the run keeps the reference log-probs it used: begun anew with it, gone on with from a checkpoint.

    A checkpoint of another run comes with the values that lie beside it.
    """
    file = config.run_dir / REFERENCE_LOG
    if newest is None:
        file.unlink(missing_ok=True)
    elif (
        beside := newest.path.parent / REFERENCE_LOG
    ).exists() and beside.resolve() != file.resolve():
        shutil.copyfile(beside, file)
    return file


def trace_file(config: DPOConfig, newest: Checkpoint | None) -> Path | None:
    """Where the run draws its timeline, if it is asked to: begun anew with it, gone on with from a checkpoint."""
    if not config.trace:
        return None
    file = config.run_dir / TRACE
    if newest is None:
        file.unlink(missing_ok=True)
    return file


def write_run_files(config: DPOConfig, data_report: Mapping[str, Any]) -> None:
    resumable = config.model_copy(
        update={"overwrite": False}
    )  # trained by this file, the run goes on
    try:
        (config.run_dir / "config.yaml").write_text(dump_yaml(resumable), encoding="utf-8")
        write_data_report(config.run_dir, data_report)
    except OSError as error:
        raise DiskError(
            f"{error.filename or config.run_dir}: cannot be written ({error.strerror})."
        ) from error


def write_data_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Also of data that was refused."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json(run_dir / DATA_REPORT, report)


def write_run_report(run_dir: Path, report: Mapping[str, Any], name: str = RUN_REPORT) -> None:
    """Nothing relies on it: a full disk costs the report, not the run."""
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
    """Removes what a run writes, and nothing else that may lie in the folder."""
    for path in _own_files(run_dir):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
