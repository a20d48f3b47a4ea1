"""DPOTrainer for Python: models, pairs and an optimizer in, a trained model out. No YAML, no Ray, no files needed.

The loop, the checkpoints and the reports of a run are DPOPipeline's; this is one rank, with the same step underneath.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rather.batch import Columns, PairBatch, PairFacts, PairLogps, TokenPair
from rather.checkpoint import write_groups
from rather.cluster.shares import beside
from rather.cluster.spmd import said_by_first
from rather.cluster.worker import stored
from rather.config.schema import ActorConfig, DPOConfig, StrategyArgs
from rather.config.strategies import Layout, layout
from rather.data.feed import Feed
from rather.data.pack import pack
from rather.errors import ConfigError, DataError
from rather.given import GivenOptimizer, put_over, training_args
from rather.metrics import Window
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_model
from rather.model.export import export_model, export_stored
from rather.model.policy import PolicyModel
from rather.objective import configure, from_config, rule
from rather.optim import Optimizer, schedule
from rather.parallel.apply import build_mesh, divide
from rather.parallel.mesh import Mesh
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.tracking import NoTracker, RunTracker, check_installed
from rather.trainer import RankTrainer, Whole

log = logging.getLogger(__name__)

StepNumbers = tuple[Tensor, list[dict[str, float]], int, float, int]
WITHOUT_END = 1 << 40  # tokens: a micro-batch is what the caller's iterator gives


class DPOTrainer:
    """One rank of preference training, over models that are in memory already.

    `model` and `ref_model` are Hugging Face causal language models, or PEFT's around them, or lists with one; in a
    process group each is divided over the ranks as `strategy` says (ddp unless told). `optimizer` and `lr_scheduler`
    are torch's; without them AdamW follows `args`, which are ours or transformers'.
    """

    metrics_keys: Sequence[str] = [
        "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
        "logps/rejected", "sft_loss",
    ]  # fmt: skip

    def __init__(
        self,
        model: Any = None,
        train_config: DPOConfig | None = None,
        ref_model: Any = None,
        args: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        tokenizer: Any = None,
        strategy: StrategyArgs | None = None,
        calculate_per_token_loss: bool = False,
        sequence_packing: bool = False,
    ) -> None:
        self.config, self.tokenizer = train_config or DPOConfig(), tokenizer
        self.args = self.config.actor_train.training_args if args is None else training_args(args)
        self.loss = from_config(self.config)
        _refuse(self, model, ref_model, optimizer, lr_scheduler, calculate_per_token_loss)
        if sequence_packing:
            log.info("sequence_packing: pairs are always packed here; it never changes the result")
        placing = _placing(strategy)
        self.adapted = _first(model) if _is_adapted(model) else None
        names = {id(p): f"causal_lm.{name}" for name, p in _single(model).named_parameters()}
        self.policy = self._rank(_single(model), placing, trains=True)
        self.reference = self._rank(_single(ref_model), placing, trains=False) if ref_model is not None else None
        if optimizer is not None:
            named = dict(self.policy.policy.named_parameters())
            if self.policy.mesh.sizes:
                put_over(optimizer, names, named)
            limit = self._max_grad_norm
            self.policy.optimizer = GivenOptimizer(named.items(), optimizer, lr_scheduler, max_grad_norm=limit)

    def _rank(self, model: Any, placing: Layout, *, trains: bool) -> RankTrainer:
        """As a worker builds it, but from a model that is in memory."""
        policy = PolicyModel(model).eval()  # no dropout in either role
        if not trains:
            policy.requires_grad_(False)
        mesh = build_mesh(placing, str(model.device))
        with _packed_attention(model):
            check_model(policy)
            if not mesh.sizes:
                return RankTrainer(policy, self.loss, count_zeros=trains)
            compute = next(policy.parameters()).dtype
            whole = policy.float() if trains else policy  # shards that are trained are float32
            divided = divide(whole, mesh, placing, compute=compute, recompute=placing.recompute or "none")
        runner = Whole(divided, STAGES[placing.stage]) if isinstance(divided, PolicyModel) else None
        return RankTrainer(divided, self.loss, mesh=mesh, runner=runner, count_zeros=trains)

    # --- losses ---

    def dpo_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(losses, chosen rewards, rejected rewards) of the sigmoid loss, with the numbers of the config."""
        policy = torch.stack([policy_chosen_logps, policy_rejected_logps], 1)
        reference = torch.stack([reference_chosen_logps, reference_rejected_logps], 1)
        return self._scored("sigmoid", PairLogps(policy, reference, torch.ones_like(policy)))

    def odds_ratio_loss(
        self, chosen_logps: Tensor, rejected_logps: Tensor, response_lens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of ORPO, from summed log-probs; `response_lens` holds those of chosen answers first."""
        policy = torch.stack([chosen_logps, rejected_logps], 1)
        lengths = torch.stack(response_lens.to(policy.dtype).chunk(2), 1)
        return self._scored("orpo", PairLogps(policy, None, lengths))

    def _scored(self, name: str, x: PairLogps) -> tuple[Tensor, Tensor, Tensor]:
        loss = configure([name], {key: n for key, n in self.config.loss_numbers.items() if key in rule(name).numbers})
        chosen, rejected = loss.rewards(x).detach().unbind(1)
        return loss(x), chosen, rejected

    # --- one step ---

    def compute_reference_log_probs(
        self, models: Any, data_list: Iterable[Any], seq_length: int, micro_batch_size: int
    ) -> list[dict[str, Tensor]] | None:
        """Summed log-probs of each micro-batch under `models`; None on ranks without the last pipeline stage.

        `micro_batch_size` counts the pairs that go through the model at a time, and never changes the result.
        """
        rank = self._holding(models)
        taken = self._taken(data_list, seq_length)
        share = _Share.of([pack(pairs, WITHOUT_END, micro_batch_size) for pairs in taken], rank.mesh)
        with _packed_attention(rank.policy):
            sums = rank.log_probs(share.batches, len(share.facts.weight))["sum"]
        if isinstance(rank.policy, Stages) and not rank.policy.holds_last:
            return None
        own = torch.split(sums[share.first :][: sum(map(len, taken))], [len(pairs) for pairs in taken])
        return [{"reference_chosen_logps": part[:, 0], "reference_rejected_logps": part[:, 1]} for part in own]

    def training_step(self, models: Any, data_iterator: Iterator[Any], seq_length: int) -> StepNumbers:
        """One optimizer step over the next gradient_accumulation_steps micro-batches of the iterator.

        (loss, metrics of each micro-batch, 1 if the step was skipped, norm of the gradient, zeros in it). A loss that
        compares pairs with each other has the metrics of the whole step alone.
        """
        if self._holding(models) is not self.policy:
            raise ConfigError("models: training_step trains the model, and these are the reference's.")
        taken = self._taken(islice(data_iterator, self.args.gradient_accumulation_steps), seq_length)
        return self._step(taken, self.config.max_steps)

    @cached_property
    def _feed(self) -> Feed:
        """Of what is given step by step: kept, for a chat template has a process of its own."""
        return Feed((), self.config, 1, self.tokenizer)

    def _taken(self, data: Iterable[Any], seq_length: int) -> list[list[TokenPair]]:
        feed = self._feed
        feed.dropped.clear()
        taken = [feed.pairs(item) for item in data]
        if not any(taken):
            raise DataError(f"no pairs are left; rows dropped: {dict(feed.dropped) or 'none'}.")
        longest = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for pairs in taken for p in pairs)
        if longest > seq_length:
            raise DataError(f"a sequence of {longest} tokens is longer than seq_length, {seq_length}.")
        return taken

    def _step(self, micro_batches: Sequence[Sequence[TokenPair]], total_steps: int | None) -> StepNumbers:
        rank = self.policy
        self._needs_optimizer(total_steps)
        share = _Share.of([pack(pairs, WITHOUT_END) for pairs in micro_batches], rank.mesh)
        if share.alike:
            raise DataError(
                "all ranks brought the same pairs; give each its own, as a loader with StatefulDistributedSampler does."
            )
        with _packed_attention(rank.policy):
            result = rank.train_step(share.batches, self._known(share), share.facts)
        metrics = [_means(sums) for sums in result.by_batch]
        self.lr, self.means = result.lr, _means(result.sums)  # of all pairs of the step
        return torch.tensor(self.means["loss"]), metrics, result.skipped, result.grad_norm, result.zeros_in_grad or 0

    def _known(self, share: _Share) -> Columns | None:
        if self.reference is None:
            return None
        with _packed_attention(self.reference.policy):
            return self.reference.log_probs(share.batches, len(share.facts.weight))

    def _needs_optimizer(self, total_steps: int | None) -> None:
        """AdamW as `args` say, unless there is one."""
        kind = self.args.lr_scheduler_type
        if self.policy.optimizer is not None:
            return
        if total_steps is None and kind not in ("constant", "constant_with_warmup", "inverse_sqrt"):
            raise ConfigError(f"lr_scheduler_type: '{kind}' needs the number of steps; set max_steps in train_config.")
        rates = schedule(self.args, total_steps or 1)
        named = self.policy.policy.named_parameters()
        self.policy.optimizer = Optimizer(named, self.args, schedule=rates, max_grad_norm=self._max_grad_norm)

    @property
    def _max_grad_norm(self) -> float:
        return self.config.max_grad_norm if self.args.max_grad_norm is None else self.args.max_grad_norm

    def _holding(self, models: Any) -> RankTrainer:
        asked = _single(models)
        for rank in (self.policy, self.reference):
            if rank and (asked is rank.policy or asked is getattr(rank.policy, "causal_lm", None)):
                return rank
        raise ConfigError("models: neither the model nor the reference that this trainer was made with.")

    # --- a whole training ---

    def fit(
        self,
        train_preference_dataloader: Iterable[Any],
        eval_preference_dataloader: Iterable[Any] | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
    ) -> list[dict[str, float]]:
        """Trains for num_train_epochs, or max_steps if they come first; returns the metrics of each step.

        Pairs come as rows of text or tokens in any iterable or a Hugging Face Dataset, or as batches from a loader. An
        evaluation follows each epoch. `log_dir` takes a metrics.jsonl that begins anew, and the files of the trackers
        that `track_with` names, or of W&B.
        """
        feed = Feed(train_preference_dataloader, self.config, self.args.per_device_train_batch_size, self.tokenizer)
        total = self._total_steps(feed)
        history: list[dict[str, float]] = []
        with tracker_in(log_dir, self.config, use_wandb=use_wandb, leads=_is_first()) as tracker:
            for epoch in range(math.ceil(self.args.num_train_epochs)):
                steps = _grouped(feed.micro_batches(epoch), self.args.gradient_accumulation_steps)
                begun = len(history)
                for taken in islice(steps, None if total is None else total - begun):
                    history.append(self._record(taken, len(history) + 1, epoch, total))
                    tracker.log(history[-1])
                if eval_preference_dataloader is not None and len(history) > begun:
                    found = self.evaluate(eval_preference_dataloader)
                    evaluated = {f"eval/{name}": value for name, value in found.items()}
                    tracker.log({"step": len(history), "epoch": epoch, **evaluated})
                    history[-1] |= evaluated
        return history

    def _total_steps(self, feed: Feed) -> int | None:
        count, limit = feed.count(), self.config.max_steps
        if count is None:
            return limit
        each = math.ceil(count / self.args.gradient_accumulation_steps)
        return min(math.ceil(each * self.args.num_train_epochs), limit or each * 10**9)

    def _record(
        self, taken: Sequence[Sequence[TokenPair]], step: int, epoch: int, total: int | None
    ) -> dict[str, float]:
        _, _, skipped, norm, _ = self._step(taken, total)
        means = {key: self.means[key] for key in self.metrics_keys}
        return {"step": step, "epoch": epoch, **means, "grad_norm": norm, "lr": self.lr, "skipped_iter": skipped}

    def evaluate(self, pairs: Iterable[Any]) -> dict[str, float]:
        """Metrics of all pairs: their weights decide, not how they are batched."""
        window, rank = Window(), self.policy
        for part in Feed(pairs, self.config, self.args.per_device_train_batch_size, self.tokenizer).micro_batches():
            share = _Share.of([pack(part, WITHOUT_END)], rank.mesh)
            with _packed_attention(rank.policy):
                policy = rank.log_probs(share.batches, len(share.facts.weight))
            window.add(rank.score(share.facts, policy, self._known(share)), pairs=len(share.facts.weight), tokens=0)
        return window.means()

    def save_model(self, folder: str | Path) -> None:
        """A folder that `from_pretrained` opens, an adapter merged in. In a process group all ranks call it."""
        if self.tokenizer is None:
            raise ConfigError("save_model: give the trainer the tokenizer; it belongs into the folder.")
        rank, folder = self.policy, Path(folder).absolute()
        card = f"# Aligned by Rather ({' + '.join(self.config.loss_names)})\n"
        if self.adapted is not None:
            merged = PolicyModel(copy.deepcopy(self.adapted).merge_and_unload())
            export_model(merged, dict(merged.named_parameters()), self.tokenizer, folder, card)
            return
        if rank.mesh.world == 1 and isinstance(rank.policy, PolicyModel):
            export_model(rank.policy, rank.weights(), self.tokenizer, folder, card)
            return
        part = next(module for module in rank.policy.modules() if isinstance(module, PolicyModel))
        with beside(folder) if _is_first() else nullcontext() as made:
            pieces = said_by_first(made)
            write_groups(pieces, {"model": rank.weight_pieces()}, rank=dist.get_rank())
            dist.barrier()
            if _is_first():
                export_stored(part.causal_lm, stored(pieces, "model"), self.tokenizer, folder, card)
            dist.barrier()


@dataclass(frozen=True)
class _Share:
    """This rank's micro-batches of a step, and the facts of all pairs of it, among which theirs begin at `first`."""

    batches: list[PairBatch]
    facts: PairFacts
    first: int = 0
    alike: bool = False  # all ranks have the same tokens

    @staticmethod
    def of(micro_batches: Sequence[Sequence[PairBatch]], mesh: Mesh) -> _Share:
        batches: list[PairBatch] = []
        for packed in micro_batches:
            places = sum(len(batch.pair_P) for batch in batches)
            batches += [_moved(batch, places) for batch in packed]
        facts = PairFacts.of_step(batches)
        if mesh.size("dp") == 1:
            return _Share(batches, facts)
        told: list[Any] = [None] * mesh.size("dp")
        tokens = sha256(b"".join(batch.ids_N.numpy().tobytes() for batch in batches)).hexdigest()
        dist.all_gather_object(told, (facts, len(batches), tokens), group=mesh.group("dp"))
        everyone, counts, digests = zip(*told, strict=True)
        if len(set(counts)) > 1:
            raise DataError(f"the ranks have {list(counts)} micro-batches of one step; they need equally many.")
        first = sum(len(each.weight) for each in everyone[: mesh.rank("dp")])
        moved = [_moved(batch, first) for batch in batches]
        return _Share(moved, PairFacts.joined(everyone), first, len(set(digests)) == 1)


def _moved(batch: PairBatch, places: int) -> PairBatch:
    return replace(batch, pair_P=batch.pair_P + places)


def _refuse(
    trainer: DPOTrainer, model: Any, ref_model: Any, optimizer: Any, lr_scheduler: Any, per_token: bool
) -> None:
    named = " + ".join(trainer.config.loss_names)
    if model is None:
        raise ConfigError("model: give the model to train.")
    if per_token:
        raise ConfigError("calculate_per_token_loss: a preference loss has one value for each pair; leave it out.")
    if trainer.loss.needs_reference and ref_model is None:
        raise ConfigError(f"ref_model: loss '{named}' compares with a reference; give one, as copy.deepcopy(model).")
    if ref_model is not None and not trainer.loss.needs_reference:
        raise ConfigError(f"ref_model: loss '{named}' compares with no reference; leave it out.")
    if not _is_adapted(model) and hasattr(_first(model), "peft_config"):
        raise ConfigError("model: it has the layers of an adapter; give PEFT's own model around it.")
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not all(p.requires_grad for p in _single(model).parameters()):
        raise ConfigError(
            "model: some of its weights are frozen, and on several ranks all are trained here; DPOPipeline trains an "
            "adapter there, with lora_rank in its config."
        )
    if ref_model is not None and _single(ref_model) is _single(model):
        raise ConfigError("ref_model: is the model itself, which would move along; give a copy, copy.deepcopy(model).")
    if lr_scheduler is not None and optimizer is None:
        raise ConfigError("lr_scheduler: belongs to an optimizer; give that too, or leave both out.")


def _placing(strategy: StrategyArgs | None) -> Layout:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return layout(ActorConfig(strategy_args=strategy or StrategyArgs(strategy_name="ddp")), world)


def _first(models: Any) -> Any:
    if not isinstance(models, list | tuple):
        return models
    if len(models) != 1:
        raise ConfigError(f"models: {len(models)} of them; give one, which is divided over ranks by `strategy`.")
    return models[0]


def _is_adapted(models: Any) -> bool:
    """Whether it is PEFT's model around another."""
    return hasattr(_first(models), "get_base_model")


def _single(models: Any) -> Any:
    """The Hugging Face model, which holds the adapter's layers."""
    return _first(models).get_base_model() if _is_adapted(models) else _first(models)


@contextmanager
def _packed_attention(model: Any) -> Iterator[None]:
    """Packed pairs need an attention of their own; afterwards the model generates with the one it came with."""
    parts = [module.causal_lm for module in model.modules() if isinstance(module, PolicyModel)] or [model]
    before = [part.config._attn_implementation for part in parts]
    try:
        for part in parts:
            part.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        for part, name in zip(parts, before, strict=True):
            part.set_attn_implementation(name)


def _grouped(items: Iterator[list[TokenPair]], size: int) -> Iterator[list[list[TokenPair]]]:
    while group := list(islice(items, size)):
        yield group


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    weight = sums["weight"] or 1.0
    return {name: total / weight for name, total in sums.items() if name != "weight" and not name.startswith("_")}


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def tracker_in(
    log_dir: str | Path | None, config: DPOConfig, *, use_wandb: bool, leads: bool
) -> RunTracker | NoTracker:
    """Who is told each record of a training: metrics.jsonl and trackers, whose files lie in `log_dir`."""
    if use_wandb and log_dir is None:
        raise ConfigError("use_wandb: give log_dir too; W&B keeps its files there.")
    if log_dir is None or not leads:
        return NoTracker()
    folder = Path(log_dir).expanduser().absolute()
    places = {"output_dir": str(folder.parent), "logging_dir": str(folder.parent), "exp_name": folder.name}
    names = [*config.trackers, *(["wandb"] if use_wandb and "wandb" not in config.trackers else [])]
    told = config.model_copy(update={**places, "track_with": names})
    check_installed(told)
    return RunTracker(told, total_steps=0, start_step=0, metrics_position=None, quiet=True)
