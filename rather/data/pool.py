"""Child processes that render templates and tokenise, within limits of time and memory.

`tokenised` spreads chunks of rows over children; `encoder_of` gives an encoder for single texts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, NamedTuple

from rather.config import plugins
from rather.config.redaction import looks_secret
from rather.data.formats import RowLayout, TextPair
from rather.data.json_rows import DropReason
from rather.data.read import Chunk, DataFile
from rather.data.tokenize_worker import chunk_to_json
from rather.data.tokens import Encoded, Encoder, Ids, Note, TokenRecipe
from rather.errors import DataError

# The child finds the same modules as its parent, wherever either was started. Ctrl-C is the
# parent's to answer.
_START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); from rather.data.tokenize_worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(frozen=True)
class ChildLimits:
    """What a child may use: seconds for one row, and bytes on top of what it needs to start."""

    row_seconds: float = 30.0
    memory: int = 2 << 30


class ChunkResult(NamedTuple):
    """What a child made of a chunk."""

    chunk: Chunk
    head: dict[str, Any]
    table: bytes


def setup_of(recipe: TokenRecipe, layout: RowLayout) -> dict[str, Any]:
    """Return what a child must know."""
    return {"recipe": asdict(recipe), "layout": asdict(layout)}


def tokenised(
    chunks: Iterable[Chunk],
    setup: dict[str, Any],
    sources: list[DataFile],
    processes: int,
    limits: ChildLimits,
) -> Iterator[ChunkResult]:
    """Yield the results of all chunks in order, the same for any number of processes.

    At most two chunks per child are under way: memory does not grow with the input.
    """
    children = [Child(setup, limits) for _ in range(processes)]
    idle: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        idle.put(child)

    def work(chunk: Chunk) -> ChunkResult:
        child, source = idle.get(), sources[chunk.source]
        try:
            question = chunk_to_json(chunk), chunk.table
            return ChunkResult(chunk, *child.ask(str(source.path), source.unit, *question))
        finally:
            idle.put(child)

    executor = ThreadPoolExecutor(processes)
    waiting: deque[Future[ChunkResult]] = deque()
    try:
        for chunk in chunks:
            waiting.append(executor.submit(work, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for child in children:
            child.process.kill()  # so that no thread waits for an answer
        executor.shutdown(cancel_futures=True)
        for child in children:
            child.close()


class Child:
    """A process that renders and tokenises within limits; see `tokenize_worker`."""

    def __init__(self, setup: dict[str, Any], limits: ChildLimits) -> None:
        self.limits = limits
        self.template = (setup["recipe"]["template"] or {}).get("name", "none")
        self.unsent = [
            {
                **setup,
                "imports": plugins.loaded("data format"),
                "memory": limits.memory,
                "seconds": limits.row_seconds,
            }
        ]
        self.progress = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        self.connection, theirs = Pipe()
        handles = theirs.fileno(), self.progress.fileno()
        threads = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), *map(str, handles)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is not output of the command
                pass_fds=handles,
                env={
                    **{name: text for name, text in os.environ.items() if not looks_secret(name)},
                    **dict.fromkeys(threads, "1"),
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )

    def ask(
        self, name: str, unit: str | None, head: dict[str, Any], table: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Return the child's answer. An error starts with the name, and the row if given a unit."""
        try:
            while self.unsent:
                self.connection.send_bytes(json.dumps(self.unsent.pop()).encode())
            self.connection.send_bytes(json.dumps(head).encode())
            self.connection.send_bytes(table)
            found, table = json.loads(self.connection.recv_bytes()), self.connection.recv_bytes()
        except (EOFError, OSError):
            raise self._failure(name, unit) from None
        if "error" in found:
            raise DataError(f"{name}: {found['error']}")
        if "memory" in found:
            raise self._failure(name, unit, f"more than {self.limits.memory >> 20} MiB of memory")
        return found, table

    def _failure(self, name: str, unit: str | None, used: str = "") -> DataError:
        """Return the error of a child that used too much, or ended without a word about it."""
        if unit is not None:
            number = int(os.pread(self.progress.fileno(), 20, 0) or 0)
            name += f":{number} ({unit} {number})" if number else " (before its first row)"
        code = 0 if used else self.process.wait()
        if code == -signal.SIGPROF:
            used = f"more than {self.limits.row_seconds:g} s of computing"
        elif code in (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV):
            used = f"too much memory, or failed (signal {-code})"
        if not used:
            return DataError(
                f"{name}: the tokenising process ended with exit code {code}; see its output above."
            )
        return DataError(
            f"{name}: chat template {self.template} and tokenizer took {used}; look for an "
            "endless loop or a huge repetition in the template, or for a gigantic text."
        )

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.progress.close()


def encoder_of(
    recipe: TokenRecipe, name: str, limits: ChildLimits | None = None
) -> Encoder | LimitedEncoder:
    """Return an encoder for single texts; only a template, a program of others, needs a child."""
    if recipe.template is None:
        return Encoder(recipe)
    return LimitedEncoder(recipe, name, limits or ChildLimits())


class LimitedEncoder:
    """An Encoder in a child process, which starts with the first question."""

    def __init__(self, recipe: TokenRecipe, name: str, limits: ChildLimits) -> None:
        self.recipe, self.name, self.limits = recipe, name, limits
        self._child: Child | None = None

    @property
    def end_of_turn(self) -> int | None:
        found: int | None = self._ask("end_of_turn", None)
        return found

    def training_prompt(self, text: str) -> Ids:
        found: Ids = self._ask("training_prompt", text)
        return found

    def inference_prompt(self, pair: TextPair) -> Ids:
        found: Ids = self._ask("inference_prompt", asdict(pair))
        return found

    def encode(self, pair: TextPair) -> Encoded:
        found: dict[str, Any] = self._ask("encode", asdict(pair))
        for name in ("chosen_scored", "rejected_scored"):
            found[name] = tuple(map(tuple, found[name]))
        return Encoded(**{**found, "notes": [Note(*note) for note in found["notes"]]})

    def _ask(self, question: str, given: Any) -> Any:
        if self._child is None:
            self._child = Child(setup_of(self.recipe, RowLayout()), self.limits)
            self._close = weakref.finalize(self, self._child.close)
        try:
            given = json.loads(json.dumps(given, default=str))  # a row of Python may hold a date
            head, _ = self._child.ask(self.name, None, {"ask": question, "given": given})
        except (
            BaseException
        ):  # also Ctrl-C: the answer would be taken for that to the next question
            self._close()
            self._child = None
            raise
        if "dropped" in head:
            raise DropReason(*head["dropped"])
        return head["found"]
