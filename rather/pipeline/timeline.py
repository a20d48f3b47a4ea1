"""Where the time of a run goes: for log lines, the report and, on request, trace.json.

trace.json has Chrome's format (chrome://tracing, ui.perfetto.dev): an array with one event per
line, whose closing bracket may be missing. So a killed run leaves a file that opens, and a resumed
run appends to it.
"""

from __future__ import annotations

import json
import logging
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from errno import ENOSPC
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rather.files import own
from rather.pipeline.steps import Step
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

Track = Literal["data", "reference", "actor_train", "driver"]
TRACKS: tuple[Track, ...] = get_args(Track)


@dataclass
class Times:
    """What steps took, by part: since the last log line, or since the start of this process."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    pairs: int = 0
    tokens: int = 0
    real: int = 0  # tokens of micro-batches that are not fillers
    laid_out: int = 0

    def record(self, pairs: int, tokens: int) -> dict[str, float]:
        """Return the metrics of a log line."""
        whole, steps = max(self.seconds["steps"], 1e-9), max(self.steps, 1)
        speed = {"pairs_per_second": pairs / whole, "tokens_per_second": tokens / whole}
        parts = ("reference", "train", "wait")
        return speed | {f"time/{name}": self.seconds[name] / steps for name in parts}

    def report(self, *, in_turn: bool) -> dict[str, Any]:
        """Return what this start took. Work of a reference that runs ahead takes no extra time."""
        whole = max(self.seconds["steps"], 1e-9)
        parts = dict(self.seconds)
        for name in ("steps", *(() if in_turn else ("reference",))):
            parts.pop(name, None)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "seconds": time.perf_counter() - self.began,
            "pairs_per_second": self.pairs / whole,
            "tokens_per_second": self.tokens / whole,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() or peak,
            "parts": parts,
            "packing": {
                "fill": self.real / max(self.laid_out, 1),
                "seconds_waited": self.seconds["wait"],
            },
        }


class Timeline:
    """Measures the steps of this start.

    Training does not wait for a reference that runs `in_turn`: that is part of the step.
    """

    def __init__(self, *, in_turn: bool) -> None:
        self.in_turn = in_turn
        self.window, self.total = Times(), Times()
        self._trace: Trace | None = None

    def packed(self, steps: Iterator[Step], done: int) -> Iterator[Step]:
        """Yield the same steps, and record how long each took to make."""
        for number in count(done + 1):
            try:
                with self.span("data", "pack", number):
                    step = next(steps)
            except StopIteration:
                return
            yield step

    @contextmanager
    def drawn(self, file: Path | None) -> Iterator[None]:
        """Measure from the first step to the last; without a file nothing is drawn."""
        self.window, self.total = Times(), Times()
        with closing(Trace(file)) if file else nullcontext() as self._trace:
            yield

    @contextmanager
    def span(self, track: Track, name: str, step: int) -> Iterator[None]:
        """Measure work on a step; what fails is not recorded."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        if track != "data":
            self._spend("reference" if track == "reference" else name, seconds)
        if self._trace:
            self._trace.add(track, name, step, began, seconds)

    def awaited(self, steps: Iterator[Step]) -> Generator[Step, None, None]:
        """Yield the same steps; training stands still until each is there."""
        while True:
            self._step_began, before = time.perf_counter(), self.total.seconds["reference"]
            step = next(steps, None)
            if step is None:
                return
            waited = time.perf_counter() - self._step_began
            worked = self.total.seconds["reference"] - before if self.in_turn else 0.0
            self._spend("wait", waited - worked)
            yield step

    def finish_step(self, step: Step, result: StepResult) -> None:
        """Count the step that was awaited last."""
        self._spend("steps", time.perf_counter() - self._step_began)
        for times in (self.window, self.total):
            times.steps += 1
            times.pairs += len(step.pairs)
            times.tokens += step.tokens
            times.real += result.real_tokens
            times.laid_out += result.laid_out

    def _spend(self, part: str, seconds: float) -> None:
        self.window.seconds[part] += seconds
        self.total.seconds[part] += seconds


class Trace:
    """trace.json: a track for each role, for the pairs, and for the driver between steps."""

    def __init__(self, file: Path) -> None:
        self._clock = time.time() - time.perf_counter()  # events of all starts on one axis
        self._file = FileIO(file, "a+", opener=own)
        self._turn = threading.Lock()  # pairs and reference have threads of their own
        self._file.seek(0)
        kept = self._file.readall().rfind(b"\n") + 1  # a kill may have torn the last line
        self._file.truncate(kept)
        if not kept:
            self._file.write(b"[\n")
            for track in TRACKS:
                self._write(track, {"ph": "M", "name": "thread_name", "args": {"name": track}})

    def add(self, track: Track, name: str, step: int, began: float, seconds: float) -> None:
        times = {"ts": round((self._clock + began) * 1e6), "dur": round(seconds * 1e6)}
        self._write(track, {"ph": "X", "name": name, **times, "args": {"step": step}})

    def close(self) -> None:
        self._file.close()

    def _write(self, track: Track, event: dict[str, Any]) -> None:
        """Write one event; if the disk is full the run continues without the trace."""
        line = json.dumps({**event, "pid": 1, "tid": 1 + TRACKS.index(track)}).encode() + b",\n"
        with self._turn:
            if self._file.closed:
                return
            try:
                if self._file.write(line) < len(line):
                    raise OSError(ENOSPC, "no room")
            except OSError as error:
                text = "%s: cannot be written (%s); nothing more is drawn"
                log.warning(text, self._file.name, error.strerror)
                self._file.close()
