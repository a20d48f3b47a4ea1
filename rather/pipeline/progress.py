"""Progress: the part of a run's state that is not in the workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rather.config.schema import SpikeArgs
from rather.errors import ConfigError
from rather.losses.metrics import Window
from rather.tracking.json_lines import current_name
from rather.train.nonfinite import StepLimits

log = logging.getLogger(__name__)


@dataclass
class SpikeHistory:
    """Losses and gradient norms of the last finite steps, spikes included: part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, loss: float, grad_norm: float, window: int) -> None:
        """Spikes are added too: a level that stays high widens the limits and soon is normal."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.losses = [*self.losses, loss][-window:]
            self.norms = [*self.norms, grad_norm][-window:]

    def limits(self, rule: SpikeArgs) -> StepLimits:
        """Return the limits for the next step; there are none before half a window is known."""
        if len(self.losses) < rule.window // 2:
            return StepLimits()
        return StepLimits(_limit(self.losses, rule.sigma), _limit(self.norms, rule.sigma))


def _limit(values: Sequence[float], sigma: float) -> float:
    """Values that do not vary, such as losses before the first update, do not show what is usual."""
    mean = fmean(values)
    spread = math.sqrt(fmean((value - mean) ** 2 for value in values))
    return mean + sigma * spread if spread > 0 else math.inf


@dataclass
class Progress:
    """Part of every checkpoint; the names of the fields are those of the stored keys."""

    step: int = 0
    window: Window = field(default_factory=Window)
    best: float | None = None
    best_step: int = 0
    stale_evaluations: int = 0  # since the best one
    stopped_early: bool = False
    # Numbers of the last step if a signal interrupted the evaluation after it.
    unevaluated: dict[str, Any] | None = None
    nonfinite: int = 0  # consecutive steps with a NaN or Inf in loss or gradient
    rollbacks: list[list[int]] = field(default_factory=list)  # [returned to step, because of step]
    history: SpikeHistory = field(default_factory=SpikeHistory)

    @staticmethod
    def of(saved: Mapping[str, Any]) -> Progress:
        window = Window(**saved["window"])
        window.sums = {current_name(name): total for name, total in window.sums.items()}
        nested = {
            "window": window,
            "history": SpikeHistory(**saved.get("history", {})),
        }
        return Progress(**{**saved, **nested})

    @property
    def steps_to_skip(self) -> set[int]:
        """Steps that caused a rollback: they are not taken when they come again."""
        return {step for _, step in self.rollbacks}

    def judge(self, record: Mapping[str, float], metric: str, patience: int | None) -> bool:
        """Return whether an evaluation is the best so far; set `stopped_early` after too many that are not."""
        value = record.get(metric)
        if value is None:
            raise ConfigError(
                f"metric_for_best_model: '{metric}' is not a metric of this run; it has {', '.join(record)}"
            )
        best = math.nan if self.best is None else self.best
        if math.isnan(best) or (value < best if metric.endswith("loss") else value > best):
            self.best, self.best_step, self.stale_evaluations = value, self.step, 0
            return True
        self.stale_evaluations += 1
        self.stopped_early = patience is not None and self.stale_evaluations >= patience
        if self.stopped_early:
            log.info("Early stopping: %s has not improved since step %d.", metric, self.best_step)
        return False
