"""Smaller micro-batches where memory falls short: the results are the same. For a role of one rank only.

Of several ranks one that runs out of memory leaves the others in a collective: there it ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from rather import faults
from rather.cluster.oom_report import largest, sentence, shortage
from rather.cluster.role import Role
from rather.cluster.spmd import SpmdCluster
from rather.data.batch import PairBatch, TokenPair
from rather.errors import BatchTooLarge, MemoryShortage
from rather.pipeline.steps import Packing
from rather.run_folder.incidents import Incidents

log = logging.getLogger(__name__)

SMALLEST_BUDGET = 512  # tokens of a micro-batch that running out of memory leads to

T = TypeVar("T")
Batches = Sequence[PairBatch]


class Memory:
    """Repeats work that ran out of memory, in smaller pieces."""

    def __init__(self, packing: Packing, incidents: Incidents) -> None:
        self.packing, self.incidents = packing, incidents

    def without_gradients(
        self,
        worker: Role,
        pairs: Sequence[TokenPair],
        batches: Batches,
        work: Callable[[Batches], T],
    ) -> T:
        """`work` on pairs that the worker's role only looks at."""
        role, most = worker.worker_config, self.packing.without_gradients_tokens
        pack = partial(self.packing.without_gradients, pairs, role)
        result, most[worker.role] = self.fitting(
            worker, batches, self.packing.most_tokens(role), pack, work
        )
        return result

    def fitting(
        self,
        worker: Role,
        batches: Batches,
        budget: int,
        pack: Callable[[int], Batches],
        work: Callable[[Batches], T],
    ) -> tuple[T, int]:
        """What `work` gives, and the budget with which it did: `pack` makes the micro-batches of a smaller one."""
        if isinstance(worker, SpmdCluster):
            return work(batches), budget
        while True:
            try:
                return work(batches), budget
            except torch.OutOfMemoryError as error:
                problem = shortage(error)
            except BatchTooLarge as error:
                problem = error
            worker.forget()  # here, where the exception no longer holds what filled the memory
            batches, budget = self._smaller(worker, batches, budget, pack, problem)

    def _smaller(
        self,
        worker: Role,
        batches: Batches,
        budget: int,
        pack: Callable[[int], Batches],
        problem: MemoryShortage,
    ) -> tuple[Batches, int]:
        tokens = largest(batches)
        stale = tokens > budget  # packed ahead, for an older budget
        wanted = budget if stale else tokens // 2
        packed = pack(wanted) if wanted >= SMALLEST_BUDGET else batches
        if largest(packed) >= tokens:  # one pair fills it
            raise problem
        if stale:
            return packed, budget
        said = sentence(problem)
        facts = {"role": worker.role, "said": said, "tokens": tokens, "budget": wanted}
        self.incidents.add("out_of_memory", faults.step(), **facts)
        log.warning(
            "%s: %s From now on micro-batches have up to %d tokens.", worker.role, said, wanted
        )
        return packed, wanted
