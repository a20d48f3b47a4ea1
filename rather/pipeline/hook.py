"""Hook: what is called at points of a run."""

from __future__ import annotations

from typing import Any

from rather.checkpoint.checkpoint import Checkpoint
from rather.pipeline.steps import Step
from rather.train.rank_trainer import StepResult

Record = dict[str, Any]


class Hook:
    """Called at points of a run. A subclass overrides what it needs."""

    def before_steps(self) -> None:
        """Called before the first step of this start, and again after a rollback."""

    def after_step(self, step: Step, result: StepResult) -> None:
        """Called after each step, also after one that was not applied."""

    def on_train_begin(self) -> None:
        """Called once, before everything else."""

    def on_log(self, record: Record) -> None:
        """Called with each record of training metrics."""

    def on_evaluate(self, record: Record) -> None:
        """Called with the metrics of each evaluation."""

    def on_save(self) -> None:
        """Called when a checkpoint was taken; it may still be being written."""

    def on_rollback(self, newest: Checkpoint) -> None:
        """Called when the run has returned to a checkpoint."""

    def on_train_end(self) -> None:
        """Called after the last step, or when the run was stopped."""


class Hooks(list[Hook]):
    """The hooks of a run, in the order in which they are called."""

    def call(self, method: str, *arguments: Any) -> None:
        for hook in self:
            getattr(hook, method)(*arguments)


def is_due(step: int, every: int | None) -> bool:
    return bool(step and every and step % every == 0)
