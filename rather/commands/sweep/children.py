"""Runs in processes of their own, each on its devices; what ends the sweep ends them, each with a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from rather.run_folder.signals import StopRequest

ENDED = 143  # exit code of what SIGTERM ends
# A sweep that is killed passes no signal on: the kernel does. PR_SET_PDEATHSIG outlasts exec, and asks for the thread
# that started the process, which waits for it here. Not as a preexec_fn: Python between fork and exec, with threads.
TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Children:
    """A signal to the sweep is passed on to each of them once; then they are waited for."""

    def __init__(self) -> None:
        self.alive: set[subprocess.Popen[bytes]] = set()
        self.ending = False
        self._starting = threading.Lock()  # none starts unseen while they are ended
        self._stop = StopRequest(patience=None)  # each of them saves first

    def __enter__(self) -> Children:
        self._stop.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.__exit__(kind, error, at)

    def run(self, arguments: Sequence[str], devices: Sequence[str], console: Path) -> int:
        """The exit code of a Python process that sees these devices only; all it prints goes to a file."""
        child = self._started(arguments, devices, console)
        if child is None:
            return ENDED
        try:
            code = child.wait()
        except BaseException:  # a signal, in the main thread
            child.terminate()
            child.wait()
            raise
        finally:
            self.alive.discard(child)
        return code if code >= 0 else 128 - code

    def _started(
        self, arguments: Sequence[str], devices: Sequence[str], console: Path
    ) -> subprocess.Popen[bytes] | None:
        """None once the sweep is ending."""
        console.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        with self._starting, nullcontext() if self.ending else console.open("wb") as out:
            if out is None:
                return None
            # In a session of its own, so that a Ctrl-C of the terminal does not reach it beside the one passed on.
            child = subprocess.Popen(
                [sys.executable, *_tied(arguments)],
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
            self.alive.add(child)
        return child

    @contextmanager
    def ended_with(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Where the sweep is ended, so are they; the pool waits for them."""
        try:
            yield
        except BaseException:
            with self._starting:
                self.ending = True
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(self.alive):
                child.terminate()
            raise


def _tied(arguments: Sequence[str]) -> Sequence[str]:
    """Those of a Python that gets SIGTERM when this process ends, where the kernel can do that."""
    return (
        ["-S", "-c", TIED, str(os.getpid()), *arguments] if sys.platform == "linux" else arguments
    )


def last_words(console: Path) -> str:
    """What a process said of its end."""
    lines = (
        console.read_text(encoding="utf-8", errors="replace").splitlines()
        if console.exists()
        else []
    )
    said = [line for line in lines if line.startswith("rather: ")] or lines[-1:]
    return f"{said[-1].removeprefix('rather: ')} ({console})" if said else f"see {console}"
