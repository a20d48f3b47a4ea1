"""What happens after a step with NaN, Inf or a spike, and after one that ran out of memory.

The workers have not applied such a step. Every driver decides by the same numbers, so all drivers
decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rather.cluster.launch import Role, Roles
from rather.cluster.memory import largest, sentence, shortage
from rather.config.schema import SpikeArgs
from rather.data import shares
from rather.data.batch import PairBatch
from rather.errors import BatchTooLarge, MemoryShortage, NonFiniteError
from rather.pipeline.hook import Hook
from rather.pipeline.progress import RunState
from rather.pipeline.steps import Packing, Step, StepSource, Use
from rather.run_folder.layout import Incidents
from rather.train.nonfinite import NOTHING_PASSES, NonFiniteReport, StepLimits
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

T = TypeVar("T")
Batches = Sequence[PairBatch]
MOST_PAIRS = 256  # listed in one incident
SMALLEST_BUDGET = 512  # tokens; micro-batches are not made smaller than this
FIX = (
    "Look at the pairs and layers in incidents.jsonl; lower the learning rate, or train in bf16 or "
    "fp32."
)


class RollBack(Exception):
    """The run returns to its last checkpoint because of a step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


@dataclass
class Guard(Hook):
    """Applies on_nonfinite, max_nonfinite_steps and spike; raises RollBack or ends the run."""

    on_nonfinite: str
    most: int  # steps in a row with NaN or Inf
    spike: SpikeArgs | None
    source: StepSource
    incidents: Incidents
    state: RunState

    @property
    def rolls_back(self) -> bool:
        return "rollback" in (self.on_nonfinite, self.spike and self.spike.action)

    def limits(self, step: Step) -> StepLimits | None:
        """Return the loss and gradient norm above which the workers do not apply the step."""
        progress = self.state.progress
        if step.number in progress.steps_to_skip:
            return NOTHING_PASSES
        spike = self.spike
        return progress.history.limits(spike) if spike and spike.action != "log" else None

    def after_step(self, step: Step, result: StepResult) -> None:
        progress = self.state.progress
        if step.number in progress.steps_to_skip:
            log.info("Step %d is skipped: it caused a rollback.", step.number)
            return
        if result.nonfinite:
            progress.nonfinite += 1
            self._report_nonfinite(step, result, result.nonfinite)
            most = min(self.most, self.source.total_steps or self.most)
            text = f"step {step.number}: {result}"
            refuse_nonfinite(text, self.on_nonfinite, progress.nonfinite, most)
            if self.on_nonfinite == "rollback":
                raise RollBack(step.number)
            return
        if result.skip_reason == "no_weight" and "no_weight" not in progress.skipped:
            text = "step %d: all its pairs have weight 0; such steps are skipped and counted"
            log.warning(text, step.number)
        if result.skip_reason not in ("overflow", "no_weight"):
            progress.nonfinite = 0
        if self.spike:
            self._look_for_spike(step, result, self.spike)

    def _look_for_spike(self, step: Step, result: StepResult, rule: SpikeArgs) -> None:
        history = self.state.progress.history
        limits = history.limits(rule)
        history.add(result.loss, result.grad_norm, rule.window)
        if result.skip_reason == "overflow" or not limits.exceeded(result.loss, result.grad_norm):
            return
        self.incidents.add(
            "spike",
            step.number,
            action=rule.action,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
        )
        applied = "applied" if rule.action == "log" else "not applied"
        text = "step %d: a spike: %s (limits %.4g and %.4g); the step was %s"
        log.warning(text, step.number, result, limits.loss, limits.grad_norm, applied)
        if rule.action == "rollback":
            raise RollBack(step.number)

    def _report_nonfinite(self, step: Step, result: StepResult, found: NonFiniteReport) -> None:
        # If only the sum of the gradients is not finite, any pair of the step may be the cause.
        places = found.pairs or range(len(step.pairs))
        self.incidents.add(
            "nonfinite",
            step.number,
            action=self.on_nonfinite,
            loss=result.loss,
            grad_norm=result.grad_norm,
            ranks=found.ranks,
            layers=found.layers,
            layers_lost=found.layers_lost,
            found="pairs" if found.pairs else "step",
            pair_count=len(places),
            pairs=self.source.describe_pairs(step, places[:MOST_PAIRS]),
        )


def refuse_nonfinite(text: str, action: str, in_a_row: int, most: int) -> None:
    """Warn about a step that was not applied; raise if the run must end because of it."""
    log.warning("%s; the step was not applied, the weights are unchanged", text)
    if action == "stop":
        raise NonFiniteError(f"{text} (on_nonfinite: stop); the weights are unchanged. {FIX}")
    if action == "skip" and in_a_row >= most:
        raise NonFiniteError(
            f"{text}, the last of {most} such steps in a row (max_nonfinite_steps). {FIX}"
        )


@dataclass
class OutOfMemoryRetry:
    """Repeats work with smaller micro-batches, and remembers the size that fitted in `packing`."""

    packing: Packing
    roles: Roles
    incidents: Incidents

    def run(self, use: Use, step: Step, work: Callable[[Batches], T]) -> T:
        """Return what `work` makes of the micro-batches of a step."""
        role: Role = self.roles.actor_train
        batches, sizes = step.policy, self.packing.tokens
        if use == "reference" and self.roles.reference:
            role, batches = self.roles.reference, step.reference
        if isinstance(batches, shares.Batches) and batches.budget > sizes[use]:
            # Packed ahead, before memory ran out: all later steps have the smaller size.
            batches = replace(batches, budget=sizes[use])
        problem: MemoryShortage
        while True:
            try:
                return work(batches)
            except torch.OutOfMemoryError as error:
                problem = shortage(error)
            except BatchTooLarge as error:
                problem = error
            # Outside the except block: the exception no longer keeps alive what filled the memory.
            role.forget()
            tokens = largest(batches)
            # A step that the caller has packed for a larger budget is packed for the one of now.
            wanted = sizes[use] if tokens > sizes[use] else tokens // 2
            if wanted >= SMALLEST_BUDGET:
                if isinstance(batches, shares.Batches):
                    batches = replace(batches, budget=wanted)
                else:
                    batches = self.packing.pack(step.pairs, use, wanted)
            if largest(batches) >= tokens:  # a single pair fills the micro-batch
                raise problem
            if wanted < sizes[use]:
                sizes[use], said = wanted, sentence(problem)
                facts = {"role": role.role, "said": said, "tokens": tokens, "budget": wanted}
                self.incidents.add("out_of_memory", step.number, **facts)
                text = "%s: %s From now on micro-batches have up to %d tokens."
                log.warning(text, role.role, said, wanted)
