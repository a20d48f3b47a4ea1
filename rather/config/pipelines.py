"""Pipeline schedules: the stages of each rank, and the micro-batches that a schedule takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ScheduleRule(NamedTuple):
    """The requirements of a schedule; `virtual` is the number of stages per rank."""

    least_virtual: int
    most_virtual: int | None
    v_shaped: bool = False  # the first rank holds the first stage and the last
    splits_backward: bool = False  # gradients of inputs first, those of weights when there is time


SCHEDULES = {
    "gpipe": ScheduleRule(1, 1),
    "1f1b": ScheduleRule(1, 1),
    "interleaved": ScheduleRule(2, None),
    "zero_bubble": ScheduleRule(1, None, splits_backward=True),
    "zbv": ScheduleRule(2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleRule(2, 2, v_shaped=True, splits_backward=True),
}


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of `ranks` ranks with `virtual` stages each."""

    ranks: int
    schedule: str = "1f1b"
    virtual: int = 1

    @staticmethod
    def of(ranks: int, schedule: str | None, virtual: int | None) -> Pipeline:
        """Return a pipeline; virtual stages are interleaved by default, others run 1f1b."""
        name = schedule or ("interleaved" if (virtual or 1) > 1 else "1f1b")
        return Pipeline(ranks, name, virtual or SCHEDULES[name].least_virtual)

    @property
    def rule(self) -> ScheduleRule:
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def problem(self) -> str | None:
        """Return why the schedule cannot have this many stages per rank."""
        low, high = self.rule.least_virtual, self.rule.most_virtual
        if low <= self.virtual <= (high or self.virtual):
            return None
        return f"'{self.schedule}' takes {low} to {high or 'any'} stages a rank, not {self.virtual}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        if self.rule.v_shaped:
            return rank, 2 * self.ranks - 1 - rank
        return tuple(range(rank, self.stages, self.ranks))

    def rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self.ranks) if stage in self.stages_of(rank))

    def layers_of(self, stage: int, layers: int) -> range:
        """Return equal shares; the first stages get the remainder, for the last has the head."""
        share, over = divmod(layers, self.stages)
        first = stage * share + min(stage, over)
        return range(first, first + share + (stage < over))

    @property
    def multiple(self) -> int:
        """A step whose micro-batches are a multiple of this needs no empty ones."""
        return self.stages if self.rule.v_shaped else self.ranks

    def microbatches(self, bins: int) -> int:
        """Return the smallest number >= `bins` that the schedule takes."""
        number = max(bins, self.multiple)
        if self.schedule in ("interleaved", "zero_bubble"):
            # Each of the number // ranks rounds takes a whole number of micro-batches.
            while number % (number // self.ranks):
                number += 1
        return number
