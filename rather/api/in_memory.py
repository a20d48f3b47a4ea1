"""The parts of a DPOPipeline over models and pairs in memory: roles, steps, a loss of logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from rather.api.feed import Feed
from rather.api.torch_optimizer import TorchOptimizer
from rather.cluster.group import RankInfo
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.pack import pack
from rather.errors import DataError
from rather.losses.metrics import Scored, weighted_sums
from rather.losses.objective import PairLoss
from rather.model.adapters import as_reference
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_length
from rather.model.policy import PolicyModel
from rather.model.towers import decoder_of, has_tower
from rather.parallel.mesh import Mesh, gather_objects
from rather.parallel.stages import Objective, parts_of
from rather.pipeline.checks import refuse_columns
from rather.pipeline.steps import NO_LIMIT, Step
from rather.train.rank_trainer import Limits, RankTrainer, StepResult, WholeModelRunner


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
        first = sum(len(facts.weight) for facts in all_facts[: mesh.rank("dp")])
        renumbered = [_renumbered(batch, first) for batch in batches]
        return StepShare(renumbered, PairFacts.concat(all_facts), first, len(set(digests)) == 1)


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
        self, batches: Sequence[PairBatch], reference: Columns | None, limits: Limits = None
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
        refuse_columns(loss, name, lambda column: getattr(facts, column).numpy())

    def numbers(self) -> dict[str, Any]:
        optimizer = self.trainer.optimizer
        of_torch = {"torch": optimizer.numbers()} if isinstance(optimizer, TorchOptimizer) else {}
        return super().numbers() | of_torch

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        super().read_state(path, numbers)
        if isinstance(self.trainer.optimizer, TorchOptimizer):
            self.trainer.optimizer.load_numbers(numbers["torch"])


class AdapterOffWorker(InMemoryWorker):
    """The reference of a policy with an adapter: the same model, with the adapter switched off."""

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        with as_reference(self.causal_lm):
            return super().compute_log_probs(batches)

    def frozen_digest(self) -> str | None:
        """Return None: the policy's digest covers the weights of the base."""
        return None


@dataclass
class InMemorySteps:
    """The steps of a Feed, for DPOPipeline: `accumulation` micro-batches each."""

    feed: Feed
    epochs: range
    accumulation: int
    total_steps: int | None  # None if it is unknown until the pairs end
    epoch_and_step: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a step of the run

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
            micro_batches = islice(self.feed.micro_batches(epoch), step * size, None)
            group = list(islice(micro_batches, size))
            while group:
                following = list(islice(micro_batches, size))
                number, step = number + 1, step + 1
                self.epoch_and_step[number] = epoch, step
                after = {"epoch": epoch, "step": step} if following else {"epoch": epoch + 1}
                ended = not following and epoch + 1 == self.epochs.stop
                is_last = ended or number == self.total_steps
                batches = pack_step(group)
                pairs = [pair for micro_batch in group for pair in micro_batch]
                yield Step(pairs, batches, batches, number, is_last, not following, after)
                if is_last:
                    return
                group = following
            self.feed.log_dropped()

    def epoch_at(self, step: int) -> float:
        """Return the number of the epoch that the step belongs to."""
        return self.epoch_and_step[step][0]

    def describe_pairs(self, step: Step, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the ids of the pairs of this rank, or their indices in the step."""
        pairs = [(index, step.pairs[index]) for index in indices if index < len(step.pairs)]
        return [{"id": pair.id} if pair.id else {"place": index} for index, pair in pairs]


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
    models = [stage.causal_lm for stage in parts_of(model)] or [model]
    decoders = [decoder_of(model) if has_tower(model) else model for model in models]
    before = [decoder.config._attn_implementation for decoder in decoders]
    try:
        for decoder in decoders:
            decoder.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        for decoder, name in zip(decoders, before, strict=True):
            decoder.set_attn_implementation(name)


# --- a loss of whole logits, for subclasses that override `_post_compute_loss`; it is slower and takes
# more memory than the head of the model, which never keeps all logits ---

# labels, loss_mask, reference of the chosen and of the rejected answers, logits -> loss, metrics
LossOfLogits = Callable[..., tuple[Tensor, Mapping[str, Any]]]


class LogitsRunner(WholeModelRunner):
    """Runs micro-batches with their logits among the columns."""

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        for batch in (on_cpu.to(self.device) for on_cpu in batches):
            objective(batch, with_logits(self.policy, batch)).backward()  # type: ignore[no-untyped-call]


class LogitsTrainer(RankTrainer):
    """A whole model on one process, trained with a function of its logits."""

    def __init__(
        self, policy: PolicyModel, loss: PairLoss, function: LossOfLogits, **options: Any
    ) -> None:
        super().__init__(policy, loss, runner=LogitsRunner(policy), **options)
        self.whole, self.function = policy, function

    def _score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None, step: PairFacts
    ) -> Scored:
        sums = {"sum": policy["sum"]}
        scored = super()._score(facts, sums, reference, step)
        if "logits" not in policy:  # only the log-probs of the pairs are wanted
            return scored
        if (facts.weight != 1).any():
            raise DataError("weight: _post_compute_loss gets no weights of pairs; leave them out.")
        sums_of_reference = scored.x.reference
        chosen = rejected = None
        if sums_of_reference is not None:
            chosen, rejected = sums_of_reference.unbind(1)
        labels, mask, logits = (policy[name] for name in ("labels", "loss_mask", "logits"))
        loss, metrics = self.function(labels, mask, chosen, rejected, logits)
        zeros = torch.zeros_like(scored.losses)  # one for each pair
        extra = {
            name: zeros + torch.as_tensor(value).detach().to(zeros.device)
            for name, value in metrics.items()
            if name != "loss"
        }
        return replace(scored, losses=zeros + loss, extra=extra)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PairBatch], reference: Columns | None) -> dict[str, float]:
        """Return metrics.weighted_sums of one step's micro-batches, with the function's loss."""
        facts, total = PairFacts.of_step(batches).to(self.device), dict[str, float]()
        for batch in (on_cpu.to(self.device) for on_cpu in batches):
            of_batch = reference and {name: sums[batch.pair_P] for name, sums in reference.items()}
            columns = with_logits(self.whole, batch)
            scored = self._score(facts.at(batch.pair_P), columns, of_batch, facts)
            for name, value in weighted_sums(scored, batch.weight_P, self.loss).items():
                total[name] = total.get(name, 0.0) + float(value)
        return total


def with_logits(policy: PolicyModel, batch: PairBatch) -> dict[str, Tensor]:
    """Return "sum", and the scored tokens of all chosen answers, then of the rejected ones.

    They are `labels` and `loss_mask` of [2 P, L], and the `logits` of [2 P, L, V] that predict
    them; L is the most scored tokens of an answer.
    """
    head = policy.causal_lm.get_output_embeddings()
    rows_UD = policy.hidden(batch)[0].index_select(0, batch.rows_U)
    logits_UV = linear(rows_UD, head.weight, head.bias) * policy.scale
    if cap := policy.softcap:
        logits_UV = cap * torch.tanh(logits_UV / cap)
    # The tokens of each answer, in the order of their cells.
    tokens = batch.token_T[batch.cell_T.argsort(stable=True)]
    counts = batch.length_P2.long().flatten().tolist()

    def by_answer(values_U: Tensor) -> Tensor:
        answers = torch.split(values_U[tokens], counts)
        return pad_sequence([*answers[::2], *answers[1::2]], batch_first=True)

    columns = {"labels": by_answer(batch.targets_U), "logits": by_answer(logits_UV)}
    columns["loss_mask"] = by_answer(torch.ones_like(batch.targets_U, dtype=torch.float32))
    with torch.no_grad():
        sums = answer_sums(**columns)
    return {"sum": torch.stack(sums.chunk(2), 1), **columns}


def answer_sums(labels: Tensor, loss_mask: Tensor, logits: Tensor) -> Tensor:
    """Return the summed log-prob of each answer in float64."""
    logps = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return (logps.double() * loss_mask).sum(-1)
