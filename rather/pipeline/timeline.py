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
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from errno import ENOSPC
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rather.pipeline.steps import ReferenceStep, Step

log = logging.getLogger(__name__)

Track = Literal["data", "reference", "actor_train", "driver"]


@dataclass
class Span:
    began: float
    seconds: float = 0.0


class Timeline:
    """Measures the steps of this start. A reference that runs `in_turn` is not waited for: it is
    part of the step.
    """

    def __init__(self, *, in_turn: bool) -> None:
        self.in_turn = in_turn
        self.times, self.tally = StepTimes(), Tally()
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
        """From the first step to the last; without a file nothing is drawn."""
        self.times, self.tally = StepTimes(), Tally()
        with closing(Trace(file)) if file else nullcontext() as self._trace:
            yield

    @contextmanager
    def span(self, track: Track, name: str, step: int) -> Iterator[Span]:
        """Work on a step; what fails is not drawn."""
        span = Span(time.perf_counter())
        yield span
        span.seconds = time.perf_counter() - span.began
        if track in ("actor_train", "driver"):  # one after another
            self.tally.spend(name, span.seconds)
        if self._trace:
            self._trace.add(track, name, step, span)

    def awaited(self, steps: Iterator[ReferenceStep]) -> Generator[ReferenceStep, None, None]:
        """The same steps; training stands still until each is there."""
        while True:
            self._step_began = time.perf_counter()
            answered = next(steps, None)
            if answered is None:
                return
            waited = (
                time.perf_counter() - self._step_began - (answered.seconds if self.in_turn else 0.0)
            )
            self.times.reference += answered.seconds
            self.times.wait += waited
            self.tally.waited += waited
            if self.in_turn:
                self.tally.spend("reference", answered.seconds)
            yield answered

    def finish_step(self, step: Step) -> None:
        """The step that was awaited last is done."""
        seconds = time.perf_counter() - self._step_began
        self.times.steps += 1
        self.times.in_steps += seconds
        self.tally.add(step, seconds)


@dataclass
class StepTimes:
    """Seconds since the last log line. The reference may work while the policy trains, or before."""

    reference: float = 0.0
    train: float = 0.0
    wait: float = 0.0  # in which training stood still, for pairs or for a reference that runs ahead
    in_steps: float = 0.0
    steps: int = 0

    def record(self, pairs: int, tokens: int) -> dict[str, float]:
        whole, steps = max(self.in_steps, 1e-9), max(self.steps, 1)
        means = {"reference": self.reference, "train": self.train, "wait": self.wait}
        speed = {"pairs_per_second": pairs / whole, "tokens_per_second": tokens / whole}
        return speed | {f"time/{name}": seconds / steps for name, seconds in means.items()}


@dataclass
class Tally:
    """What the steps of this start took, for the run's report."""

    began: float = field(default_factory=time.perf_counter)
    in_steps: float = 0.0  # seconds
    waited: float = 0.0  # of them, seconds in which training waited for a packed step
    pairs: int = 0
    tokens: int = 0
    real: int = 0  # tokens of micro-batches that are not fillers
    laid_out: int = 0
    parts: dict[str, float] = field(
        default_factory=dict
    )  # seconds of what the driver does, one after another

    def spend(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def add(self, step: Step, seconds: float) -> None:
        self.in_steps += seconds
        self.pairs += len(step.pairs)
        self.tokens += step.tokens
        self.real += sum(batch.real_tokens for batch in step.policy)
        self.laid_out += sum(len(batch.ids_N) for batch in step.policy)

    def report(self) -> dict[str, Any]:
        seconds = max(self.in_steps, 1e-9)
        return {
            "seconds": time.perf_counter() - self.began,
            "pairs_per_second": self.pairs / seconds,
            "tokens_per_second": self.tokens / seconds,
            "peak_memory_bytes": _peak_memory(),
            "parts": {"wait": self.waited, **self.parts},
            "packing": {"fill": self.real / max(self.laid_out, 1), "seconds_waited": self.waited},
        }


class Trace:
    """trace.json: one track for each role, one for the pairs and one for what the driver does
    between steps.
    """

    def __init__(self, file: Path) -> None:
        self._clock = time.time() - time.perf_counter()  # events of all starts on one axis
        self._file: FileIO | None = FileIO(file, "a+")
        self._turn = threading.Lock()  # pairs and reference have threads of their own
        kept = file.read_bytes().rfind(b"\n") + 1  # a kill may have torn the last line
        self._file.truncate(kept)
        if not kept:
            tracks = [
                {"ph": "M", "name": "thread_name", "args": {"name": name}, **_place(name)}
                for name in TRACKS
            ]
            self._write("[\n" + "".join(map(_line, tracks)))

    def add(self, track: Track, name: str, step: int, span: Span) -> None:
        times = {"ts": round((self._clock + span.began) * 1e6), "dur": round(span.seconds * 1e6)}
        self._write(
            _line({"ph": "X", "name": name, **times, "args": {"step": step}, **_place(track)})
        )

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        """Write; if the disk is full the run continues without the trace."""
        with self._turn:
            if self._file is None:
                return
            try:
                if self._file.write(text.encode()) < len(text):  # all of it is ASCII
                    raise OSError(ENOSPC, "no room")
            except OSError as error:
                log.warning(
                    "%s: cannot be written (%s); nothing more is drawn",
                    self._file.name,
                    error.strerror,
                )
                self.close()


TRACKS: tuple[Track, ...] = get_args(Track)


def _place(track: Track) -> dict[str, int]:
    return {"pid": 1, "tid": 1 + TRACKS.index(track)}


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"


def _peak_memory() -> int:
    """Of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
