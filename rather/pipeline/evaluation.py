"""Evaluation sets, whole: weighted by pairs, no remainder dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rather import faults
from rather.cluster.role import Role
from rather.data.batch import Columns, PairFacts
from rather.data.pairs import PairDataset
from rather.losses.metrics import Window
from rather.pipeline.reference_stream import Asking
from rather.pipeline.steps import EVALUATION_CHUNK, Packing


class BrokenOff(Exception):
    """The run was asked to end meanwhile."""


class Evaluation:
    """A reference that stays frozen is asked once in a run. `stopped` is asked between chunks."""

    stopped: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self, policy: Role, asking: Asking, packing: Packing, sets: Mapping[str, PairDataset]
    ) -> None:
        self.policy, self.asking, self.packing, self.sets = policy, asking, packing, sets
        self.memory = asking.memory
        self._reference: dict[str, list[Columns]] = {}

    def record(self) -> dict[str, float | int]:
        """The metrics of all sets; empty without any set."""
        faults.point("evaluate")
        record: dict[str, float | int] = {}
        for name, dataset in self.sets.items():
            facts, policy, reference = self._columns(name, dataset)
            window = Window()
            window.add(self.policy.score(facts, policy, reference), pairs=len(dataset), tokens=0)
            prefix = f"eval/{name}/" if name else "eval/"
            record |= {prefix + key: value for key, value in window.means().items()}
            record[f"{prefix}pairs"] = len(dataset)
        faults.point("evaluate.done")
        return record

    def forget_reference(self) -> None:
        """It has moved."""
        self._reference.clear()

    def _columns(
        self, name: str, dataset: PairDataset
    ) -> tuple[PairFacts, Columns, Columns | None]:
        """Facts and log-probs of a whole set, a few numbers a pair: some losses sort it."""
        facts: list[PairFacts] = []
        policy: list[Columns] = []
        known = self._reference.setdefault(name, [])
        for number, first in enumerate(range(0, len(dataset), EVALUATION_CHUNK)):
            if self.stopped():
                raise BrokenOff
            pairs = dataset.take(range(first, min(first + EVALUATION_CHUNK, len(dataset))))
            step = self.packing.to_evaluate(pairs)
            facts.append(PairFacts.of_step(step.policy))
            ask = self.policy.compute_log_probs
            policy.append(self.memory.without_gradients(self.policy, pairs, step.policy, ask))
            faults.point("evaluate.reference")
            if number == len(known) and (columns := self.asking.columns(step)):
                known.append(columns)
        return PairFacts.joined(facts), joined(policy), joined(known) if known else None


def joined(parts: Sequence[Columns]) -> Columns:
    """Of pairs one after another."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
