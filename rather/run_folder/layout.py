"""The run folder: who may use it, its files, what is resumed, and what --overwrite deletes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.config.found import signed
from rather.config.redaction import redact
from rather.config.run_config import DPOConfig
from rather.errors import CheckpointError, ConfigError, DiskError
from rather.files import make_folder, own, parse_json, real_path, replace_own, write_own
from rather.run_folder import control
from rather.run_folder.names import (
    ANSWERS,
    CONFIG,
    DATA_REPORT,
    FINISHED,
    HEALTH,
    INCIDENTS,
    METRICS,
    PLAN,
    REFERENCE_LOG,
    REPORT_PAGE,
    RUN_REPORT,
    STARTS,
)  # fmt: skip
from rather.tracking.json_lines import (
    LEDGER,
    LONGEST_LINE,
    LOST_LEDGER,
    LOST_METRICS,
    MetricsPosition,
    append_line,
    strict_json,
)
from rather.tracking.trackers import TRACKER_IDS

log = logging.getLogger(__name__)

OWN_FILES = (
    METRICS, CONFIG, DATA_REPORT, "LATEST", REFERENCE_LOG, RUN_REPORT,
    TRACKER_IDS, FINISHED, INCIDENTS, PLAN, STARTS, REPORT_PAGE, HEALTH, ANSWERS,
    LOST_METRICS, LEDGER, LOST_LEDGER, "pairs.json", "trace.json",  # the last: of earlier versions
)  # fmt: skip
RESULTS = ("model", "best_model", "adapter", "best_adapter")
OWN_NAMES = (*OWN_FILES, *RESULTS, "checkpoint-*", ".tmp-*", ".old-*", ".pieces-*")
STORED_FILES = tuple(name for name in OWN_FILES if name not in ("LATEST", FINISHED))
LOGS = ("*.log", "events.out.*")  # in the run folder if logging_dir and output_dir are the same
MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and what the config says about resuming from it."""

    path: Path
    copies: Path  # where checkpoints are copied to; the same folder if they are not
    log_dirs: tuple[Path, ...]
    overwrite: bool
    resumes: bool
    named: Path | None  # the checkpoint that resume_from_checkpoint names
    verifies_bytes: bool

    @staticmethod
    def of(config: DPOConfig) -> RunFolder:
        resume, named = config.resume_from_checkpoint, None
        if isinstance(resume, str) and resume != "auto":
            named = real_path(Path(resume).expanduser())
        return RunFolder(
            config.run_dir,
            config.checkpoint_copy_dir,
            (config.log_dir, config.tracker_dir),
            config.overwrite,
            resume is not False,
            named,
            config.checkpoint_config.verify == "full",
        )

    @contextmanager
    def locked(self, *, is_main: bool = True) -> Iterator[None]:
        """Hold the folder: no second run can start there, and other shells can reach this one."""
        self.claim()
        with control.lock(self.path) if is_main else nullcontext():
            yield

    def claim(self) -> None:
        """Create the folder, or explain why this run cannot use it."""
        run_dir = self.path
        if run_dir.is_symlink():
            raise ConfigError(
                f"output_dir/exp_name: {run_dir} is a symbolic link; use the folder it points to"
            )
        make_folder(run_dir, "output_dir")
        for file in (run_dir / name for name in (*OWN_FILES, control.LOCK)):
            if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
                raise ConfigError(
                    f"output_dir/exp_name: {file} is a link or not a regular file, and a run "
                    "writes to no others; remove it, or choose another exp_name"
                )
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise ConfigError(
                f"output_dir: {run_dir} is not writable; choose another one or change its "
                "permissions"
            )
        if not self.overwrite and not _own_files(run_dir) and (others := self._other_files()):
            raise ConfigError(
                f"output_dir/exp_name: {run_dir} is not a run folder, it contains "
                f"{', '.join(others[:5])}; choose another exp_name, or use "
                "--overwrite, which removes only files of runs"
            )
        if _is_in_memory(run_dir.resolve()):
            text = "output_dir: %s is in memory, not on a disk: it is lost on a restart"
            log.warning(text, run_dir)

    def _other_files(self) -> list[str]:
        """Return the names in the folder that are neither hidden nor logs."""
        log_dirs = [log_dir.absolute() for log_dir in self.log_dirs]
        holds_logs = {path for log_dir in log_dirs for path in (log_dir, *log_dir.parents)}
        return sorted(
            path.name
            for path in self.path.iterdir()
            if not any(map(path.match, (".*", *LOGS))) and path.absolute() not in holds_logs
        )

    def checkpoint_to_resume(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None for a new run."""
        own_files = _own_files(self.path)
        if self.overwrite:
            for path in own_files:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            return None
        if not self.resumes:
            # Data that was refused leaves a data report.
            if any(path.name != DATA_REPORT for path in own_files):
                raise ConfigError(
                    f"resume_from_checkpoint: false, but {self.path} contains a run. Resume it "
                    "(auto, or the path of a checkpoint), choose another exp_name, or start from "
                    "scratch with --overwrite."
                )
            return None
        full = self.verifies_bytes
        if self.named:
            newest: Checkpoint | None = checkpoint.open_checkpoint(self.named, full=full)
        else:
            newest = checkpoint.newest_good(self.path, full=full)
        if newest and not full:
            text = "checkpoint_config.verify: size: only names, sizes and state of %s are verified"
            log.warning(text, newest.path)
        return newest

    def predates_rounding(self) -> bool:
        """Return whether the run to resume is from before the key `rounding`."""
        if self.overwrite:
            return False
        for path in [self.named] if self.named else checkpoint.candidates(self.path):
            with suppress(CheckpointError):
                identity = checkpoint.open_checkpoint(path, full=False).state.get("identity")
                is_older = isinstance(identity, dict) and "rounding" not in identity
                if is_older:
                    text = "rounding: nearest, as when %s was saved; it has no such key"
                    log.info(text, path)
                return is_older
        return False

    def metrics_position(self, newest: Checkpoint | None) -> MetricsPosition:
        """Return the position in metrics.jsonl at the checkpoint; 0 for one of another run."""
        if newest is None:
            return MetricsPosition()
        folder, file = newest.path.parent.resolve(), self.path / METRICS
        is_own = folder == self.path.resolve()
        if folder == self.copies.resolve() and file.exists():
            try:  # a copy elsewhere belongs to these metrics, unless they begin later
                with open(file, "rb", opener=own) as lines:
                    first = parse_json(lines.readline(LONGEST_LINE))
                is_own = is_own or first["step"] <= newest.step
            except (ValueError, KeyError, TypeError):  # not a line that Rather wrote
                pass
        state = newest.state
        if not is_own:
            return MetricsPosition()
        return MetricsPosition(
            int(state["metrics_bytes"]),
            state.get("metrics_sha256"),
            int(state.get("ledger_bytes", 0)),
            state.get("ledger_sha256"),
        )

    def reference_log(self, newest: Checkpoint | None) -> Path:
        """Return the log of the reference log-probs that the run used; a new run starts a new one.

        A checkpoint of another run brings the log next to it.
        """
        file = self.path / REFERENCE_LOG
        if newest is None:
            file.unlink(missing_ok=True)
            return file
        other = newest.path.parent / REFERENCE_LOG
        if other.exists() and other.resolve() != file.resolve():
            with open(other, "rb", opener=own) as log_probs, open(file, "wb", opener=own) as copy:
                shutil.copyfileobj(log_probs, copy)
        return file

    def write_config(self, text: str) -> None:
        file = self.path / CONFIG
        try:
            write_own(file, signed(text))
        except OSError as error:
            raise DiskError(f"{file}: cannot be written ({error.strerror}).") from error


def with_rounding_of_run(config: DPOConfig) -> DPOConfig:
    """Return the config with `rounding: nearest` if it resumes a run from before that key."""
    if "rounding" in config.model_fields_set or not RunFolder.of(config).predates_rounding():
        return config
    return config.model_copy(update={"rounding": "nearest"})


def _is_in_memory(run_dir: Path) -> bool:
    mounts = MOUNTS.read_text(encoding="utf-8").splitlines() if MOUNTS.exists() else ()
    above = {str(path) for path in (run_dir, *run_dir.parents)}
    # Of two mounts at one place the later one counts.
    kinds = dict(line.split()[1:3] for line in mounts)
    deepest = max(above & kinds.keys(), key=len, default="")
    return kinds.get(deepest) in ("tmpfs", "ramfs")


def write_run_report(run_dir: Path, report: Mapping[str, Any], name: str = RUN_REPORT) -> None:
    """Write a report atomically; a full disk loses it, not the run, which does not need it."""
    try:
        replace_own(run_dir / name, strict_json(report, indent=1) + "\n")
    except OSError as error:
        log.warning("%s: cannot be written (%s)", run_dir / name, error.strerror)


def mark_unfinished(run_dir: Path) -> None:
    (run_dir / FINISHED).unlink(missing_ok=True)


def mark_finished(run_dir: Path, step: int) -> None:
    write_own(run_dir / FINISHED, f"{step}\n")


def _own_files(run_dir: Path) -> list[Path]:
    return [path for pattern in OWN_NAMES for path in run_dir.glob(pattern)]


class Incidents:
    """Append to the file of a run; a full disk loses the line, never the run."""

    def __init__(self, run_dir: Path, *, silent: bool = False) -> None:
        """`silent` is for drivers other than the main one, which reports the same."""
        self.file, self.silent = run_dir / INCIDENTS, silent

    def add(self, kind: str, step: int, **facts: Any) -> None:
        """Append one incident that happened in `step`.

        `kind` is nonfinite, spike, out_of_memory, missed_save, missed_upload, worker_lost,
        reference_lost, hang, rollback or damaged_checkpoint.
        """
        if self.silent:
            return
        facts = {name: redact(f) if isinstance(f, str) else f for name, f in facts.items()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"time": now, "kind": kind, "step": step, **facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.file, record)
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s: %s; incident: %s", self.file, reason, strict_json(record))
