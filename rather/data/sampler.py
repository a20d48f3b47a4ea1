"""The order of pairs: a pure function of (seed, epoch). The position in it is one integer, the step.

Nothing here depends on the number of devices or on what was drawn before, so a resumed run, or one on another
number of workers, sees the same pairs in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Part = tuple[int, int, float]  # first row, end row, mixing weight


@dataclass(frozen=True)
class Order:
    """Which pairs each optimizer step takes. A step never crosses an epoch; the last of an epoch may be smaller."""

    parts: tuple[Part, ...]
    batch: int
    seed: int

    @property
    def pairs_per_epoch(self) -> int:
        return sum(_drawn(part) for part in self.parts)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.pairs_per_epoch / self.batch)

    def steps(self, epochs: float) -> int:
        """Optimizer steps in so many epochs, which may be fractional."""
        whole = int(epochs)
        rest = math.ceil((epochs - whole) * self.pairs_per_epoch / self.batch - 1e-9)
        return whole * self.steps_per_epoch + rest

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """All rows of one epoch in order. A part of weight 2 comes twice, one of 0.5 gives a fresh half each epoch."""
        return _epoch(self.parts, self.seed, epoch)

    def step(self, step: int) -> NDArray[np.int64]:
        """Rows of the optimizer step that follows `step` finished ones."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[place * self.batch : (place + 1) * self.batch]


@lru_cache(maxsize=2)  # every step of an epoch asks for it, and at its end also for the next
def _epoch(parts: tuple[Part, ...], seed: int, epoch: int) -> NDArray[np.int64]:
    random = np.random.Generator(np.random.PCG64([seed, epoch]))
    return random.permutation(np.concatenate([_draw(part, random) for part in parts]))


def _drawn(part: Part) -> int:
    first, end, weight = part
    return round((end - first) * weight)


def _draw(part: Part, random: np.random.Generator) -> NDArray[np.int64]:
    first, end, _ = part
    rows = np.arange(first, end)
    times, rest = divmod(_drawn(part), max(1, len(rows)))
    return np.concatenate([np.tile(rows, times), random.permutation(rows)[:rest]])
