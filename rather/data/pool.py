"""Child processes that tokenise, and the order of their results: that of the input, for any number of children."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from rather.config import plugins
from rather.config.redaction import looks_secret
from rather.data.read import Chunk, Source
from rather.data.tokenize_worker import chunk_message, receive, send
from rather.errors import DataError

# The child finds the same modules as its parent, wherever either was started. Ctrl-C is the parent's to answer.
_START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); from rather.data.tokenize_worker import main; main()"
)


@dataclass(frozen=True)
class Limits:
    """What a child may spend: on one row in seconds, and above what it needs to start in bytes."""

    row_seconds: float = 30.0
    memory: int = 2 << 30


class Asker(NamedTuple):
    """For whom a child works: the name to begin an error with, and what its rows are called where it has rows."""

    name: str
    unit: str | None = None


class Result(NamedTuple):
    """What a child made of a chunk."""

    chunk: Chunk
    head: dict[str, Any]
    table: bytes


def tokenised(
    chunks: Iterable[Chunk],
    setup: dict[str, Any],
    sources: list[Source],
    processes: int,
    limits: Limits,
) -> Iterator[Result]:
    """All chunks in order. At most two chunks per child are under way: memory does not grow with the input."""
    children = [Child(setup, limits) for _ in range(processes)]
    idle: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        idle.put(child)

    def work(chunk: Chunk) -> Result:
        child = idle.get()
        try:
            source = sources[chunk.source]
            return Result(
                chunk, *child.ask(Asker(str(source.path), source.unit), *chunk_message(chunk))
            )
        finally:
            idle.put(child)

    executor = ThreadPoolExecutor(processes)
    waiting: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            waiting.append(executor.submit(work, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for child in children:
            child.close()
        executor.shutdown(cancel_futures=True)


class Child:
    """A process that renders and tokenises within limits; see `worker`."""

    def __init__(self, setup: dict[str, Any], limits: Limits) -> None:
        self.limits = limits
        self.template = (setup["recipe"]["template"] or {}).get("name", "none")
        self.ready = False
        self.progress = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child; without a name, so nothing stays
        self.progress.truncate(8)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self.progress.fileno()],
            env={
                **{name: value for name, value in os.environ.items() if not looks_secret(name)},
                **dict.fromkeys(
                    ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
                ),
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        self.setup = {
            **setup, "imports": plugins.loaded("data format"), "progress": self.progress.fileno(), "memory": limits.memory, "seconds": limits.row_seconds
        }  # fmt: skip

    def ask(
        self, asker: Asker, head: dict[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        if not self.ready:
            self._answer(asker, self.setup)
            self.ready = True
        return self._answer(asker, head, body)

    def _answer(
        self, asker: Asker, head: dict[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        assert self.process.stdin
        assert self.process.stdout
        try:
            send(self.process.stdin, head, body)
            answer = receive(self.process.stdout)
        except (BrokenPipeError, ValueError):
            answer = None
        if answer is None:
            raise self._died(asker)
        if "error" in answer[0]:
            raise DataError(f"{asker.name}: {answer[0]['error']}")
        if "memory" in answer[0]:
            raise self._too_much(asker, f"more than {self.limits.memory >> 20} MiB of memory")
        return answer

    def _died(self, asker: Asker) -> DataError:
        code = self.process.wait()
        if code == -signal.SIGPROF:
            return self._too_much(asker, f"more than {self.limits.row_seconds:g} s of computing")
        if code in (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV):
            return self._too_much(asker, f"too much memory, or failed (signal {-code})")
        return DataError(
            f"{self._place(asker)}: the tokenising process ended with exit code {code}; its words are above."
        )

    def _too_much(self, asker: Asker, what: str) -> DataError:
        return DataError(
            f"{self._place(asker)}: chat template {self.template} and tokenizer took {what}; "
            "look for an endless loop or a huge repetition in the template, or for a gigantic text."
        )

    def _place(self, asker: Asker) -> str:
        if asker.unit is None:
            return asker.name
        number = struct.unpack("<q", os.pread(self.progress.fileno(), 8, 0))[0]
        return (
            f"{asker.name}:{number} ({asker.unit} {number})"
            if number
            else f"{asker.name} (before its first row)"
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):  # what was still buffered has no reader any more
                    pipe.close()
        self.progress.close()
