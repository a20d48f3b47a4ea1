"""What happens after a step with NaN, Inf or a spike, and after one that ran out of memory.

The workers have not applied such a step. Every driver decides by the same numbers, so all drivers
decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.memory import largest, sentence, shortage
from rather.cluster.role import Role
from rather.config.schema import SpikeArgs
from rather.data.batch import PairBatch
from rather.errors import BatchTooLarge, MemoryShortage, NonFiniteError
from rather.pipeline.saving import Progress, Saving
from rather.pipeline.steps import Packing, Step, StepSource
from rather.run_folder.incidents import Incidents
from rather.train.nonfinite import NOTHING_PASSES, StepLimits
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

MOST_PAIRS = 256  # listed in one incident
FIX = (
    "Look at the pairs and layers in incidents.jsonl; lower the learning rate, or train in bf16 or "
    "fp32."
)


class Guard:
    """Applies on_nonfinite, max_nonfinite_steps and spike."""

    def __init__(
        self,
        on_nonfinite: str,
        max_nonfinite_steps: int,
        spike: SpikeArgs | None,
        source: StepSource,
        incidents: Incidents,
    ) -> None:
        self.on_nonfinite, self.spike = on_nonfinite, spike
        self.max_nonfinite_steps = min(
            max_nonfinite_steps, source.total_steps or max_nonfinite_steps
        )
        self.source, self.incidents = source, incidents

    @property
    def rolls_back(self) -> bool:
        return "rollback" in (self.on_nonfinite, self.spike and self.spike.action)

    def needs_checkpoint(self, progress: Progress, saving: Saving) -> bool:
        """Return whether to save before the first step, so that there is a checkpoint to return to."""
        just_rolled_back = progress.step in (to for to, _ in progress.rollbacks[-1:])
        return self.rolls_back and (just_rolled_back or not saving.has_own)

    def limits(self, progress: Progress, step: Step) -> StepLimits | None:
        """Return the loss and gradient norm above which the workers do not apply the step."""
        if step.number in progress.steps_to_skip:
            return NOTHING_PASSES
        spike = self.spike
        return progress.history.limits(spike) if spike and spike.action != "log" else None

    def accepts(self, progress: Progress, step: Step, result: StepResult) -> bool:
        """Return whether training continues after this step; if not, it rolls back. Raises if the
        run must end.
        """
        if step.number in progress.steps_to_skip:
            log.info("Step %d is skipped: it caused a rollback.", step.number)
            return True
        if result.nonfinite:
            return self._accepts_nonfinite(progress, step, result)
        if result.skip_reason != "overflow":
            progress.nonfinite = 0
        return self._accepts_spike(progress, step, result)

    def _accepts_nonfinite(self, progress: Progress, step: Step, result: StepResult) -> bool:
        found, action, most = result.nonfinite, self.on_nonfinite, self.max_nonfinite_steps
        assert found is not None
        progress.nonfinite += 1
        # If only the sum of the gradients is not finite, any pair of the step may be the cause.
        places = found.pairs or range(len(step.pairs))
        facts: dict[str, Any] = {
            "action": action,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "ranks": found.ranks,
            "layers": found.layers,
            "layers_lost": found.layers_lost,
            "found": "pairs" if found.pairs else "step",
            "pair_count": len(places),
            "pairs": self.source.describe_pairs(step, places[:MOST_PAIRS]),
        }
        self.incidents.add("nonfinite", step.number, **facts)
        text = f"step {step.number}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
        log.warning("%s; the step was not applied, the weights are unchanged", text)
        if action == "stop":
            raise NonFiniteError(f"{text} (on_nonfinite: stop); the weights are unchanged. {FIX}")
        if action == "skip" and progress.nonfinite >= most:
            raise NonFiniteError(
                f"{text}, the last of {most} such steps in a row (max_nonfinite_steps). {FIX}"
            )
        return action != "rollback"

    def _accepts_spike(self, progress: Progress, step: Step, result: StepResult) -> bool:
        if self.spike is None:
            return True
        limits = progress.history.limits(self.spike)
        progress.history.add(result.loss, result.grad_norm, self.spike.window)
        if result.skip_reason == "overflow" or not limits.exceeded(result.loss, result.grad_norm):
            return True
        self.incidents.add(
            "spike",
            step.number,
            action=self.spike.action,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
        )
        log.warning(
            "step %d: a spike: loss %.4g (limit %.4g), gradient norm %.4g (limit %.4g); the step was %s",
            *(step.number, result.loss, limits.loss, result.grad_norm, limits.grad_norm),
            "applied" if self.spike.action == "log" else "not applied",
        )
        return self.spike.action != "rollback"

    def roll_back(
        self, saving: Saving, progress: Progress, step: Step
    ) -> tuple[Checkpoint, Progress]:
        """Restore the newest good checkpoint. The step that caused it is skipped when it comes
        again.
        """
        newest = saving.newest()
        if newest is None or newest.step in (to for to, _ in progress.rollbacks):
            reason = (
                f"the run already rolled back to step {newest.step}, the newest checkpoint"
                if newest
                else "no checkpoint is good"
            )
            raise NonFiniteError(f"step {step.number}: cannot roll back: {reason}. {FIX}")
        rollbacks = [*progress.rollbacks, [newest.step, step.number]]
        self.incidents.add("rollback", step.number, to=newest.step)
        log.warning(
            "step %d: rolling back to step %d; step %d will be skipped when it comes again",
            *(step.number, newest.step, step.number),
        )
        restored = saving.restore(newest)
        restored.rollbacks = rollbacks
        return newest, restored


SMALLEST_BUDGET = 512  # tokens; micro-batches are not made smaller than this

T = TypeVar("T")
Batches = Sequence[PairBatch]


class OutOfMemoryRetry:
    """Repeats work with smaller micro-batches, and remembers the size that fitted in `packing`."""

    def __init__(self, packing: Packing, incidents: Incidents) -> None:
        self.packing, self.incidents = packing, incidents

    def train(self, worker: Role, step: Step, work: Callable[[Batches], T]) -> T:
        """Return what `work` makes of the step's micro-batches for training."""
        budget = self.packing.train_tokens
        assert budget is not None
        pack = partial(self.packing.policy, step.pairs)
        result, self.packing.train_tokens = self._fit(worker, step, step.policy, budget, pack, work)
        return result

    def without_gradients(self, worker: Role, step: Step, work: Callable[[Batches], T]) -> T:
        """Return what `work` makes of the micro-batches that this role only evaluates."""
        role, batches = worker.worker_config, step.policy
        if worker.role == "reference":
            batches = step.reference
        pack = partial(self.packing.without_gradients, step.pairs, role)
        budget = self.packing.most_tokens(role)
        result, fitted = self._fit(worker, step, batches, budget, pack, work)
        self.packing.without_gradients_tokens[worker.role] = fitted
        return result

    def _fit(
        self,
        worker: Role,
        step: Step,
        batches: Batches,
        budget: int,
        pack: Callable[[int], Batches],
        work: Callable[[Batches], T],
    ) -> tuple[T, int]:
        """Return the result and the budget that was small enough."""
        problem: MemoryShortage
        while True:
            try:
                return work(batches), budget
            except torch.OutOfMemoryError as error:
                problem = shortage(error)
            except BatchTooLarge as error:
                problem = error
            # Outside the except block: the exception no longer keeps alive what filled the memory.
            worker.forget()
            tokens = largest(batches)
            packed_earlier = tokens > budget  # prefetched, for a larger budget
            wanted = budget if packed_earlier else tokens // 2
            packed = pack(wanted) if wanted >= SMALLEST_BUDGET else batches
            if largest(packed) >= tokens:  # a single pair fills the micro-batch
                raise problem
            batches = packed
            if not packed_earlier:
                budget = wanted
                self._report(worker, step, problem, tokens, wanted)

    def _report(
        self, worker: Role, step: Step, problem: Exception, tokens: int, budget: int
    ) -> None:
        said = sentence(problem)
        facts = {"role": worker.role, "said": said, "tokens": tokens, "budget": budget}
        self.incidents.add("out_of_memory", step.number, **facts)
        log.warning(
            "%s: %s From now on micro-batches have up to %d tokens.", worker.role, said, budget
        )
