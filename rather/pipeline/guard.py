"""Guard: what becomes of a step whose numbers are none, or far from those before. Its weights were not touched.

Every driver judges by the same numbers, so all come to the same decision.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rather.checkpoint.checkpoint import Checkpoint
from rather.config.schema import DPOConfig
from rather.errors import NonFiniteError
from rather.pipeline.progress import Progress
from rather.pipeline.saving import Saving
from rather.pipeline.steps import Course, Step
from rather.run_folder.incidents import Incidents
from rather.train.nonfinite import NOTHING_PASSES, Limits, Trouble
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

MOST_PAIRS = 256  # listed in one incident
FIX = "Look at the pairs and layers in incidents.jsonl; lower the learning rate, or train in bf16 or fp32."


class Guard:
    """on_nonfinite, max_nonfinite_steps and spike."""

    def __init__(self, config: DPOConfig, course: Course, incidents: Incidents) -> None:
        self.config, self.course, self.incidents = config, course, incidents

    @property
    def goes_back(self) -> bool:
        spike = self.config.spike
        return self.config.on_nonfinite == "rollback" or (
            spike is not None and spike.action == "rollback"
        )

    def wants_checkpoint(self, progress: Progress, saving: Saving) -> bool:
        """To go back to: of the start, also from another run's checkpoint, and of what a rollback left to remember."""
        went_back = progress.step in (to for to, _ in progress.rollbacks[-1:])
        return self.goes_back and (went_back or not saving.has_own)

    def limits(self, progress: Progress, step: Step) -> Limits | None:
        """What the workers hold loss and gradient norm against before they take the step."""
        if step.number in progress.left_out:
            return NOTHING_PASSES
        spike = self.config.spike
        return progress.history.limits(spike) if spike and spike.action != "log" else None

    def passes(self, progress: Progress, step: Step, result: StepResult) -> bool:
        """Whether the run goes on from this step; else it goes back. Raises where it must end."""
        if step.number in progress.left_out:
            log.info("step %d is left out: the run went back because of it", step.number)
            return True
        if result.trouble:
            return self._skips(progress, step, result, result.trouble)
        if result.held != "overflow":
            progress.nonfinite = 0
        return self._is_calm(progress, step, result)

    def _skips(self, progress: Progress, step: Step, result: StepResult, trouble: Trouble) -> bool:
        action, most = (
            self.config.on_nonfinite,
            min(self.config.max_nonfinite_steps, self.course.total_steps),
        )
        progress.nonfinite += 1
        told = f"step {step.number}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
        self.incidents.add(
            "nonfinite",
            step.number,
            action=action,
            loss=result.loss,
            grad_norm=result.grad_norm,
            ranks=trouble.ranks,
            layers=trouble.layers,
            layers_lost=trouble.layers_lost,
            **self._listed(step, trouble.pairs),
        )
        log.warning("%s; the step was not taken, the weights are untouched", told)
        if action == "stop":
            raise NonFiniteError(
                f"{told} (on_nonfinite: stop); the weights were not touched. {FIX}"
            )
        if action == "skip" and progress.nonfinite >= most:
            raise NonFiniteError(
                f"{told}, the last of {most} such steps in a row (max_nonfinite_steps). {FIX}"
            )
        return action != "rollback"

    def _is_calm(self, progress: Progress, step: Step, result: StepResult) -> bool:
        spike = self.config.spike
        if spike is None:
            return True
        limits = progress.history.limits(spike)
        progress.history.add(result.loss, result.grad_norm, spike.window)
        if result.held == "overflow" or not limits.exceeded(result.loss, result.grad_norm):
            return True
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
        usual = {"loss_limit": limits.loss, "grad_norm_limit": limits.grad_norm}
        self.incidents.add("spike", step.number, action=spike.action, **numbers, **usual)
        taken = "taken" if spike.action == "log" else "not taken"
        told = (step.number, result.loss, limits.loss, result.grad_norm, limits.grad_norm, taken)
        log.warning(
            "step %d: a spike: loss %.4g (limit %.4g), gradient norm %.4g (limit %.4g); it was %s",
            *told,
        )
        return spike.action != "rollback"

    def _listed(self, step: Step, places: Sequence[int]) -> dict[str, Any]:
        """Pairs as their owner knows them. Where only the sum of gradients is no number, it may be any of the step."""
        listed = list(places or range(len(step.pairs)))
        train, files = self.course.data.train, self.course.data.report["train"]["files"]
        rows = self.course.order.step(step.number - 1)
        sources, numbers = train.column("source")[rows], train.column("number")[rows]
        named = []
        for place in listed[:MOST_PAIRS]:
            own = {"id": step.pairs[place].id} if step.pairs[place].id else {}
            file = files[sources[place]]
            named.append({**own, "file": file["path"], file["unit"]: int(numbers[place])})
        return {"found": "pairs" if places else "step", "pair_count": len(listed), "pairs": named}

    def gone_back(
        self, saving: Saving, progress: Progress, step: Step
    ) -> tuple[Checkpoint, Progress]:
        """To the newest good checkpoint. The step that led back is left out when it comes again."""
        newest = saving.newest()
        if newest is None or newest.step in (to for to, _ in progress.rollbacks):
            where = (
                f"step {newest.step}, to which it went back before"
                if newest
                else "anywhere: no checkpoint is good"
            )
            raise NonFiniteError(f"step {step.number}: the run cannot go back to {where}. {FIX}")
        before = [*progress.rollbacks, [newest.step, step.number]]
        self.incidents.add("rollback", step.number, to=newest.step)
        log.warning(
            "step %d: back to step %d; it will be left out when it comes again",
            step.number,
            newest.step,
        )
        restored = saving.restore(newest)
        restored.rollbacks = before
        return newest, restored
