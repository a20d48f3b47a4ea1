"""The parts of a DPOPipeline over models and pairs that are in memory: its roles and its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rather.api.torch_optimizer import TorchOptimizer
from rather.cluster.worker import ActorWorker, RankInfo
from rather.config.schema import DPOConfig
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.feed import Feed
from rather.data.pack import pack
from rather.errors import DataError
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_length
from rather.parallel.mesh import Mesh, gather_objects
from rather.parallel.stages import parts_of
from rather.pipeline.checks import refuse_columns
from rather.pipeline.steps import NO_LIMIT, Step
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import RankTrainer, StepResult


class StepShare(NamedTuple):
    """This rank's micro-batches, and the facts of all ranks' pairs; its own begin at `first`."""

    batches: list[PairBatch]
    facts: PairFacts
    first: int = 0
    is_repeated: bool = False  # all ranks have the same tokens

    @staticmethod
    def of(batches: Sequence[PairBatch], mesh: Mesh) -> StepShare:
        """Exchange the facts with the other dp ranks. Collective."""
        facts = PairFacts.of_step(batches)
        if mesh.size("dp") == 1:
            return StepShare(list(batches), facts)
        tokens = sha256(b"".join(batch.ids_N.numpy().tobytes() for batch in batches)).hexdigest()
        gathered = gather_objects((facts, len(batches), tokens), mesh.group("dp"))
        all_facts, counts, digests = zip(*gathered, strict=True)
        if len(set(counts)) > 1:
            raise DataError(
                f"the ranks have {list(counts)} micro-batches of one step; give each as many."
            )
        first = sum(len(each.weight) for each in all_facts[: mesh.rank("dp")])
        own = [_renumbered(batch, first) for batch in batches]
        return StepShare(own, PairFacts.concat(all_facts), first, len(set(digests)) == 1)


class InMemoryWorker(ActorWorker):
    """A role whose model is in memory. Each dp rank brings its own pairs of a step."""

    def __init__(self, config: DPOConfig, role: str, trainer: RankTrainer) -> None:
        rank, world = process_rank()
        super().__init__(config, role, RankInfo(rank, world, trainer.device))
        self.trainer = trainer
        self.causal_lm = parts_of(trainer.policy)[0].causal_lm

    def frozen_digest(self) -> str | None:
        """Return a digest of the weights that are not trained: no checkpoint contains them."""
        digest = sha256()
        frozen = [(n, p) for n, p in self.causal_lm.named_parameters() if not p.requires_grad]
        for name, parameter in frozen:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest() if frozen else None

    def _step_share(self, batches: Sequence[PairBatch]) -> StepShare:
        longest = max((int(batch.positions_N.max()) for batch in batches), default=0) + 1
        check_length(self.causal_lm.config, longest)
        return StepShare.of(batches, self.trainer.mesh)

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        limits: StepLimits | None = None,
    ) -> StepResult:
        share = self._step_share(batches)
        if share.is_repeated:
            raise DataError(
                "all ranks brought the same pairs; give each rank its own, for example with a "
                "loader that uses StatefulDistributedSampler."
            )
        self.refuse_columns("training", share.facts)
        with packed_attention(self.trainer.policy):
            return self.trainer.train_step(share.batches, reference, share.facts, limits)

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        """Return the log-probs of the pairs of all dp ranks."""
        share = self._step_share(batches)
        with packed_attention(self.trainer.policy):
            return self.trainer.log_probs(share.batches, len(share.facts.weight))

    def refuse_columns(self, name: str, facts: PairFacts) -> None:
        """Raise a DataError if the loss needs a column that some of these pairs do not have."""
        loss = self.trainer.loss
        refuse_columns(self.config, loss, name, lambda column: getattr(facts, column).numpy())

    def numbers(self) -> dict[str, Any]:
        optimizer = self.trainer.optimizer
        own = {"torch": optimizer.numbers()} if isinstance(optimizer, TorchOptimizer) else {}
        return super().numbers() | own

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        super().read_state(path, numbers)
        if isinstance(self.trainer.optimizer, TorchOptimizer):
            self.trainer.optimizer.load_numbers(numbers["torch"])


@dataclass
class InMemorySteps:
    """The steps of a Feed, for DPOPipeline: `accumulation` micro-batches each."""

    feed: Feed
    epochs: range
    accumulation: int
    total_steps: int | None  # None if it is unknown until the pairs end
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # step -> epoch, step of it

    def steps(self, done: int, position: Mapping[str, Any] | None) -> Iterator[Step]:
        if done and not self.feed.is_resumable:
            raise DataError(
                f"a {type(self.feed.source).__name__} cannot be resumed at step {done}: give rows, "
                "a Dataset, or a loader with StatefulDistributedSampler, or start from scratch in "
                "another output folder."
            )
        if self.total_steps is not None and done >= self.total_steps:
            return
        number, size = done, self.accumulation
        at = {"epoch": self.epochs.start, "step": 0, **(position or {})}
        for epoch in range(at["epoch"], self.epochs.stop):
            step, at["step"] = at["step"], 0
            parts = islice(self.feed.micro_batches(epoch), step * size, None)
            group = list(islice(parts, size))
            while group:
                following = list(islice(parts, size))
                number, step = number + 1, step + 1
                self.places[number] = epoch, step
                after = {"epoch": epoch, "step": step} if following else {"epoch": epoch + 1}
                ended = not following and epoch + 1 == self.epochs.stop
                is_last = ended or number == self.total_steps
                batches, pairs = pack_step(group), [pair for part in group for pair in part]
                yield Step(pairs, batches, batches, number, is_last, not following, after)
                if is_last:
                    return
                group = following
            self.feed.log_dropped()

    def epoch_at(self, step: int) -> float:
        """Return the number of the epoch that the step belongs to."""
        return self.places[step][0]

    def describe_pairs(self, step: Step, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return the ids of the pairs of this rank, or their places in the step."""
        own = [(place, step.pairs[place]) for place in places if place < len(step.pairs)]
        return [{"id": pair.id} if pair.id else {"place": place} for place, pair in own]


def pack_step(
    micro_batches: Iterable[Sequence[TokenPair]], most_pairs: int | None = None
) -> list[PairBatch]:
    """Pack each micro-batch (at most `most_pairs` at a time); number the pairs of the step."""
    batches: list[PairBatch] = []
    first = 0
    for pairs in micro_batches:
        batches += [_renumbered(batch, first) for batch in pack(pairs, NO_LIMIT, most_pairs)]
        first += len(pairs)
    return batches


def _renumbered(batch: PairBatch, first: int) -> PairBatch:
    return replace(batch, pair_P=batch.pair_P + first)


def process_rank() -> tuple[int, int]:
    """Return rank and size of the process group; (0, 1) without one."""
    grouped = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Let a model compute packed pairs; afterwards it has its own attention again."""
    parts = [part.causal_lm for part in parts_of(model)] or [model]
    before = [part.config._attn_implementation for part in parts]
    try:
        for part in parts:
            part.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        for part, name in zip(parts, before, strict=True):
            part.set_attn_implementation(name)
