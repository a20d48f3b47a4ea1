"""RoleOnRanks: the calls of a role whose model is divided over several ranks, in terms of what
ranks can do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rather.cluster.preflight import Ledger, Room, need_of
from rather.config.schema import DPOConfig, RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.parallel.stages import SCORED
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import StepResult


class RoleOnRanks:
    """A role on Ray or under torchrun. Every call is one of `_run`, which the two do
    differently."""

    rooms: Sequence[Room]  # the memory that each rank found before any model was there

    def __init__(self, role: str, config: DPOConfig, kind: str, ledger: Ledger) -> None:
        self.role, self.config, self.kind, self.ledger = role, config, kind, ledger
        self.worker_config: RoleConfig = config.reference
        if role == "actor_train":
            self.worker_config = config.actor_train
        self.layout = layout(self.worker_config)

    def _run(
        self,
        method: str,
        *args: Any,
        batches: Sequence[PairBatch] = (),
        one: bool = False,
        exchange: bool = False,
    ) -> list[Any]:
        """Call a method on all ranks and return their values.

        `batches` are dealt out, as a first argument. With `one`, the value of one rank is enough.
        Without `exchange`, a process of torchrun may return its own value alone, and need not wait
        for the others.
        """
        raise NotImplementedError

    def _shared_folder(self, folder: Path) -> AbstractContextManager[Path]:
        """Make an empty folder next to `folder` for all ranks, and remove it afterwards."""
        raise NotImplementedError

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        need = need_of(self.config, self.worker_config, self.kind, model)
        self.ledger.add(self.role, need, self.rooms)
        self._run("initialize", total_steps, model)

    def embedding_rows(self) -> int:
        return int(self._run("embedding_rows")[0])

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        return int(min(self._run("plan", largest_pair, exchange=True)))

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        *,
        limits: StepLimits | None = None,
    ) -> StepResult:
        args = (reference, PairFacts.of_step(batches), limits)
        found: list[StepResult] = self._run("train_step", *args, batches=batches)
        return found[0]

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        places = torch.cat([batch.pair_P for batch in batches]).sort().values
        found: list[Columns] = self._run("compute_log_probs", places, batches=batches)
        return found[0]

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return dict(self._run("score", facts, policy, reference, one=True)[0])

    def park(self) -> bool:
        return False

    def forget(self) -> None:
        self._run("forget")

    def peak_memory(self) -> int:
        return int(max(self._run("peak_memory")))

    def numbers(self) -> dict[str, Any]:
        return dict(self._run("numbers", one=True)[0])

    def write_state(self, folder: Path) -> None:
        """Every rank writes its shards; the folder must be one that all machines see."""
        self._run("write_state", folder.absolute())

    def write_reference(self, folder: Path) -> None:
        self._run("write_reference", folder.absolute())

    def finish_writing(self) -> None:
        self._run("finish_writing")

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        self._run("read_state", path.absolute(), numbers)

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        written = self._run("write_weights", folder.absolute(), group, exchange=True)
        return {name: facts for each in written for name, facts in each.items()}

    def mix_weights(self, weights: Path, share: float) -> None:
        self._run("mix_weights", weights.absolute(), share, exchange=True)

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        """All ranks write what they hold, and one makes the model of it, a tensor at a time."""
        with self._shared_folder(folder) as shards:
            self.write_weights(shards, "model")
            args = (shards, "model", tokenizer, folder.absolute(), card)
            self._run("export", *args, one=True, exchange=True)


def shares(batches: Sequence[PairBatch], ranks: int) -> list[list[PairBatch]]:
    """Deal micro-batches out, the same number to each rank, or one would wait for another in a
    collective.

    Packing gives each rank its share. Only micro-batches whose log-probs are partly known come in
    other numbers; what is missing then are copies without pairs.
    """
    smallest = min(batches, key=lambda batch: len(batch.ids_N))
    empty = replace(
        smallest, real_tokens=0, **{name: getattr(smallest, name)[:0] for name in SCORED}
    )
    padded = [*batches, *[empty] * (-len(batches) % ranks)]
    return [padded[rank::ranks] for rank in range(ranks)]


@contextmanager
def folder_next_to(folder: Path) -> Iterator[Path]:
    """Make an empty folder on the same disk, and remove it afterwards."""
    made = folder.absolute().with_name(f".pieces-{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
