"""Where a run may write: a real folder that can be written, empty or a run's own."""

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

LOGS = ("*.log", "events.out.*")  # beside the run, where logging_dir and output_dir are the same
MOUNTS = Path("/proc/self/mounts")


@contextmanager
def held(config: DPOConfig, *, leads: bool = True) -> Iterator[None]:
    """The run folder belongs to this run meanwhile: no second one begins there, and other shells can speak to it."""
    claim(config)
    with control.lock(config.run_dir) if leads else nullcontext():
        yield


def claim(config: DPOConfig) -> None:
    """Makes the run folder, or says why it cannot be this run's."""
    run_dir = config.run_dir
    if run_dir.is_symlink():
        raise ConfigError(
            f"output_dir/exp_name: {run_dir} is a symbolic link; name the folder it leads to"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir: {run_dir} cannot be made ({error.strerror}); name another folder"
        ) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir: {run_dir} cannot be written; name another folder, or change its permissions"
        )
    if strangers := _strangers(config):
        raise ConfigError(
            f"output_dir/exp_name: {run_dir} holds no run but {', '.join(strangers[:5])}; choose another exp_name, or "
            "start there with --overwrite, which removes only what runs write"
        )
    if _kind_of_disk(run_dir) in ("tmpfs", "ramfs"):
        log.warning(
            "output_dir: %s lies in memory, not on a disk: it is gone after a restart", run_dir
        )


def _strangers(config: DPOConfig) -> list[str]:
    """What lies in a run folder that no run has begun, and is not the logs of one."""
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


def _kind_of_disk(folder: Path) -> str | None:
    """By the mount that lies deepest above the folder; None where nobody tells."""
    try:
        mounts = [line.split()[1:3] for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    above = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    kinds = {
        place: kind for place, kind in mounts if place in above
    }  # of two at one place the later one counts
    return kinds[max(kinds, key=len)] if kinds else None
