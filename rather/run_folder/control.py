"""A run folder belongs to one process at a time; other shells ask that process to save or to stop.

Each request is a file <run_dir>/.control-<word>-<number>. The run accepts it at the end of its
step, or of a chunk of its evaluation, by renaming it to .taken-<number>-<step>; the one who asked
removes it. This works for a run in one process, on Ray and under torchrun, on this machine or
another that shares the folder.

SIGTERM and SIGINT stop a run, SIGUSR1 saves a checkpoint; a second SIGTERM or SIGINT quits
immediately. Before training begins nothing is lost, so the run ends immediately; later the step is
finished and saved.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from rather.errors import ConfigError, Ended, WorkerError
from rather.files import own, read_bytes

log = logging.getLogger(__name__)

LOCK, CONTROL, TAKEN = ".lock", ".control", ".taken"
STOP, SAVE = "stop", "save"
SIGNS_OF_LIFE = ("metrics.jsonl", "LATEST")  # a run writes them as it goes
LONGEST_NAME = 300  # characters of who holds a lock
TRIES = 5  # to lock a folder: a shell that only looks who holds it locks it for a moment
POLL_SECONDS = 0.2  # between two checks of the one who asked


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Lock a run folder for this process. The kernel releases the lock when the process dies."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOCK, "a+", encoding="utf-8", opener=own) as file:
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    file.seek(0)
                    raise ConfigError(
                        f"output_dir/exp_name: {run_dir} is in use by "
                        f"{file.read(LONGEST_NAME).strip()}; "
                        "wait for it, stop it (rather stop), or choose another exp_name."
                    ) from error
                time.sleep(0.02)
            except OSError as error:
                log.warning(
                    "%s: %s",
                    run_dir,
                    f"cannot be locked ({error.strerror}); do not start a second run here.",
                )
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        _remove(run_dir, f"{CONTROL}-*", f"{TAKEN}-*")  # meant for a run that has ended
        try:
            yield
        finally:
            file.truncate(0)


def take_requests(run_dir: Path, step: int) -> str | None:
    """Accept what other shells have asked of this run; `step` is the last one that it has done."""
    words = set()
    for file in run_dir.glob(f"{CONTROL}-*"):
        word, _, number = file.name.removeprefix(f"{CONTROL}-").partition("-")
        try:
            file.rename(file.with_name(f"{TAKEN}-{number}-{step}"))
        except FileNotFoundError:  # the one who asked has given up
            continue
        except OSError as error:
            log.warning("%s: cannot be renamed (%s); send a signal instead.", file, error.strerror)
            continue
        words.add(word)
    return STOP if STOP in words else SAVE if SAVE in words else None  # a run that stops saves too


# --- from another shell ---


class Holder(NamedTuple):
    """Who has written its name into a lock, and whether the lock is seen to be held."""

    name: str  # "process <pid> on <host>"
    is_seen: bool


def _holder(run_dir: Path) -> Holder | None:
    try:
        file = open(run_dir / LOCK, encoding="utf-8", errors="replace", opener=own)  # noqa: SIM115
    except OSError:
        return None
    with file:
        name = file.read(LONGEST_NAME).strip()
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Holder(name or "a process", is_seen=True)
        except OSError:
            pass  # the file system has no locks: the content of the file is all that is known
        # The lock of another machine may not be visible here; what it has written is.
        is_elsewhere = name and not name.endswith(f" on {socket.gethostname()}")
        return Holder(name, is_seen=False) if is_elsewhere else None


def holder(run_dir: Path) -> str | None:
    """Return who holds the lock of a run folder, or may hold it on another machine; or None."""
    found = _holder(run_dir)
    return found.name if found else None


def activity(run_dir: Path) -> str | None:
    """Return "running", "unknown since ..." or, if no process uses the folder, None.

    It is unknown if a process on another machine has not given the lock back, and the lock is not
    seen here: the process was killed, or the file system does not share locks.
    """
    found = _holder(run_dir)
    if found is None or found.is_seen:
        return "running" if found else None
    written = [0.0]
    for name in (LOCK, *SIGNS_OF_LIFE):
        with suppress(OSError):
            written.append((run_dir / name).lstat().st_mtime)
    return f"unknown since {datetime.fromtimestamp(max(written), UTC):%Y-%m-%d %H:%M} UTC"


def ask(run_dir: Path, word: str, *, timeout: float, report: Callable[[str], None]) -> None:
    """Ask the run in this folder to stop or to save, and wait until it has."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run; pass its folder or its YAML file.")
    if (owner := holder(run_dir)) is None:
        raise ConfigError(f"{run_dir}: no run is active there; start it with rather train.")
    deadline = time.monotonic() + timeout

    def wait_until(has_happened: Callable[[], bool], what: str) -> None:
        report(f"{owner}: waiting until {what}")
        while not has_happened():
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{run_dir}: not done within {timeout:.0f} s (--timeout) while waiting until "
                    f"{what}. Check the log of {owner}, or raise --timeout."
                )
            if holder(run_dir) is None and not has_happened():
                raise WorkerError(f"{run_dir}: {owner} ended before that; check its log.")
            time.sleep(POLL_SECONDS)

    before, number = latest(run_dir), uuid4().hex
    request, answer = run_dir / f"{CONTROL}-{word}-{number}", f"{TAKEN}-{number}-*"
    try:
        request.touch(exist_ok=False)
        wait_until(lambda: any(run_dir.glob(answer)), "it finishes its step")
        step = max((int(file.name.rpartition("-")[2]) for file in run_dir.glob(answer)), default=0)
        if word == STOP:
            wait_until(lambda: holder(run_dir) is None, "it has saved and ended")
        else:
            wait_until(
                lambda: (now := latest(run_dir)) not in (None, before) and now[0] >= step,
                "it has saved",
            )
    except OSError as error:
        raise ConfigError(
            f"{request}: cannot be written ({error.strerror}); send a signal instead."
        ) from error
    finally:
        _remove(run_dir, request.name, answer)
    newest = latest(run_dir)
    saved = f"its newest checkpoint is step {newest[0]}" if newest else "it has no checkpoint"
    report(f"{owner} has {'ended' if word == STOP else 'saved and continues'}; {saved}")


def latest(run_dir: Path) -> tuple[int, int] | None:
    """Return the step of the newest checkpoint, and when LATEST was written."""
    file = run_dir / "LATEST"
    with suppress(OSError, ValueError):
        step = int(read_bytes(file, LONGEST_NAME, own).rpartition(b"-")[2])
        return step, file.stat().st_mtime_ns
    return None


def _remove(run_dir: Path, *patterns: str) -> None:
    for file in (file for pattern in patterns for file in run_dir.glob(pattern)):
        with suppress(OSError):
            file.unlink()


ENDS = (signal.SIGTERM, signal.SIGINT)
SAVES = signal.SIGUSR1
STOPS = 1000  # added to the signal number; larger than any other request
KINDS = (1, *(STOPS + number for number in ENDS))  # all requests: to save, or to stop
# Seconds in which torchrun forwards a Ctrl-C that its processes already got from the terminal.
ECHO = 10.0
PATIENCE = 45.0  # seconds for cleaning up; a library may wait forever for something that is gone


class StopRequest:
    """While entered, `signal` and `save_now` hold requests; the loop reads them between steps."""

    def __init__(
        self, patience: float | None = PATIENCE, on_begin: Callable[[], None] = lambda: None
    ) -> None:
        """`on_begin` is called when training begins."""
        self._patience, self._on_begin = patience, on_begin
        self.signal: int | None = None
        self.save_now = False
        self.stops = self.saves = False  # what all processes have agreed on
        self.last_saved: Callable[[], int | None] = lambda: None
        self._at_once = True
        self._heard = 0.0
        self._leaving: threading.Timer | None = None

    def __enter__(self) -> StopRequest:
        # Signals reach only the main thread.
        numbers = (*ENDS, SAVES) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._leaving is not None:
            self._leaving.cancel()
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            self.end()  # Ray has its own handler while it starts
        # Ray's compiled code turns what a handler raises into a SystemError.
        if error is None or isinstance(error, SystemError | SystemExit):
            self._end_if_asked()

    def begin_training(self) -> None:
        """From now on a stop saves first."""
        self._end_if_asked()
        self._at_once = False
        self._on_begin()

    def _end_if_asked(self) -> None:
        """Raise; again if a library swallowed the exception, such as in `__del__`."""
        if self._at_once and self.signal is not None:
            raise Ended(
                self.signal,
                f"{signal.Signals(self.signal).name}: stopped before training began. Prepared "
                "pairs are kept in the data cache; run the same command again to continue.",
            )

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.stops and self.signal else 0

    @property
    def asked(self) -> int:
        """Return the request as a number; the largest one of all processes applies to all."""
        return STOPS + self.signal if self.signal else int(self.save_now)

    @property
    def flags(self) -> list[int]:
        """Return 1 for the kind of the request, 0 for the others: flags of processes are added."""
        return [int(kind == self.asked) for kind in KINDS]

    def agree_on(self, counts: Sequence[int]) -> None:
        """Apply the request of all processes, by how many of them have each kind."""
        requested = [kind for kind, count in zip(KINDS, counts, strict=True) if count]
        self.agree(max(requested, default=0))

    def agree(self, asked: int) -> None:
        """Apply the request of all processes. A signal in between waits for the next agreement."""
        self.stops, self.saves = asked >= STOPS, asked > 0
        if self.stops and self.signal is None:
            # This process's own copy of the signal will be an echo.
            self.end(asked - STOPS)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Do the same as a signal."""
        self.signal, self._heard = self.signal or number, time.monotonic()

    def _receive(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if number == SAVES:
            self.save_now = True
            _say(f"{name}: saving after this step")
        elif self._at_once:
            self.signal = number
            if self._patience is not None and self._leaving is None:
                self._leaving = leave_within(self._patience, 128 + number)
            self._end_if_asked()
        elif self.signal is None:
            self.end(number)
            _say(f"{name}: finishing this step and saving; press Ctrl-C again to quit immediately")
        elif "TORCHELASTIC_RUN_ID" not in os.environ or time.monotonic() - self._heard >= ECHO:
            saved = self.last_saved()
            last = "no checkpoint yet" if saved is None else f"the last checkpoint is step {saved}"
            _say(f"second signal: quitting immediately; {last}")
            os._exit(128 + number)


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


def leave_within(seconds: float, code: int) -> threading.Timer:
    """End this process after so many seconds, whatever it waits for, unless cancelled."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()
    return timer
