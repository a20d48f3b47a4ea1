"""Retry work that ran out of memory in smaller micro-batches: the results are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from rather.cluster.oom_report import largest, sentence, shortage
from rather.cluster.role import Role
from rather.data.batch import PairBatch
from rather.errors import BatchTooLarge, MemoryShortage
from rather.pipeline.steps import Packing, Step
from rather.run_folder.incidents import Incidents

log = logging.getLogger(__name__)

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
