"""Where a run stands: all that is not in the workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rather.config.schema import DPOConfig
from rather.errors import ConfigError
from rather.losses.metrics import Window
from rather.pipeline.spikes import History
from rather.tracking.json_lines import current_name

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Part of every checkpoint."""

    step: int = 0
    window: Window = field(default_factory=Window)
    best: float | None = None
    best_step: int = 0
    stale_evaluations: int = 0  # since the best one
    stopped_early: bool = False
    unevaluated: dict[str, Any] | None = (
        None  # numbers of the last step, where a signal broke off its evaluation
    )
    nonfinite: int = 0  # steps in a row whose loss or gradient was no number
    rollbacks: list[list[int]] = field(default_factory=list)  # [went back to step, because of step]
    history: History = field(default_factory=History)

    @staticmethod
    def of(saved: Mapping[str, Any]) -> Progress:
        window = Window(**saved["window"])
        window.sums = {current_name(name): total for name, total in window.sums.items()}
        nested = {
            "window": window,
            "history": History(**saved.get("history", {})),
        }
        return Progress(**{**saved, **nested})

    @property
    def left_out(self) -> set[int]:
        """Steps that the run went back because of: not taken when they come again."""
        return {step for _, step in self.rollbacks}

    def saved(self) -> dict[str, Any]:
        return asdict(self)

    def judge(self, record: Mapping[str, float], config: DPOConfig) -> bool:
        """Whether an evaluation is the best one so far; `stopped_early` where too many were not."""
        metric, patience = config.metric_for_best_model, config.early_stopping_patience
        value = record.get(metric)
        if value is None:
            raise ConfigError(
                f"metric_for_best_model: there is no '{metric}'; there are {', '.join(record)}"
            )
        best = math.nan if self.best is None else self.best
        if math.isnan(best) or (value < best if metric.endswith("loss") else value > best):
            self.best, self.best_step, self.stale_evaluations = value, self.step, 0
            return True
        self.stale_evaluations += 1
        self.stopped_early = patience is not None and self.stale_evaluations >= patience
        if self.stopped_early:
            log.info("stopping early: %s has not improved since step %d", metric, self.best_step)
        return False
