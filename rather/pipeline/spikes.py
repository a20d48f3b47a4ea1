"""Spikes: a loss or a gradient norm far above those of the steps before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rather.config.schema import SpikeArgs
from rather.train.nonfinite import Limits


@dataclass
class History:
    """Of the last steps that had numbers, spikes among them: part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, loss: float, grad_norm: float, window: int) -> None:
        """A level that stays high is no spike for ever: what is high now widens the limits of what comes."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.losses = [*self.losses, loss][-window:]
            self.norms = [*self.norms, grad_norm][-window:]

    def limits(self, rule: SpikeArgs) -> Limits:
        """Of the next step; none before half a window is there."""
        if len(self.losses) < rule.window // 2:
            return Limits()
        return Limits(_limit(self.losses, rule.sigma), _limit(self.norms, rule.sigma))


def _limit(values: Sequence[float], sigma: float) -> float:
    """Values that do not vary, as losses before the first update, say nothing of what is usual."""
    mean = fmean(values)
    spread = math.sqrt(fmean((value - mean) ** 2 for value in values))
    return mean + sigma * spread if spread > 0 else math.inf
