"""Progress: what a run has counted and decided so far. It is part of every checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rather.config.schema import SpikeArgs
from rather.errors import ConfigError, DataError, NonFiniteError
from rather.losses.gain import LEAST, Gain
from rather.losses.metrics import Window
from rather.losses.objective import Running
from rather.tracking.json_lines import FALLS, current_name
from rather.tracking.outcome import skipped_text
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)


@dataclass
class SpikeHistory:
    """Losses and gradient norms of the last finite steps: part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, loss: float, grad_norm: float, window: int) -> None:
        """Spikes are added too: a level that stays high widens the limits and soon is normal."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.losses = [*self.losses, loss][-window:]
            self.norms = [*self.norms, grad_norm][-window:]

    def limits(self, rule: SpikeArgs) -> StepLimits:
        """Return the limits for the next step; there are none before half a window is known, or if
        values do not vary, as losses before the first update."""
        found = []
        for values in (self.losses, self.norms) if len(self.losses) >= rule.window // 2 else ():
            mean = fmean(values)
            spread = math.sqrt(fmean((value - mean) ** 2 for value in values))
            found.append(mean + rule.sigma * spread if spread > 0 else math.inf)
        return StepLimits(*found)


@dataclass
class Progress:
    """Part of every checkpoint; the names of the fields are those of the stored keys."""

    step: int = 0
    window: Window = field(default_factory=Window)
    best: float | None = None
    best_step: int = 0
    # Of the best model's answers if a judge selects it, by prompt; empty: the first model's.
    best_scores: dict[str, float] = field(default_factory=dict)
    judged: int = 0  # evaluations whose answers a judge compared
    stale_evaluations: int = 0  # since the best one
    stopped_early: bool = False
    # Numbers of the last step if a signal interrupted the evaluation after it.
    unevaluated: dict[str, Any] | None = None
    nonfinite: int = 0  # consecutive steps with a NaN or Inf in loss or gradient
    rollbacks: list[list[int]] = field(default_factory=list)  # [returned to step, because of step]
    history: SpikeHistory = field(default_factory=SpikeHistory)
    skipped: dict[str, int] = field(default_factory=dict)  # steps by reason
    idle: int = 0  # updates that could not change a weight
    # The number and mean reward of all rows so far, for a loss that needs it.
    running: Running = field(default_factory=lambda: [0, 0.0])
    # The base model, before the first step: its drift on each set, and what it can do.
    base: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(saved: Mapping[str, Any], updates: int) -> Progress:
        window = Window(**saved["window"])
        window.sums = {current_name(name): total for name, total in window.sums.items()}
        history = SpikeHistory(**saved.get("history", {}))
        older = {"skipped": {"unknown": max(0, saved["step"] - updates)}}  # did not count them
        return Progress(**{**older, **saved, "window": window, "history": history})

    def count(self, result: StepResult, weight_decay: float) -> None:
        """Count a step that is done: why it was skipped, or that it could change nothing."""
        reason = "rollback" if self.step in self.steps_to_skip else result.skip_reason
        if reason:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
        elif not result.lr or not (result.grad_norm or weight_decay):
            self.idle += 1

    def outcome(self) -> dict[str, Any]:
        """Return what rather.tracking.outcome describes, as far as it needs no weights."""
        skipped = sum(self.skipped.values())
        counts = {"steps": self.step, "updates": self.step - skipped, "skipped_steps": skipped}
        return {**counts, "skip_reasons": self.skipped, "idle_updates": self.idle}

    def refuse_no_update(self) -> None:
        """Raise an error if every step of a finished run was skipped."""
        found = self.outcome()
        if found["updates"] or not self.step:
            return
        text = f"no update was made: {skipped_text(found)}. No model was exported."
        if self.skipped.keys() <= {"no_weight"}:
            raise DataError(f"0 usable pairs: {text} Give pairs a weight above 0.")
        raise NonFiniteError(f"{text} Look at incidents.jsonl, or train in bf16 or fp32.")

    @property
    def steps_to_skip(self) -> set[int]:
        """Steps that caused a rollback: they are not taken when they come again."""
        return {step for _, step in self.rollbacks}

    def judge(
        self,
        record: Mapping[str, float],
        metric: str,
        patience: int | None,
        problem: str = "",
        scores: Mapping[str, float] | None = None,
    ) -> bool:
        """Return whether an evaluation is the best so far; stop after too many that are not.

        A model with a `problem` is never the best. With `scores` of a judge, by prompt, it must be
        better beyond the interval of their differences from the best model's.
        """
        value = record.get(metric)
        if value is None:
            raise ConfigError(
                f"metric_for_best_model: '{metric}' is not a metric of this run; it has "
                f"{', '.join(record)}"
            )
        best = math.nan if self.best is None else self.best
        self.judged += bool(scores)
        if problem:
            log.warning("step %d: the model cannot be the best: %s", self.step, problem)
        elif (
            math.isnan(best) or (value < best if metric.endswith(FALLS) else value > best)
        ) and self._is_shown(scores):
            self.best, self.best_step, self.stale_evaluations = value, self.step, 0
            self.best_scores = dict(scores or {})
            return True
        self.stale_evaluations += 1
        self.stopped_early = patience is not None and self.stale_evaluations >= patience
        if self.stopped_early:
            log.info("%s", self.stop_reason(metric))
        return False

    def _is_shown(self, scores: Mapping[str, float] | None) -> bool:
        """Return whether a judge's scores show that a model is better; without scores it is."""
        if not scores:
            return True
        before = self.best_scores or dict.fromkeys(scores, 0.5)
        gains = [score - before[prompt] for prompt, score in scores.items() if prompt in before]
        if len(gains) < LEAST:
            text = "%d prompts cannot show that a model is better; give eval_prompts %d or more"
            log.warning(text, len(gains), LEAST)
            return False
        return Gain.of(gains, looks=self.judged).is_certain

    def stop_reason(self, metric: str) -> str:
        """Return why the run stopped early."""
        return (
            f"Early stopping at step {self.step}: {metric} was best at step {self.best_step} "
            f"({self.best:.4g}); {self.stale_evaluations} evaluations since then were not better."
        )


@dataclass
class RunState:
    """What changes from step to step. A resume or a rollback replaces `progress`."""

    progress: Progress = field(default_factory=Progress)
    position: Mapping[str, Any] | None = None  # of the source of steps, after the last step
    is_over: bool = False  # no further step is taken
    began_with_evaluation: bool = False  # the first step of this start has not been taken yet
