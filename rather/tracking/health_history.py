"""What the metrics of a run have told so far, as far as its health is concerned: a few lines, however long it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

Line = Mapping[str, float]

LINES, PAIRS = 8, 256  # of a window, both at least: the accuracy of 256 pairs is known to +- 0.06
LATEST = 4  # lines of training that are called the last
ENOUGH = 100  # held-out pairs: their accuracy is known to +- 0.1
TWICE = 2  # evaluations in a row, before one is believed


class Recent(Mapping[str, float]):
    """The last lines of training, so many that they hold enough pairs; read like a line, it gives their means.

    These are computed when a rule asks for them: with one pair a line there are hundreds of lines.
    """

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()
        self.pairs = 0

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.pairs += int(line.get("pairs", 0))
        while len(self.lines) > LINES and self.pairs - self.lines[0].get("pairs", 0) >= PAIRS:
            self.pairs -= int(self.lines.popleft().get("pairs", 0))

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= LINES and self.pairs >= PAIRS

    def mean(self, name: str) -> float | None:
        """Over pairs; None where no line tells it."""
        told = [(line[name], line.get("pairs", 1.0)) for line in self.lines if name in line]
        weight = sum(pairs for _, pairs in told)
        return sum(value * pairs for value, pairs in told) / weight if weight else None

    def latest(self, name: str) -> float | None:
        """The median of the last few lines, which one spike does not move; None where a line does not tell it."""
        told = [line[name] for line in list(self.lines)[-LATEST:] if name in line]
        return median(told) if len(told) == LATEST else None

    def __getitem__(self, name: str) -> float:
        value = float(self.pairs) if name == "pairs" else self.mean(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter({name: None for line in self.lines for name in line})

    def __len__(self) -> int:
        return len(set(self))


class Best(NamedTuple):
    loss: float
    step: int
    train_loss: float | None  # of the last lines of training then


@dataclass
class Held:
    """Evaluations of one set."""

    first: Line
    best: Best
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=TWICE))  # after the first

    @property
    def is_believed(self) -> bool:
        return len(self.last) == TWICE

    def is_rising(self, share: float) -> bool:
        """Whether the last losses all lie above the best by a share of the first."""
        least = self.best.loss + share * abs(self.first["loss"])
        return self.is_believed and all(line["loss"] > least for line in self.last)


@dataclass
class History:
    """Takes record after record of metrics.jsonl; what a rule may ask."""

    total_steps: int
    step: int = 0
    first: Line = field(default_factory=dict)  # line of training
    recent: Recent = field(default_factory=Recent)
    held: dict[str, Held] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        line = {name: float(value) for name, value in record.items() if _is_number(value)}
        self.step = int(record["step"])
        if "pairs" in line:
            self.first = self.first or line
            self.recent.add(line)
        for prefix in [
            name.removesuffix("loss")
            for name in line
            if name.startswith("eval/") and _is_loss(name)
        ]:
            own = {
                name.removeprefix(prefix): value
                for name, value in line.items()
                if name.startswith(prefix)
            }
            self._evaluated(prefix.removeprefix("eval/").removesuffix("/"), own)
        answers = "eval/answers/"
        self.answers |= {
            name.removeprefix(answers): value
            for name, value in line.items()
            if name.startswith(answers)
        }

    def _evaluated(self, name: str, line: Line) -> None:
        best = Best(line["loss"], self.step, self.recent.mean("loss"))
        held = self.held.get(name)
        if held is None:
            self.held[name] = Held(line, best)
            return
        held.last.append(line)
        if line["loss"] < held.best.loss:
            held.best = best

    def start(self, name: str) -> float | None:
        """Of the first line of training: before the first update, where each step has one."""
        return self.first.get(name)

    def changes(self, name: str) -> Iterator[tuple[Line, Line]]:
        """(then, now) of each held-out set, by the milder of its last evaluations, and of training."""
        for held in self.held.values():
            if held.is_believed and all(name in line for line in (held.first, *held.last)):
                yield held.first, min(held.last, key=lambda line: line[name])
        if self.recent.is_full and name in self.first and name in self.recent:
            yield self.first, self.recent

    def accuracies(self) -> Iterator[tuple[Line, str]]:
        """Lines that tell an accuracy of enough pairs, and what these are."""
        name = "rewards/accuracies"
        for held in self.held.values():
            if (
                held.is_believed
                and held.last[-1].get("pairs", 0) >= ENOUGH
                and name in held.last[-1]
            ):
                yield max(held.last, key=lambda line: line.get(name, 1.0)), "held-out"
        if self.recent.is_full and name in self.recent:
            yield self.recent, "training"

    def answered(self, name: str) -> tuple[float | None, float | None]:
        """By the policy and by the reference, at the last evaluation."""
        return self.answers.get(f"policy/{name}"), self.answers.get(f"reference/{name}")


def _is_number(value: Any) -> bool:
    """metrics.jsonl has null for what is none."""
    return isinstance(value, int | float) and math.isfinite(value)


def _is_loss(name: str) -> bool:
    return name.rpartition("/")[2] == "loss"
