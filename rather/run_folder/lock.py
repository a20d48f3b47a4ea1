"""Where a run may write: a real, writable folder that is empty or belongs to the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rather.config.schema import DPOConfig
from rather.errors import ConfigError
from rather.run_folder import control
from rather.run_folder.layout import OWN_NAMES

log = logging.getLogger(__name__)

LOGS = ("*.log", "events.out.*")  # in the run folder if logging_dir and output_dir are the same
MOUNTS = Path("/proc/self/mounts")


@contextmanager
def locked(config: DPOConfig, *, is_main: bool = True) -> Iterator[None]:
    """Hold the run folder: no second run can start there, and other shells can reach this one."""
    claim(config)
    with control.lock(config.run_dir) if is_main else nullcontext():
        yield


def claim(config: DPOConfig) -> None:
    """Create the run folder, or explain why this run cannot use it."""
    run_dir = config.run_dir
    if run_dir.is_symlink():
        raise ConfigError(
            f"output_dir/exp_name: {run_dir} is a symbolic link; use the folder it points to"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir: {run_dir} cannot be created ({error.strerror}); choose another folder"
        ) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir: {run_dir} is not writable; choose another one or change its permissions"
        )
    if others := _other_files(config):
        raise ConfigError(
            f"output_dir/exp_name: {run_dir} is not a run folder, it contains "
            f"{', '.join(others[:5])}; choose another exp_name, or use "
            "--overwrite, which removes only files of runs"
        )
    if _file_system(run_dir) in ("tmpfs", "ramfs"):
        log.warning("output_dir: %s is in memory, not on a disk: it is lost on a restart", run_dir)


def _other_files(config: DPOConfig) -> list[str]:
    """Return what is in a folder that no run has used yet, except log files."""
    run_dir, logs = config.run_dir, [config.log_dir.absolute(), config.tracker_dir.absolute()]
    if config.overwrite or any(any(run_dir.glob(name)) for name in OWN_NAMES):
        return []
    ours = {path.name for pattern in LOGS for path in run_dir.glob(pattern)}
    ours |= {
        path.name
        for path in run_dir.iterdir()
        if any(path.absolute() in (log, *log.parents) for log in logs)
    }
    return sorted(
        path.name
        for path in run_dir.iterdir()
        if not path.name.startswith(".") and path.name not in ours
    )


def _file_system(folder: Path) -> str | None:
    """Return the file system of the deepest mount above the folder; None if it is unknown."""
    try:
        mounts = [line.split()[1:3] for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    above = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    # Of two mounts at one place the later one counts.
    kinds = {place: kind for place, kind in mounts if place in above}
    return kinds[max(kinds, key=len)] if kinds else None
