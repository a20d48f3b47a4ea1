"""A run folder belongs to one process at a time, and other shells ask that process to save or to stop.

Each leaves a file <run_dir>/.control-<word>-<number>. The run takes it up at the end of its step or of a chunk of its
evaluation by a new name, .taken-<number>-<step>; whoever asked removes it. One way for a run in one process, on Ray and
under torchrun, on this machine or on another that shares the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO
from uuid import uuid4

from rather.errors import ConfigError, WorkerError

log = logging.getLogger(__name__)

LOCK, CONTROL, TAKEN = ".lock", ".control", ".taken"
STOP, SAVE = "stop", "save"
TRIES = 5  # to lock a folder: another shell that only asks who holds it does so for a moment
LOOK_EVERY = 0.2  # seconds between two looks of the one who asked


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Only one process may write to a run folder. The kernel lets go of the lock when its holder dies."""
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOCK, "a+", encoding="utf-8") as file:
        try:
            _locked(file, TRIES)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(
                f"output_dir/exp_name: {run_dir} is in use by {holder}; "
                "wait for it, stop it (rather stop), or choose another exp_name."
            ) from error
        except OSError as error:
            log.warning(
                "%s: cannot be locked (%s); start no second run here.", run_dir, error.strerror
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        for name in (CONTROL, TAKEN):  # what was meant for a run that has ended
            _remove(run_dir.glob(f"{name}-*"))
        try:
            yield
        finally:
            file.truncate(0)


def _locked(file: TextIO, tries: int) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            tries -= 1
            if not tries:
                raise
            time.sleep(0.02)


def taken(run_dir: Path, step: int) -> str | None:
    """What other shells have asked of this run, once; each is answered with the step that the run has done."""
    words = {_taken(file, step) for file in run_dir.glob(f"{CONTROL}-*")}
    return STOP if STOP in words else SAVE if SAVE in words else None  # a run that stops saves too


def _taken(file: Path, step: int) -> str | None:
    word, _, number = file.name.removeprefix(f"{CONTROL}-").partition("-")
    try:
        file.rename(file.with_name(f"{TAKEN}-{number}-{step}"))
    except FileNotFoundError:  # whoever asked has given up
        return None
    except OSError as error:
        log.warning("%s: cannot be used (%s); send signals instead.", file, error.strerror)
        return None
    if word not in (STOP, SAVE):
        log.warning("%s: '%.20s' is not understood; there are %s and %s.", file, word, STOP, SAVE)
    return word


# --- from another shell ---


@dataclass(frozen=True)
class Holder:
    """The process that writes to a run folder."""

    told: str  # process <pid> on <host>
    host: str


def holder(run_dir: Path) -> Holder | None:
    """Whoever holds the lock of a run folder, now; None where nobody does."""
    try:
        file = open(run_dir / LOCK, encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError:
        return None
    with file:
        told = file.read().strip()
        host = (re.search(r" on (\S+)$", told) or ["", ""])[1]
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Holder(told or "a process", host)
        except OSError:
            pass  # the file system has no locks: its content is all that is known
        # The locks of another machine need not reach this one; what is written there does.
        return Holder(told, host) if told and host != socket.gethostname() else None


def ask(run_dir: Path, word: str, *, timeout: float, tell: Callable[[str], None]) -> None:
    """Asks the run in this folder to stop or to save, and waits until it has."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no run; name its folder or its YAML file.")
    if (found := holder(run_dir)) is None:
        raise ConfigError(f"{run_dir}: no run is going on there; start it with rather train.")
    waiting = _Waiting(run_dir, found, timeout, tell)
    before, number = latest(run_dir), uuid4().hex
    request = run_dir / f"{CONTROL}-{word}-{number}"
    try:
        request.touch(exist_ok=False)
        waiting.until(lambda: bool(_answers(run_dir, number)), "it finishes its step")
        step = max(
            (int(answer.name.rpartition("-")[2]) for answer in _answers(run_dir, number)), default=0
        )
        if word == STOP:
            waiting.until(lambda: holder(run_dir) is None, "it saves and ends")
        else:
            waiting.until(
                lambda: (now := latest(run_dir)) not in (None, before) and now.step >= step,
                "it saves",
            )
    except OSError as error:
        raise ConfigError(
            f"{request}: cannot be written ({error.strerror}); send a signal."
        ) from error
    finally:
        _remove([request])
        _remove(_answers(run_dir, number))
    newest = latest(run_dir)
    saved = (
        f"its newest checkpoint is that of step {newest.step}" if newest else "it has no checkpoint"
    )
    tell(f"{found.told} has {'ended' if word == STOP else 'saved and goes on'}; {saved}")


class Latest(NamedTuple):
    """The step of the newest checkpoint, and when it was named."""

    step: int
    time: int


def latest(run_dir: Path) -> Latest | None:
    file = run_dir / "LATEST"
    with suppress(OSError, ValueError):
        return Latest(
            int(file.read_text(encoding="utf-8").rpartition("-")[2]), file.stat().st_mtime_ns
        )
    return None


def _answers(run_dir: Path, number: str) -> list[Path]:
    return list(run_dir.glob(f"{TAKEN}-{number}-*"))


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()


@dataclass
class _Waiting:
    run_dir: Path
    found: Holder
    seconds: float
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def until(self, has_happened: Callable[[], bool], what: str) -> None:
        self.tell(f"{self.found.told}: waiting until {what}")
        while not has_happened():
            if time.monotonic() > self.deadline:
                raise WorkerError(
                    f"{self.run_dir}: not done within {self.seconds:.0f} s (--timeout) while waiting until {what}. "
                    f"Look at the log of {self.found.told}, or give it longer."
                )
            if holder(self.run_dir) is None and not has_happened():
                raise WorkerError(
                    f"{self.run_dir}: {self.found.told} ended before that; see its log."
                )
            time.sleep(LOOK_EVERY)
