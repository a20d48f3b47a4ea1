"""DPOTrainer for Python: models, pairs and an optimizer in, a trained model out. No YAML, no Ray, no files needed.

The loop, the checkpoints and the reports of a run are DPOPipeline's; this is one rank, with the same step underneath.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from rather.api.torch_optimizer import GivenOptimizer, put_over, with_args
from rather.checkpoint.checkpoint import write_groups
from rather.cluster.ranks import folder_next_to
from rather.cluster.spmd import broadcast
from rather.cluster.worker import stored
from rather.config.schema import ActorConfig, DPOConfig, StrategyArgs
from rather.config.strategies import Layout, layout
from rather.data.batch import Columns, PairBatch, PairFacts, PairLogps, TokenPair
from rather.data.feed import Feed
from rather.data.pack import pack
from rather.errors import ConfigError, DataError, NonFiniteError
from rather.losses.metrics import Window
from rather.losses.objective import configure, from_config, rule
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_model
from rather.model.export import export_model, export_stored
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer, schedule
from rather.parallel.apply import build_mesh, divide
from rather.parallel.mesh import Mesh
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.pipeline.evaluation import concatenate
from rather.pipeline.sanity_checks import refuse_columns
from rather.tracking import NoTracker, RunTracker, check_installed
from rather.train.rank_trainer import RankTrainer, StepResult, WholeModelRunner

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
        self.config, self.tokenizer = with_args(train_config or DPOConfig(), args), tokenizer
        self.args = self.config.actor_train.training_args
        self.nonfinite = 0  # steps in a row whose loss or gradient was no number
        self.loss = from_config(self.config)
        _refuse(self, model, ref_model, optimizer, lr_scheduler, calculate_per_token_loss)
        if sequence_packing:
            log.info("sequence_packing: pairs are always packed here; it never changes the result")
        placing = _placing(strategy)
        compute = next(
            _single(model).parameters()
        ).dtype  # shards are float32, whatever they compute in
        self._stepping: dict[str, Any] = {
            "max_grad_norm": self.config.max_grad_norm,
            "compute": compute,
        }
        self.adapted = _first(model) if _is_adapted(model) else None
        names = {id(p): f"causal_lm.{name}" for name, p in _single(model).named_parameters()}
        self.policy = self._rank(_single(model), placing, trains=True)
        self.reference = (
            self._rank(_single(ref_model), placing, trains=False) if ref_model is not None else None
        )
        if optimizer is not None:
            named = dict(self.policy.policy.named_parameters())
            if self.policy.mesh.sizes:
                put_over(optimizer, names, named)
            self.policy.optimizer = GivenOptimizer(
                named.items(), optimizer, lr_scheduler, **self._stepping
            )

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
            divided = divide(
                whole, mesh, placing, compute=compute, recompute=placing.recompute or "none"
            )
        runner = (
            WholeModelRunner(divided, STAGES[placing.stage])
            if isinstance(divided, PolicyModel)
            else None
        )
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
        if self.config.length_normalization:
            raise ConfigError(
                "dpo_loss: length_normalization needs lengths, and it is given sums; use training_step."
            )
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
        loss = configure(
            [name],
            {key: n for key, n in self.config.loss_numbers.items() if key in rule(name).numbers},
        )
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
        share = _Share.of(
            [pack(pairs, WITHOUT_END, micro_batch_size) for pairs in taken], rank.mesh
        )
        with _packed_attention(rank.policy):
            sums = rank.log_probs(share.batches, len(share.facts.weight))["sum"]
        if isinstance(rank.policy, Stages) and not rank.policy.holds_last:
            return None
        own = torch.split(
            sums[share.first :][: sum(map(len, taken))], [len(pairs) for pairs in taken]
        )
        return [
            {"reference_chosen_logps": part[:, 0], "reference_rejected_logps": part[:, 1]}
            for part in own
        ]

    def training_step(
        self, models: Any, data_iterator: Iterator[Any], seq_length: int
    ) -> StepNumbers:
        """One optimizer step over the next gradient_accumulation_steps micro-batches of the iterator.

        (loss, metrics of each micro-batch, 1 if the step was skipped, norm of the gradient, zeros in it). A loss that
        compares pairs with each other has the metrics of the whole step alone.
        """
        if self._holding(models) is not self.policy:
            raise ConfigError(
                "models: training_step trains the model, and these are the reference's."
            )
        taken = self._taken(
            islice(data_iterator, self.args.gradient_accumulation_steps), seq_length
        )
        return self._step(taken, self.config.max_steps)

    @cached_property
    def _feed(self) -> Feed:
        """Of what is given step by step: kept, for a chat template has a process of its own."""
        return Feed((), self.config, 1, self.tokenizer)

    def _taken(self, data: Iterable[Any], seq_length: int) -> list[list[TokenPair]]:
        feed = self._feed
        feed.dropped.clear()
        feed.examples.clear()
        taken = [feed.pairs(item) for item in data]
        if not any(taken):
            raise feed.nothing_left()
        feed.tell_dropped()
        longest = max(
            len(p.prompt) + max(len(p.chosen), len(p.rejected)) for pairs in taken for p in pairs
        )
        if longest > seq_length:
            raise DataError(
                f"a sequence of {longest} tokens is longer than seq_length, {seq_length}."
            )
        return taken

    def _step(
        self, micro_batches: Sequence[Sequence[TokenPair]], total_steps: int | None
    ) -> StepNumbers:
        rank = self.policy
        self._needs_optimizer(total_steps)
        share = _Share.of([pack(pairs, WITHOUT_END) for pairs in micro_batches], rank.mesh)
        if share.alike:
            raise DataError(
                "all ranks brought the same pairs; give each its own, as a loader with StatefulDistributedSampler does."
            )
        self._refuse_columns("training", share.facts)
        with _packed_attention(rank.policy):
            result = rank.train_step(share.batches, self._known(share), share.facts)
        self._judge(result, total_steps)
        metrics = [_means(sums) for sums in result.by_batch]
        self.lr, self.means = result.lr, _means(result.sums)  # of all pairs of the step
        return (
            torch.tensor(self.means["loss"]),
            metrics,
            result.skipped,
            result.grad_norm,
            result.zeros_in_grad or 0,
        )

    def _known(self, share: _Share) -> Columns | None:
        if self.reference is None:
            return None
        with _packed_attention(self.reference.policy):
            return self.reference.log_probs(share.batches, len(share.facts.weight))

    def _refuse_columns(self, name: str, facts: PairFacts) -> None:
        refuse_columns(self.config, self.loss, name, lambda column: getattr(facts, column).numpy())

    def _judge(self, result: StepResult, total_steps: int | None) -> None:
        """on_nonfinite and max_nonfinite_steps, as in a run."""
        if result.skip_reason != "nonfinite":
            self.nonfinite = self.nonfinite if result.skip_reason else 0
            return
        self.nonfinite += 1
        told = (
            f"loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}: the step was not taken"
        )
        log.warning("%s, the weights are untouched", told)
        fix = "lower the learning rate, or train in bf16 or fp32."
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(f"{told} (on_nonfinite: stop); {fix}")
        if self.nonfinite >= min(self.config.max_nonfinite_steps, total_steps or math.inf):
            raise NonFiniteError(
                f"{told}, {self.nonfinite} times in a row (max_nonfinite_steps); {fix}"
            )

    def _needs_optimizer(self, total_steps: int | None) -> None:
        """AdamW as `args` say, unless there is one."""
        if self.policy.optimizer is not None:
            return
        named, rates = self.policy.policy.named_parameters(), self._rates(total_steps)
        self.policy.optimizer = Optimizer(named, self.args, schedule=rates, **self._stepping)

    def _rates(self, total_steps: int | None) -> Callable[[int], float]:
        kind = self.args.lr_scheduler_type
        if total_steps is None and kind not in ("constant", "constant_with_warmup", "inverse_sqrt"):
            raise ConfigError(
                f"lr_scheduler_type: '{kind}' needs the number of steps; set max_steps in train_config."
            )
        return schedule(self.args, total_steps or 1)

    def _begin_schedule(self, total_steps: int | None) -> None:
        """Anew for each fit; the moments of an earlier one stay."""
        self._needs_optimizer(total_steps)
        optimizer = self.policy.optimizer
        assert optimizer is not None
        if not isinstance(optimizer, GivenOptimizer):
            begun, rates = optimizer.updates, self._rates(total_steps)
            optimizer.schedule = lambda updates: rates(updates - begun)

    def _holding(self, models: Any) -> RankTrainer:
        asked = _single(models)
        for rank in (self.policy, self.reference):
            if rank and (asked is rank.policy or asked is getattr(rank.policy, "causal_lm", None)):
                return rank
        raise ConfigError(
            "models: neither the model nor the reference that this trainer was made with."
        )

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
        self._refuse_iterators(train_preference_dataloader, eval_preference_dataloader)
        feed = Feed(
            train_preference_dataloader,
            self.config,
            self.args.per_device_train_batch_size,
            self.tokenizer,
        )
        total = self._total_steps(feed)
        if feed.rows:
            self._refuse_columns("training", _facts(feed.rows))
        self._begin_schedule(total)
        history: list[dict[str, float]] = []
        with tracker_in(log_dir, self.config, use_wandb=use_wandb, leads=_is_first()) as tracker:
            for epoch in range(math.ceil(self.args.num_train_epochs)):
                steps = _grouped(feed.micro_batches(epoch), self.args.gradient_accumulation_steps)
                begun = len(history)
                for taken in islice(steps, None if total is None else total - begun):
                    history.append(self._record(taken, len(history) + 1, epoch, total))
                    tracker.log(history[-1])
                feed.tell_dropped()
                if eval_preference_dataloader is not None and len(history) > begun:
                    found = self.evaluate(eval_preference_dataloader)
                    evaluated = {f"eval/{name}": value for name, value in found.items()}
                    tracker.log({"step": len(history), "epoch": epoch, **evaluated})
                    history[-1] |= evaluated
        return history

    def _total_steps(self, feed: Feed) -> int | None:
        count, limit, epochs = feed.count(), self.config.max_steps, self.args.num_train_epochs
        if count is None:
            if limit is None and epochs % 1:
                raise ConfigError(
                    f"num_train_epochs: {epochs:g} of pairs that cannot be counted; set max_steps."
                )
            return limit
        each = math.ceil(count / self.args.gradient_accumulation_steps)
        return min(
            math.ceil(each * epochs - 1e-9), limit or each * 10**9
        )  # 100 * 1.1 is more than 110

    def _refuse_iterators(self, pairs: Iterable[Any], held_out: Iterable[Any] | None) -> None:
        """They give what they have once. Training pairs may have no end, with max_steps."""
        epochs, limit = self.args.num_train_epochs, self.config.max_steps
        if epochs > 1 and (
            (isinstance(pairs, Iterator) and limit is None) or isinstance(held_out, Iterator)
        ):
            raise DataError(
                f"an iterator gives its pairs once, not in {epochs:g} epochs; give a list or a loader."
            )

    def _record(
        self, taken: Sequence[Sequence[TokenPair]], step: int, epoch: int, total: int | None
    ) -> dict[str, float]:
        _, _, skipped, norm, _ = self._step(taken, total)
        means = {key: self.means[key] for key in self.metrics_keys}
        return {
            "step": step,
            "epoch": epoch,
            **means,
            "grad_norm": norm,
            "lr": self.lr,
            "skipped_iter": skipped,
        }

    def evaluate(self, pairs: Iterable[Any]) -> dict[str, float]:
        """Metrics of all pairs: their weights decide, not how they are batched."""
        rank, feed = (
            self.policy,
            Feed(pairs, self.config, self.args.per_device_train_batch_size, self.tokenizer),
        )
        facts: list[PairFacts] = []
        policy: list[Columns] = []
        reference: list[Columns] = []
        for part in feed.micro_batches():
            share = _Share.of([pack(part, WITHOUT_END)], rank.mesh)
            facts.append(share.facts)
            with _packed_attention(rank.policy):
                policy.append(rank.log_probs(share.batches, len(share.facts.weight)))
            if (known := self._known(share)) is not None:
                reference.append(known)
        feed.tell_dropped()
        every, window = PairFacts.concat(facts), Window()
        self._refuse_columns("evaluation", every)
        sums = rank.score(
            every, concatenate(policy), concatenate(reference) if reference else None
        )  # some losses sort all pairs
        window.add(sums, pairs=len(every.weight), tokens=0)
        return window.means()

    def save_model(self, folder: str | Path) -> None:
        """A folder that `from_pretrained` opens, an adapter merged in. In a process group all ranks call it."""
        if self.tokenizer is None:
            raise ConfigError(
                "save_model: give the trainer the tokenizer; it belongs into the folder."
            )
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
        with folder_next_to(folder) if _is_first() else nullcontext() as made:
            pieces = broadcast(made)
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
            raise DataError(
                f"the ranks have {list(counts)} micro-batches of one step; they need equally many."
            )
        first = sum(len(each.weight) for each in everyone[: mesh.rank("dp")])
        moved = [_moved(batch, first) for batch in batches]
        return _Share(moved, PairFacts.concat(everyone), first, len(set(digests)) == 1)


def _moved(batch: PairBatch, places: int) -> PairBatch:
    return replace(batch, pair_P=batch.pair_P + places)


def _refuse(
    trainer: DPOTrainer,
    model: Any,
    ref_model: Any,
    optimizer: Any,
    lr_scheduler: Any,
    per_token: bool,
) -> None:
    named = " + ".join(trainer.config.loss_names)
    if model is None:
        raise ConfigError("model: give the model to train.")
    if given := [name for name, asked in _left_to_a_run(trainer.config).items() if asked]:
        raise ConfigError(
            f"train_config: {', '.join(given)}: DPOPipeline does that, not this trainer; leave it out."
        )
    if per_token:
        raise ConfigError(
            "calculate_per_token_loss: a preference loss has one value for each pair; leave it out."
        )
    if trainer.loss.needs_reference and ref_model is None:
        raise ConfigError(
            f"ref_model: loss '{named}' compares with a reference; give one, as copy.deepcopy(model)."
        )
    if ref_model is not None and not trainer.loss.needs_reference:
        raise ConfigError(f"ref_model: loss '{named}' compares with no reference; leave it out.")
    if not _is_adapted(model) and hasattr(_first(model), "peft_config"):
        raise ConfigError(
            "model: it has the layers of an adapter; give PEFT's own model around it."
        )
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not all(p.requires_grad for p in _single(model).parameters()):
        raise ConfigError(
            "model: some of its weights are frozen, and on several ranks all are trained here; DPOPipeline trains an "
            "adapter there, with lora_rank in its config."
        )
    if ref_model is not None and _single(ref_model) is _single(model):
        raise ConfigError(
            "ref_model: is the model itself, which would move along; give a copy, copy.deepcopy(model)."
        )
    if lr_scheduler is not None and optimizer is None:
        raise ConfigError(
            "lr_scheduler: belongs to an optimizer; give that too, or leave both out."
        )


def _left_to_a_run(config: DPOConfig) -> dict[str, bool]:
    """Settings that decide what is trained and that nothing here would follow."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return {
        "sync_ref_model": config.sync_ref_model,
        "precision=lean": config.precision == "lean",
        "spike": config.spike is not None,
        "on_nonfinite=rollback": config.on_nonfinite == "rollback",
        "early_stopping_patience": config.early_stopping_patience is not None,
        "lora_rank": config.actor_train.model_args.has_adapter,
        "train_batch_size on several ranks": config.train_batch_size is not None and several,
    }


def _facts(pairs: Sequence[TokenPair]) -> PairFacts:
    """Without the lengths, which nobody asks for before pairs are packed."""
    numbers = (
        torch.tensor([getattr(pair, name) for pair in pairs])
        for name in ("weight", "margin", "soft_label")
    )
    return PairFacts(torch.empty(0), *numbers)


def _placing(strategy: StrategyArgs | None) -> Layout:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return layout(ActorConfig(strategy_args=strategy or StrategyArgs(strategy_name="ddp")), world)


def _first(models: Any) -> Any:
    if not isinstance(models, list | tuple):
        return models
    if len(models) != 1:
        raise ConfigError(
            f"models: {len(models)} of them; give one, which is divided over ranks by `strategy`."
        )
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
    parts = [module.causal_lm for module in model.modules() if isinstance(module, PolicyModel)] or [
        model
    ]
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
    return {
        name: total / weight
        for name, total in sums.items()
        if name != "weight" and not name.startswith("_")
    }


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
    places = {
        "output_dir": str(folder.parent),
        "logging_dir": str(folder.parent),
        "exp_name": folder.name,
    }
    names = [*config.trackers, *(["wandb"] if use_wandb and "wandb" not in config.trackers else [])]
    told = config.model_copy(update={**places, "track_with": names})
    check_installed(told.trackers)
    return RunTracker(told, total_steps=0, start_step=0, metrics_position=None, quiet=True)
