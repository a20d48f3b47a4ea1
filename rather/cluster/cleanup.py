"""A small process that ends a local Ray if the process that started it cannot.

While a process registers with Ray, the call holds the interpreter's lock. If one of Ray's own
processes dies then, Ray waits and at last ends the caller without running any Python code: no
thread and no exit handler there can report it or clean up. This file is run by its path and imports
nothing but the standard library, so that it starts in a moment.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

CHECK_EVERY = 0.5  # seconds
# Seconds after which a parent that has not reported a dead process of Ray is ended. Its own thread
# (LocalRay.watched) does so earlier, if it can run.
PATIENCE = 11.0
STARTED, FAILED, ENDED = "started", "failed", "ended"  # attempts to start Ray may fail


def kill_marked(name: str, value: str) -> None:
    """End all processes of this machine that have `name` with this value in their environment."""
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to somebody else
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


class Cleaner:
    """The parent's side. It sends lines: a state of Ray, or a name and a pid to watch."""

    def __init__(self, mark: str, folder: Path, advice: str) -> None:
        arguments = [str(os.getpid()), mark, str(folder), advice]
        # A session of its own: a Ctrl-C of the terminal is for the parent.
        self._process = subprocess.Popen(  # nosec B603
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def send(self, line: str) -> None:
        assert self._process.stdin
        with suppress(OSError):  # somebody has killed it
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """End it; the parent has cleaned up."""
        self.send(ENDED)
        self._process.wait()
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()


class Parent:
    """What is known about the process that started Ray."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.state = ""
        self.watched: dict[str, int] = {}
        self.is_gone = False

    def listen(self, seconds: float) -> None:
        """Read what it sends within so many seconds."""
        if select.select([sys.stdin], [], [], seconds)[0]:
            text = os.read(sys.stdin.fileno(), 4096).decode()
            self.is_gone = not text
            for line in text.splitlines():
                name, _, pid = line.partition(" ")
                if pid:
                    self.watched[name] = int(pid)
                else:
                    self.state = name
                    self.watched.clear()
        # Children of it may hold the pipe open.
        self.is_gone = self.is_gone or os.getppid() != self.pid

    def dead_process(self) -> str:
        """Return the name of a watched process that is dead; "" if there is none."""
        return next((name for name, pid in self.watched.items() if is_dead(pid)), "")


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def clean_up_after(parent: Parent, mark: str, folder: str, advice: str) -> None:
    """Wait until the parent has ended Ray; if it is gone, or cannot, end Ray and say why."""
    dead, deadline = "", math.inf
    while not parent.is_gone and parent.state != ENDED:
        if time.monotonic() > deadline:
            os.kill(parent.pid, signal.SIGKILL)
            break
        now_dead = parent.dead_process()
        if not now_dead:
            dead, deadline = "", math.inf
        elif not dead:  # more of them follow the first
            dead, deadline = now_dead, time.monotonic() + PATIENCE
        parent.listen(CHECK_EVERY)
    if parent.state == ENDED:
        return
    kill_marked(mark, folder)
    shutil.rmtree(folder, ignore_errors=True)
    if parent.state != STARTED:
        why = f"Ray's process {dead} died" if dead else "this process was ended"
        print(f"rather: {why} while the run started. {advice}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    clean_up_after(Parent(int(sys.argv[1])), *sys.argv[2:])
