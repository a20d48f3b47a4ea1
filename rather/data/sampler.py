"""The order of pairs: a pure function of (seed, epoch). The position is one integer, the step.

Nothing here depends on the number of devices or on earlier draws, so a resumed run, or one on
another number of workers, sees the same pairs in the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Part = tuple[int, int, float]  # first row, end row, mixing weight
Rows = NDArray[np.integer[Any]]
Places = NDArray[np.int64]


class PicklesFields:
    """A dataclass that is pickled without what was computed from its fields."""

    def __getstate__(self) -> dict[str, Any]:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Order(PicklesFields):
    """Which pairs each optimizer step takes.

    A step never crosses an epoch; the last one of an epoch may be smaller.
    `groups` are the first rows of groups that stay together: groups are drawn instead of rows, and
    a step takes whole ones until the next would be too much. So steps differ in their pairs, and
    epochs in their steps.
    """

    parts: tuple[Part, ...]
    batch: int
    seed: int
    groups: Places | None = None

    def pairs_in(self, epoch: int) -> int:
        """Return the pairs of an epoch; with groups and fractional weights, epochs differ."""
        if self.groups is not None:
            return len(self.epoch(epoch))
        return sum(round((end - first) * weight) for first, end, weight in self.parts)

    @cached_property
    def steps_in(self) -> Callable[[int], int]:
        """Return the steps of an epoch; remembered, because counting groups draws the epoch."""
        if self.groups is None:
            return lambda _: math.ceil(self.pairs_in(0) / self.batch)
        return lru_cache(None)(lambda epoch: len(self._epoch(epoch)[1]) - 1)

    def steps(self, epochs: float, limit: float = math.inf) -> int:
        """Return the optimizer steps in so many (perhaps fractional) epochs, at most `limit`."""
        full_epochs = int(epochs)
        steps = 0
        for epoch in range(full_epochs):
            steps += self.steps_in(epoch)
            if steps >= limit:
                return int(limit)
        if epochs > full_epochs:
            pairs = (epochs - full_epochs) * self.pairs_in(full_epochs)
            _, cuts = self._epoch(full_epochs)
            # In floating point, 1.1 - 1 is more than 0.1.
            steps += int(np.searchsorted(cuts, pairs - 1e-9 * self.batch))
        return int(min(steps, limit))

    def epoch(self, epoch: int) -> Rows:
        """Return all rows of one epoch in order.

        A part of weight 2 comes twice, one of 0.5 gives a new half each epoch.
        """
        return self._epoch(epoch)[0]

    def step(self, step: int) -> Rows:
        """Return the rows of the optimizer step that follows `step` finished ones."""
        epoch, step_in_epoch = self.place(step)
        rows, cuts = self._epoch(epoch)
        return rows[cuts[step_in_epoch] : cuts[step_in_epoch + 1]]

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch and number within it of the step that follows `step` finished ones."""
        if self.groups is None:
            return divmod(step, self.steps_in(0))
        epoch = 0
        while step >= self.steps_in(epoch):
            step -= self.steps_in(epoch)
            epoch += 1
        return epoch, step

    def epoch_at(self, step: int) -> float:
        """Return how many epochs `step` finished steps are."""
        if self.groups is None or step == 0:
            return step / self.steps_in(0)
        epoch, step_in_epoch = self.place(step - 1)
        return epoch + (step_in_epoch + 1) / self.steps_in(epoch)

    def ends_epoch(self, step: int) -> bool:
        """Return whether the last of `step` finished steps was the last of an epoch."""
        epoch, step_in_epoch = self.place(step)
        return step_in_epoch == 0 and epoch > 0

    @cached_property
    def _epoch(self) -> Callable[[int], tuple[Rows, Places]]:
        """Return the rows of an epoch, and where its steps begin, with the end."""
        # Two, because prefetching needs the next epoch at the end of one.
        return lru_cache(maxsize=2)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> tuple[Rows, Places]:
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        if self.groups is None:
            rows = _shuffle(self.parts, random)
            return rows, np.append(np.arange(0, len(rows), self.batch), len(rows))
        groups_of_parts: list[Part] = []
        for first, end, weight in self.parts:
            first_group, end_group = np.searchsorted(self.groups, (first, end)).tolist()
            groups_of_parts.append((first_group, end_group, weight))
        drawn = _shuffle(groups_of_parts, random)
        sizes = np.diff(self.groups, append=max(end for _, end, _ in self.parts))[drawn]
        ends = sizes.cumsum()
        rows = np.arange(sizes.sum()) + (self.groups[drawn] - ends + sizes).repeat(sizes)
        group_ends = ends.tolist()
        cuts = [0]
        group = 0
        while group < len(group_ends):  # as many groups as a batch holds, at least one
            group = max(group + 1, bisect_right(group_ends, cuts[-1] + self.batch, lo=group))
            cuts.append(group_ends[group - 1])
        return rows, np.asarray(cuts, dtype=np.int64)


def _shuffle(parts: Sequence[Part], random: np.random.Generator) -> Rows:
    """Return drawn rows, shuffled in place and in 4 bytes each: a driver keeps them in memory."""
    drawn: list[Rows] = []
    for first, end, weight in parts:
        rows = np.arange(first, end, dtype=np.int32 if end < 1 << 31 else np.int64)
        times, remainder = divmod(round((end - first) * weight), max(1, len(rows)))
        drawn += [np.tile(rows, times), random.permutation(rows)[:remainder]]
    shuffled = np.concatenate(drawn)
    random.shuffle(shuffled)
    return shuffled
