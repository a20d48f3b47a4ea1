"""Where the time of a run goes: for log lines and the report."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rather.pipeline.steps import Step
from rather.train.rank_trainer import StepResult

Part = Literal["reference", "train", "evaluate", "save"]


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
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: the first step begins now."""
        self.window, self.total = Times(), Times()

    @contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """Measure work; what fails is not recorded."""
        began = time.perf_counter()
        yield
        self.spend(part, time.perf_counter() - began)

    def awaited(self, steps: Iterator[Step]) -> Generator[Step, None, None]:
        """Yield the same steps; training stands still until each is there."""
        while True:
            self._step_began, before = time.perf_counter(), self.total.seconds["reference"]
            step = next(steps, None)
            if step is None:
                return
            waited = time.perf_counter() - self._step_began
            worked = self.total.seconds["reference"] - before if self.in_turn else 0.0
            self.spend("wait", waited - worked)
            yield step

    def finish_step(self, step: Step, result: StepResult) -> None:
        """Count the step that was awaited last."""
        self.spend("steps", time.perf_counter() - self._step_began)
        for times in (self.window, self.total):
            times.steps += 1
            times.pairs += len(step.pairs)
            times.tokens += step.tokens
            times.real += result.real_tokens
            times.laid_out += result.laid_out

    def spend(self, part: str, seconds: float) -> None:
        """Count the seconds that a part took."""
        self.window.seconds[part] += seconds
        self.total.seconds[part] += seconds
