"""Evaluation of whole sets: weighted by pairs, no remainder dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rather.cluster.role import Role
from rather.data.batch import Columns, PairFacts
from rather.data.pairs import PairDataset
from rather.losses.metrics import Window
from rather.pipeline.guard import OutOfMemoryRetry
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.steps import EVALUATION_CHUNK, Packing


class Interrupted(Exception):
    """The run was asked to stop during an evaluation."""


class Evaluation:
    """Evaluates whole sets. A reference that stays frozen is asked once in a run.

    `stopped` is asked between chunks, and ends an evaluation with Interrupted.
    """

    stopped: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        policy: Role,
        reference: ReferenceStream,
        packing: Packing,
        retry: OutOfMemoryRetry,
        sets: Mapping[str, PairDataset],
    ) -> None:
        self.policy, self.reference, self.packing = policy, reference, packing
        self.retry, self.sets = retry, sets
        self._reference: dict[str, list[Columns]] = {}

    def record(self, step: int) -> dict[str, float | int]:
        """Return the metrics of all sets."""
        record: dict[str, float | int] = {}
        for name, dataset in self.sets.items():
            facts, policy, reference = self._columns(name, dataset, step)
            window = Window()
            window.add(self.policy.score(facts, policy, reference), pairs=len(dataset), tokens=0)
            prefix = f"eval/{name}/" if name else "eval/"
            record |= {prefix + key: value for key, value in window.means().items()}
            record[f"{prefix}pairs"] = len(dataset)
        return record

    def forget_reference(self) -> None:
        """Discard the reference log-probs: the reference has changed."""
        self._reference.clear()

    def _columns(
        self, name: str, dataset: PairDataset, number: int
    ) -> tuple[PairFacts, Columns, Columns | None]:
        """Return facts and log-probs of a whole set, a few numbers per pair: some losses sort it."""
        facts: list[PairFacts] = []
        policy: list[Columns] = []
        known = self._reference.setdefault(name, [])
        for chunk, first in enumerate(range(0, len(dataset), EVALUATION_CHUNK)):
            if self.stopped():
                raise Interrupted
            pairs = dataset.take(range(first, min(first + EVALUATION_CHUNK, len(dataset))))
            step = self.packing.to_evaluate(pairs, number)
            facts.append(PairFacts.of_step(step.policy))
            compute = self.policy.compute_log_probs
            policy.append(self.retry.without_gradients(self.policy, step, compute))
            if chunk == len(known) and (columns := self.reference.columns(step)):
                known.append(columns)
        return PairFacts.concat(facts), concatenate(policy), concatenate(known) if known else None


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Join the columns of consecutive pairs."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
