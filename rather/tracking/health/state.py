"""What the health rules know of a run: its first line, its last lines and its evaluations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rather.config.values import FORGETTING
from rather.tracking.json_lines import current_name, held_out_prefix

Line = Mapping[str, float]

# A window has at least so many lines and pairs: the accuracy of 256 pairs is known to +- 0.06.
LINES, PAIRS = 8, 256
LATEST = 4  # training lines that `latest` looks at
LATEST_PAIRS = 128  # with fewer in these lines, chance moves the loss more, by the square root
FEW = 16  # pairs: rules without a window believe the mildest of the lines that hold so many


class RecentLines:
    """The last training lines, as many as hold enough pairs; `get` returns means over pairs.

    Means are computed when a rule asks: with one pair per line there are hundreds of lines.
    """

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()

    @property
    def pairs(self) -> int:
        return int(sum(line["pairs"] for line in self.lines))

    def add(self, line: Line) -> None:
        self.lines.append(line)
        while len(self.lines) > LINES and self.pairs - self.lines[0]["pairs"] >= PAIRS:
            self.lines.popleft()

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= LINES and self.pairs >= PAIRS

    def get(self, name: str, default: Any = None) -> Any:
        values = [(line[name], line["pairs"]) for line in self.lines if name in line]
        weight = sum(pairs for _, pairs in values)
        return sum(value * pairs for value, pairs in values) / weight if weight else default

    def latest(self, name: str) -> float:
        """Return the median of the last few lines, which one spike does not move; else 0."""
        values = [line[name] for line in list(self.lines)[-LATEST:] if name in line]
        return median(values) if len(values) == LATEST else 0.0

    @property
    def noise(self) -> float:
        """Return how much more chance moves `latest` than with LATEST_PAIRS pairs; at least 1."""
        pairs = sum(line["pairs"] for line in list(self.lines)[-LATEST:])
        return math.sqrt(max(1.0, LATEST_PAIRS / max(1.0, pairs)))


@dataclass
class EvaluationHistory:
    """The evaluations of one set. A rule believes two evaluations in a row, never one."""

    first: Line
    best: tuple[float, int, float | None]  # loss, step, training loss at that time
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=2))  # after the first one
    calibrated: float = math.inf  # the best calibrated loss


def right_share(line: Line | RecentLines) -> float:
    """Return the share of the pairs that are right; a tie counts half."""
    return float(line.get("rewards/accuracies", 0.0)) + float(line.get("rewards/ties", 0.0)) / 2


@dataclass
class RunState:
    """What the rules know of the records so far; its size is bounded."""

    total_steps: int
    unit: str = "pairs"  # what rows are: pairs, or answers
    step: int = 0
    first: Line = field(default_factory=dict)  # training line, before the first update
    recent: RecentLines = field(default_factory=RecentLines)
    evaluations: dict[str, EvaluationHistory] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)
    forgetting: list[Line] = field(default_factory=list)  # the first measurement and the last
    known: set[str] = field(default_factory=set)  # the names of what was found

    def add(self, record: Mapping[str, Any]) -> None:
        line = {
            current_name(name): float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self.step = int(record["step"])
        if "pairs" in line:
            self.first = self.first if "loss" in self.first else line
            self.recent.add(line)
        for name in line:
            if prefix := held_out_prefix(name):
                self._add_evaluation(prefix, line)
        self.answers |= _with_prefix(line, "eval/answers/")
        if measured := _with_prefix(line, FORGETTING):
            self.forgetting = [*self.forgetting[:1], measured]

    def _add_evaluation(self, prefix: str, line: Line) -> None:
        held_out = _with_prefix(line, prefix)
        best = (held_out["loss"], self.step, self.recent.get("loss"))
        name = prefix.removeprefix("eval/").rstrip("/")
        if name not in self.evaluations:
            self.evaluations[name] = EvaluationHistory(held_out, best)
        history = self.evaluations[name]
        calibrated = held_out.get("calibrated_loss", math.inf)
        history.calibrated = min(history.calibrated, calibrated)
        if held_out is not history.first:
            history.last.append(held_out)
            history.best = min(history.best, best, key=lambda one: one[0])

    @property
    def answers_to_learn(self) -> str:
        return "chosen answers" if self.unit == "pairs" else "answers to learn"

    @property
    def is_over(self) -> bool:
        """Whether this is the last step; never if their number is unknown, which is 0 here."""
        return 0 < self.total_steps <= self.step

    @property
    def last_few(self) -> list[Line]:
        """Return the last training lines after the first one, newest first, if they hold FEW pairs.

        At the end of the run half as many are enough, and all that there are.
        """
        least_lines, least_pairs = (1, FEW // 2) if self.is_over else (2, FEW)
        lines: list[Line] = []
        for line in reversed(self.recent.lines):
            if line is not self.first:
                lines.append(line)
            if len(lines) >= least_lines and sum(x["pairs"] for x in lines) >= least_pairs:
                return lines
        return lines if self.is_over else []

    def changes(
        self, name: str, mildest: Callable[..., Line] = min, *, least: int = 2
    ) -> Iterator[tuple[Line, Line | RecentLines, str]]:
        """Yield first and last line of each held-out set and of training.

        Of a held-out set, the milder of two evaluations; `least` are enough at the end of the run.
        """
        for history in self.evaluations.values():
            enough = len(history.last) >= (least if self.is_over else 2)
            if enough and all(name in line for line in (history.first, *history.last)):
                yield history.first, mildest(history.last, key=lambda line: line[name]), "held-out"
        if self.recent.is_full and name in self.first and self.recent.get(name) is not None:
            yield self.first, self.recent, "training"


def _with_prefix(line: Line, prefix: str) -> dict[str, float]:
    """Return the values whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)
    }
