"""How long a call of workers may take: as told for its phase, or less where enough like it have been seen."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rather.config.schema import DPOConfig, Timeouts

SLACK = 10.0  # times the usual
ENOUGH, LATEST = 10, 50  # calls that make a usual time
FLOOR, COMPILES = (
    60.0,
    600.0,
)  # seconds, at least: a pause of the machine, a shape that is compiled anew


class Limit(NamedTuple):
    seconds: float
    key: str  # of `timeouts`


@dataclass
class Deadlines:
    """Of one role in its processes. What is told is never exceeded.

    Steps and evaluations have usual times, by the token: micro-batches may be halved, and the parts of an evaluation
    set are larger than steps. A save has none: disks pause, and one that goes on beside training ends when it likes.
    """

    told: Timeouts
    floor: float = FLOOR
    _seen: dict[str, deque[float]] = field(default_factory=dict)  # phase -> seconds a token

    @staticmethod
    def of(config: DPOConfig, told: Timeouts, kind: str) -> Deadlines:
        return Deadlines(told, COMPILES if kind == "cuda" and config.compile != "off" else FLOOR)

    def limit(self, phase: str, tokens: int) -> Limit:
        seen = self._seen.get(phase, ())
        key = "first_step" if tokens and not seen else phase
        told = Limit(getattr(self.told, key), key)
        if not (tokens and self.told.adaptive and len(seen) >= ENOUGH):
            return told
        return min(told, Limit(max(self.floor, SLACK * median(seen) * tokens), "adaptive"))

    def took(self, phase: str, tokens: int, seconds: float) -> None:
        if tokens:
            self._seen.setdefault(phase, deque(maxlen=LATEST)).append(seconds / tokens)
