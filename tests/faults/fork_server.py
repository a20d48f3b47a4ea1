"""One warm process that forks a child for every start of a run, to import torch only once."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

PATIENCE = 1800.0  # seconds for one start; Ray with three workers is slow on a busy machine
LATE = -1000  # the exit code of what had to be ended


class ForkServer:
    """`run` calls a function in new processes, one for each of the environments, and returns their exit codes."""

    def __init__(self) -> None:
        # Before torch is there: threads of its own, or a GPU that it has looked at, would not
        # survive a fork. The new process may import torch with its main module.
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        with patch.dict(os.environ, {"LD_PRELOAD": library()}):
            self._process.start()
        theirs.close()

    def run(
        self,
        work: Callable[..., int],
        args: Sequence[Any],
        environments: Sequence[Mapping[str, str]],
        logs: Path,
    ) -> list[int]:
        """What the children print is in `logs`."""
        self._pipe.send((work, tuple(args), [dict(each) for each in environments], logs))
        codes: list[int] = self._pipe.recv()
        return codes

    def close(self) -> None:
        self._pipe.close()  # its end
        self._process.join()


@cache
def library() -> str:
    """Compile preload.c, which does nothing unless a test asks for it; "" without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        return ""
    folder, source = tempfile.mkdtemp(), Path(__file__).with_name("preload.c")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = f"{folder}/preload.so"
    options = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", file, str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return file


@cache
def fork_server() -> ForkServer:
    """That of the test session."""
    made = ForkServer()
    atexit.register(made.close)
    return made


def _serve(pipe: Connection) -> None:
    from tests.faults.runs import warm

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends with its pipe
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warm()
    while True:
        try:
            work, args, environments, logs = pipe.recv()
        except EOFError:
            return
        children = [
            _forked(work, args, each, logs / f"{number}.log")
            for number, each in enumerate(environments)
        ]
        pipe.send(_exit_codes(children))


def _forked(
    work: Callable[..., int], args: Sequence[Any], environment: Mapping[str, str], file: Path
) -> int:
    import torch  # the server has it

    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.dump_traceback_later(0.9 * PATIENCE)
        os.environ.update(environment)
        # After a fork torch creates its threads again, which fails if two threads start it at once.
        torch.set_num_threads(1)
        code = work(*args)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _exit_codes(children: Sequence[int]) -> list[int]:
    """Of all, once they have ended; what takes too long is ended."""
    deadline, codes = time.monotonic() + PATIENCE, []
    for child in children:
        with contextlib.closing(_Descriptor(os.pidfd_open(child))) as process:
            late = not select.select(
                [process.number], [], [], max(0.0, deadline - time.monotonic())
            )[0]
        if late:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        codes.append(LATE if late else code)
    return codes


class _Descriptor:
    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        os.close(self.number)
