"""DPOTrainer for Python: models, pairs and an optimizer in, a trained model out.

It needs no YAML, no Ray and no files. `fit` runs DPOPipeline over the given models and pairs.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.api.feed import Feed
from rather.api.in_memory import (
    AdapterOffWorker,
    InMemorySteps,
    InMemoryWorker,
    LogitsTrainer,
    StepShare,
    answer_sums,
    pack_step,
    packed_attention,
    process_rank,
)
from rather.api.torch_optimizer import TorchOptimizer, replace_parameters, with_args
from rather.cluster.group import shared_folder
from rather.cluster.launch import Roles
from rather.cluster.worker import stored
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, StrategyArgs
from rather.config.strategies import Layout, keeps_state_on_host, layout
from rather.data.batch import Columns, PairLogps, TokenPair
from rather.data.image_tokens import recipe_of_processor
from rather.data.pixel_loader import PixelLoader
from rather.data.pixels import PixelMaker
from rather.errors import ConfigError, DataError
from rather.losses.losses import LOSSES
from rather.losses.metrics import Window
from rather.losses.objective import configure, from_config
from rather.losses.own import OwnMetric
from rather.losses.trial import try_own_losses, try_own_metrics
from rather.model.adapted_experts import AdaptedExperts
from rather.model.check import check_model, refuse_tower
from rather.model.export import FileCast, export_model, export_peft, export_stored
from rather.model.policy import PolicyModel
from rather.model.vision import Vision, keep_tower
from rather.optim.optimizer import Optimizer, schedule
from rather.optim.rounding import Rounding
from rather.parallel.apply import divide
from rather.parallel.mesh import build_mesh
from rather.parallel.shard import STAGES, places, shard_rounding
from rather.parallel.stages import Stages, parts_of
from rather.pipeline.callbacks import Callback
from rather.pipeline.checks import refuse_columns
from rather.pipeline.evaluation import EvaluatedPart, metrics_of
from rather.pipeline.guard import refuse_nonfinite
from rather.pipeline.hook import Record
from rather.pipeline.run import Run
from rather.pipeline.steps import log_length
from rather.run_folder.layout import with_rounding_of_run
from rather.tracking.json_lines import read_records
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import TrackedRun, check_installed
from rather.train.rank_trainer import RankTrainer, WholeModelRunner

log = logging.getLogger(__name__)

OWN_LOSSES = ("_post_compute_loss", "dpo_loss", "odds_ratio_loss")  # a subclass may override them

StepNumbers = tuple[Tensor, list[dict[str, float]], int, float, int]


class DPOTrainer:
    """Preference training of models that are in memory.

    `model` and `ref_model` are Hugging Face causal language models, PEFT models, or lists with one.
    A PEFT model without `ref_model` is its own reference, with the adapter switched off.
    In a process group each is divided over the ranks as `strategy` says (default: ddp). `optimizer`
    and `lr_scheduler` are torch's; the default is AdamW with the settings of `args`, which are
    Rather's or transformers' training arguments. `metrics` are functions of the held-out pairs
    (see rather.losses.own) and `callbacks` objects of rather.pipeline.callbacks.Callback; both run
    in this process.
    """

    metrics_keys: Sequence[str] = [
        "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
        "logps/chosen", "logps/rejected", "sft_loss",
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
        metrics: Sequence[OwnMetric] = (),
        callbacks: Sequence[Callback] = (),
        calculate_per_token_loss: bool = False,
        sequence_packing: bool = False,
    ) -> None:
        self.config, self.tokenizer = train_config or DPOConfig(), tokenizer
        if args is not None:
            actor = with_args(self.config.actor_train, args)
            config = self.config.model_copy(update={"actor_train": actor})
            self.config = DPOConfig.model_validate(config)  # checked like a config file
        self.args = self.config.actor_train.training_args
        self.nonfinite = 0  # training steps in a row with NaN or Inf
        self.loss = from_config(self.config)
        try_own_losses(self.loss)
        self.metrics = {function.__name__: function for function in metrics}
        try_own_metrics(self.metrics, with_reference=self.loss.needs_reference)
        self.callbacks = list(callbacks)
        if calculate_per_token_loss:
            raise ConfigError(
                "calculate_per_token_loss: a preference loss has one value per pair; leave it out."
            )
        if lr_scheduler is not None and optimizer is None:
            raise ConfigError(
                "lr_scheduler: belongs to an optimizer; give both, or leave both out."
            )
        self.overrides = [name for name in OWN_LOSSES if self._is_overridden(name)]
        (decoder, self.adapted), (ref_model, _) = _unwrap(model), _unwrap(ref_model)
        self._refuse_models(decoder, ref_model)
        AdaptedExperts.replace(decoder)
        if sequence_packing:
            log.info("sequence_packing: pairs are always packed; this does not change the result")
        # Shards are float32, whatever they compute in.
        self._stepping: dict[str, Any] = {
            "max_grad_norm": self.config.max_grad_norm,
            "compute": next(decoder.parameters()).dtype,
        }
        names = {id(p): f"causal_lm.{name}" for name, p in decoder.named_parameters()}
        rank, world = process_rank()
        actor = ActorConfig(strategy_args=strategy or StrategyArgs(strategy_name="ddp"))
        placing = layout(actor, world)
        if keeps_state_on_host(placing, next(decoder.parameters()).device.type):
            raise ConfigError(
                f"strategy: '{placing.name}' keeps state in host memory, which DPOTrainer does on 2 "
                "or more devices; on one GPU, `rather train` does."
            )
        self.worker = self._worker("actor_train", decoder, placing)
        self.policy, self.reference, self.ref_worker = self.worker.trainer, None, None
        if ref_model is not None:
            self.ref_worker = self._worker("reference", ref_model, placing)
        elif self.loss.needs_reference:  # a PEFT model, as _refuse_models has checked
            self.ref_worker = AdapterOffWorker(self.config, "reference", self.policy)
        self.reference = self.ref_worker and self.ref_worker.trainer
        kind = torch.device(self.policy.device).type
        self.roles = Roles(self.worker, self.ref_worker, kind, rank=rank, drivers=world)
        if optimizer is not None:
            self._use_optimizer(optimizer, lr_scheduler, names)

    def _is_overridden(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(DPOTrainer, method)

    def _use_optimizer(
        self, optimizer: torch.optim.Optimizer, lr_scheduler: Any, names: Mapping[int, str]
    ) -> None:
        """Update the policy with a given optimizer; `names` are those of its parameters by id."""
        parameters = dict(self.policy.policy.named_parameters())
        if self.policy.mesh.sizes:
            replace_parameters(optimizer, names, parameters)
        self.policy.optimizer = TorchOptimizer(
            parameters.items(), optimizer, lr_scheduler, **self._stepping
        )

    def _refuse_models(self, model: Any, ref_model: Any) -> None:
        if model is None:
            raise ConfigError("model: give the model to train.")
        needs, loss = self.loss.needs_reference, " + ".join(self.config.loss_names)
        several_ranks = process_rank()[1] > 1
        self._refuse_settings(several_ranks=several_ranks)
        if needs and ref_model is None and self.adapted is None:
            raise ConfigError(
                f"ref_model: loss '{loss}' needs a reference; give one, as copy.deepcopy(model)."
            )
        if ref_model is not None and not needs:
            raise ConfigError(f"ref_model: loss '{loss}' uses no reference; leave it out.")
        if ref_model is model:
            raise ConfigError(
                "ref_model: is the model itself, which training changes; give copy.deepcopy(model)."
            )
        if not self.adapted and hasattr(model, "peft_config"):
            raise ConfigError("model: has the layers of an adapter; give the PEFT model around it.")
        if several_ranks and not all(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "model: some weights are frozen, but on several ranks all are trained; DPOPipeline "
                "trains an adapter there, with lora_rank in its config."
            )
        if self.overrides and several_ranks:
            raise ConfigError(
                f"{', '.join(self.overrides)}: overridden methods are called on one process only; "
                "for several, write the loss with rather.losses.loss."
            )
        if self.overrides:
            self._method_of_loss()

    def _refuse_settings(self, *, several_ranks: bool) -> None:
        """Refuse settings that decide what is trained, and that nothing here would follow."""
        config = self.config
        unsupported = {
            f"task={config.task}": config.task != "preference",
            "sync_ref_model": config.sync_ref_model,
            "precision=lean": config.precision == "lean",
            "spike": config.spike is not None,
            "on_nonfinite=rollback": config.on_nonfinite == "rollback",
            "early_stopping_patience": config.early_stopping_patience is not None,
            "train_batch_size on several ranks": several_ranks and config.train_batch_size,
        }
        if names := ", ".join(name for name, is_set in unsupported.items() if is_set):
            raise ConfigError(
                f"train_config: {names}: not supported by DPOTrainer; use DPOPipeline or remove it."
            )
        if config.actor_train.model_args.has_adapter:
            raise ConfigError(
                "train_config: lora_rank, adapter_name_or_path: the adapter belongs to the model here; "
                "give a PEFT model (peft.get_peft_model or PeftModel.from_pretrained)."
            )

    def _worker(self, role: str, model: Any, placing: Layout) -> InMemoryWorker:
        whole = PolicyModel(model).eval()  # no dropout
        policy: PolicyModel | Stages = whole
        trains, mesh, runner = role == "actor_train", build_mesh(placing, str(model.device)), None
        if not trains:
            whole.requires_grad_(False)
        self._see_images(whole, is_divided=bool(mesh.sizes))
        with packed_attention(model):
            check_model(whole)
            whole.rounding = Rounding(self.config.rounding)
            if mesh.sizes:
                compute = next(whole.parameters()).dtype
                whole = whole.float() if trains else whole  # shards that are trained are float32
                policy = divide(whole, mesh, placing, compute=compute)
                policy.rounding = replace(
                    shard_rounding(policy, self.config.rounding, compute),
                    places=places(policy, mesh),
                )
        if mesh.sizes and isinstance(policy, PolicyModel):
            runner = WholeModelRunner(policy, STAGES[placing.stage])
        balance = self.config.actor_train.model_args.moe_aux_loss_coef if trains else None
        options: dict[str, Any] = {"mesh": mesh, "count_zeros": trains, "router_loss": balance}
        options["owns_weights"] = False  # the caller may swap or load them at any time
        trainer = RankTrainer(policy, self.loss, runner=runner, **options)
        if trains and self.overrides:
            assert isinstance(policy, PolicyModel)
            trainer = LogitsTrainer(policy, self.loss, self._post_compute_loss, **options)
        return InMemoryWorker(self.config, role, trainer)

    def _see_images(self, policy: PolicyModel, *, is_divided: bool) -> None:
        """Let a vision model take images, if the tokenizer is its processor."""
        images = recipe_of_processor(self.tokenizer)
        if images is None:
            refuse_tower(policy.causal_lm.config)
            return
        if is_divided:
            raise ConfigError(
                "tokenizer: images are trained by DPOTrainer in one process; use DPOPipeline."
            )
        keep_tower(policy.causal_lm, self.config.actor_train.model_args.frozen_parts)
        policy.vision = Vision(policy.causal_lm, PixelLoader(PixelMaker(images)))

    # --- losses ---

    def dpo_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (losses, chosen rewards, rejected rewards) of the sigmoid loss."""
        if self.config.length_normalization:
            raise ConfigError(
                "dpo_loss: length_normalization needs lengths, but gets sums; use training_step."
            )
        policy = torch.stack([policy_chosen_logps, policy_rejected_logps], 1)
        reference = torch.stack([reference_chosen_logps, reference_rejected_logps], 1)
        return self._loss("sigmoid", PairLogps(policy, reference, torch.ones_like(policy)))

    def odds_ratio_loss(
        self, chosen_logps: Tensor, rejected_logps: Tensor, response_lens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for ORPO; `response_lens` has the lengths of the chosen answers first."""
        policy = torch.stack([chosen_logps, rejected_logps], 1)
        lengths = torch.stack(response_lens.to(policy.dtype).chunk(2), 1)
        return self._loss("orpo", PairLogps(policy, None, lengths))

    def _loss(self, name: str, x: PairLogps) -> tuple[Tensor, Tensor, Tensor]:
        allowed = LOSSES.find(name, "pref_loss").numbers
        numbers = {key: n for key, n in self.config.loss_numbers.items() if key in allowed}
        loss = configure([name], numbers)
        chosen, rejected = loss.rewards(x).detach().unbind(1)
        return loss(x), chosen, rejected

    def _post_compute_loss(
        self,
        labels: Tensor,
        loss_mask: Tensor,
        ref_chosen_logps: Tensor | None,
        ref_rejected_logps: Tensor | None,
        logits: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of a micro-batch and its metrics. Override this for your own loss.

        `labels` and `loss_mask` [2 P, L] and `logits` [2 P, L, V] are of the scored tokens of P
        chosen answers, then of the rejected ones; logits are at the label that they predict. A
        class that overrides neither this nor dpo_loss and odds_ratio_loss computes the same loss
        without keeping logits.
        """
        sums, lengths = answer_sums(labels, loss_mask, logits), loss_mask.double().sum(-1)
        (chosen, rejected), chosen_length = sums.chunk(2), lengths.chunk(2)[0]
        if self._method_of_loss() == "orpo":
            losses, *rewards = self.odds_ratio_loss(chosen, rejected, lengths)
        else:
            assert ref_chosen_logps is not None
            assert ref_rejected_logps is not None
            losses, *rewards = self.dpo_loss(chosen, rejected, ref_chosen_logps, ref_rejected_logps)
        columns = {
            "loss": losses,
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).double(),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "sft_loss": -chosen / chosen_length,
        }
        return losses.mean(), {name: column.detach().mean() for name, column in columns.items()}

    def _method_of_loss(self) -> str:
        """Return "sigmoid" or "orpo": losses that have a method of this class."""
        names, modifiers = self.config.loss_names, self.config.loss_modifiers
        methods = {"sigmoid": "dpo_loss", "orpo": "odds_ratio_loss"}
        loss, has_method = names[0], len(names) == 1 and not modifiers and names[0] in methods
        unused = {"dpo_loss", "odds_ratio_loss"} - {methods.get(loss)}
        if has_method and not unused & {*self.overrides}:
            return loss
        stated = " + ".join([*names, *modifiers])
        raise ConfigError(
            f"pref_loss: '{stated}' would not call {', '.join(self.overrides) or 'dpo_loss'}; set "
            "sigmoid for dpo_loss, orpo for odds_ratio_loss, either for _post_compute_loss, "
            "without modifiers."
        )

    # --- one step ---

    def compute_reference_log_probs(
        self, models: Any, data_list: Iterable[Any], seq_length: int, micro_batch_size: int
    ) -> list[dict[str, Tensor]] | None:
        """Return the summed log-probs of each micro-batch under `models`.

        Ranks without the last pipeline stage return None. `micro_batch_size` is the number of pairs
        that go through the model at a time; it does not change the result.
        """
        worker = self._worker_of(models)
        if isinstance(self.ref_worker, AdapterOffWorker):  # both roles have one model
            worker = self.ref_worker
        micro_batches = self._take(data_list, seq_length)
        batches = pack_step(micro_batches, micro_batch_size)
        sums, policy = worker.compute_log_probs(batches)["sum"], worker.trainer.policy
        if isinstance(policy, Stages) and not policy.holds_last:
            return None
        first = StepShare.of(batches, worker.trainer.mesh).first
        lengths = [len(pairs) for pairs in micro_batches]
        return [
            {"reference_chosen_logps": columns[:, 0], "reference_rejected_logps": columns[:, 1]}
            for columns in torch.split(sums[first:][: sum(lengths)], lengths)
        ]

    def training_step(
        self, models: Any, data_iterator: Iterator[Any], seq_length: int
    ) -> StepNumbers:
        """Take one optimizer step over the next gradient_accumulation_steps micro-batches.

        Returns (loss, metrics of each micro-batch, 1 if the step was skipped, gradient norm, zeros
        in the gradient). A loss that compares pairs with each other has only metrics of the step.
        """
        config = self.config
        if self._worker_of(models) is not self.worker:
            raise ConfigError("models: training_step trains the model, but got the reference.")
        step = islice(data_iterator, self.args.gradient_accumulation_steps)
        micro_batches = self._take(step, seq_length)
        self._make_optimizer(config.max_steps)
        batches = pack_step(micro_batches)
        result = self.worker.train_step(batches, self._reference_columns(batches))
        if result.skip_reason == "nonfinite":
            self.nonfinite += 1
            most = min(config.max_nonfinite_steps, config.max_steps or config.max_nonfinite_steps)
            refuse_nonfinite(str(result), config.on_nonfinite, self.nonfinite, most)
        elif result.skip_reason is None:
            self.nonfinite = 0
        metrics = [Window(sums).means() for sums in result.by_batch]
        loss, zeros = Window(result.sums).means().get("loss", 0.0), result.zeros_in_grad or 0
        return torch.tensor(loss), metrics, result.skipped, result.grad_norm, zeros

    def _reference_columns(self, batches: Sequence[Any]) -> Columns | None:
        return self.ref_worker.compute_log_probs(batches) if self.ref_worker else None

    @cached_property
    def _step_feed(self) -> Feed:
        """The feed of single steps; kept, because a chat template runs in its own process."""
        return self._feed(())

    def _feed(self, source: Iterable[Any], transform: Callable[[Any], Any] | None = None) -> Feed:
        size = self.args.per_device_train_batch_size
        return Feed(source, self.config, size, self.tokenizer, transform)

    def _take(self, data: Iterable[Any], seq_length: int) -> list[list[TokenPair]]:
        feed = self._step_feed
        feed.dropped.clear()
        micro_batches = [feed.pairs(item) for item in data]
        if not any(micro_batches):
            raise feed.no_pairs()
        feed.log_dropped()
        pairs = [pair for micro_batch in micro_batches for pair in micro_batch]
        longest = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs)
        if longest > seq_length:
            raise DataError(
                f"a sequence of {longest} tokens is longer than seq_length, {seq_length}."
            )
        return micro_batches

    def _make_optimizer(self, total_steps: int | None) -> Optimizer:
        """Return the optimizer; if none was given, it is made now."""
        if self.policy.optimizer is None:
            policy, rates = self.policy.policy, self._rates(total_steps)
            options = {**self._stepping, "schedule": rates, "rounding": policy.rounding}
            self.policy.optimizer = Optimizer(policy.named_parameters(), self.args, **options)
        assert isinstance(self.policy.optimizer, Optimizer)
        return self.policy.optimizer

    def _rates(self, total_steps: int | None) -> Callable[[int], float]:
        kind = self.args.lr_scheduler_type
        if total_steps is None and kind not in ("constant", "constant_with_warmup", "inverse_sqrt"):
            raise ConfigError(
                f"lr_scheduler_type: '{kind}' needs the number of steps; set max_steps."
            )
        # A run of unknown length is not shorter than its warm-up.
        return schedule(self.args, total_steps or max(1, self.args.warmup_steps))

    def _worker_of(self, models: Any) -> InMemoryWorker:
        model, _ = _unwrap(models)
        for worker in filter(None, (self.worker, self.ref_worker)):
            policy = worker.trainer.policy
            if model is policy or model is getattr(policy, "causal_lm", None):
                return worker
        raise ConfigError("models: neither the model nor the reference of this trainer.")

    # --- a whole training ---

    def fit(
        self,
        train_preference_dataloader: Iterable[Any],
        eval_preference_dataloader: Iterable[Any] | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
        output_dir: str | Path | None = None,
    ) -> list[dict[str, float]]:
        """Train for num_train_epochs, or max_steps if they come first; return each step's metrics.

        Pairs come as rows of text or tokens in any iterable or a Hugging Face Dataset, or as
        batches from a loader. The evaluation pairs are evaluated after each epoch.

        `log_dir` is for metrics.jsonl and the files of trackers. `output_dir` is for checkpoints
        (every save_steps of train_config, and at the end). If it has some, training resumes from
        the newest: with rows, a Dataset, or a loader with StatefulDistributedSampler.
        """
        held_out, epochs = eval_preference_dataloader, self.args.num_train_epochs
        endless = isinstance(train_preference_dataloader, Iterator) and not self.config.max_steps
        if epochs > 1 and (endless or isinstance(held_out, Iterator)):
            raise DataError(
                f"an iterator gives its pairs once, not in {epochs:g} epochs; use a list or loader."
            )
        if use_wandb and log_dir is None:
            raise ConfigError("use_wandb: give log_dir too; W&B keeps its files there.")
        feed = self._feed(train_preference_dataloader)
        total = self._total_steps(feed)
        if total is not None:
            log_length(self.args, self.config.max_steps, total)
        if rows := feed.rows:
            refuse_columns(
                self.loss, "training", lambda name: np.array([getattr(pair, name) for pair in rows])
            )
        accumulation = self.args.gradient_accumulation_steps
        source = InMemorySteps(feed, range(math.ceil(epochs)), accumulation, total)
        log_dir = log_dir if self.roles.is_main else None
        with self.tracker_in(log_dir, use_wandb=use_wandb) as tracker:
            records = self._run(
                source,
                None if held_out is None else lambda: self.evaluate(held_out),
                lambda record: tracker.log(self._fit_record(record)),
                output_dir,
            )
        history: list[dict[str, float]] = []
        for record in map(self._fit_record, records):
            if "lr" in record:
                history.append(record)
            else:
                history[-1] |= record
        return history

    def _fit_record(self, record: Record) -> Record:
        names = ("step", "epoch", *self.metrics_keys, "grad_norm", "lr", "skipped_iter")
        evaluated = [name for name in record if name.startswith("eval/")]
        return {name: record[name] for name in (*names, *evaluated) if name in record}

    def _run(
        self,
        source: InMemorySteps,
        evaluate: Callable[[], dict[str, float]] | None,
        on_record: Callable[[Record], None],
        run_dir: str | Path | None,
        **settings: Any,
    ) -> list[Record]:
        """Run the pipeline; return all records of the run, also those before a resume."""
        folder = Path(run_dir).expanduser().absolute() if run_dir else None
        if folder:
            folders = {"output_dir": str(folder.parent), "exp_name": folder.name}
            self.config = with_rounding_of_run(self.config.model_copy(update=folders))
            policy = self.policy.policy
            if self.config.rounding == "nearest":
                policy.rounding = replace(policy.rounding, kind="nearest", held=frozenset())
        optimizer = self._make_optimizer(source.total_steps)
        if not isinstance(optimizer, TorchOptimizer):  # each run has its own schedule
            begun, rates = optimizer.updates, self._rates(source.total_steps)
            optimizer.schedule = lambda updates: rates(updates - begun)
        records: list[Record] = []

        def add(record: Record) -> None:
            records.append(record)
            on_record(record)

        overridden = {"overrides": type(self).__qualname__} if self.overrides else {}
        workers = {"model weights": self.worker, "reference weights": self.ref_worker}
        if not folder or self.roles.drivers > 1:  # ranks have shards, by their layout
            workers = {}
        frozen = {name: worker.frozen_digest() for name, worker in workers.items() if worker}
        fixed = {"logging_steps": 1, "track_with": None, **settings}
        Run(
            self.config.model_copy(update=fixed),
            self.roles,
            source,
            identity={
                "data": source.feed.identity(),
                "loss": self.loss.description() | overridden,
                "seed": [self.config.seed, self.config.data_seed],
                "global batch": [source.feed.size, source.accumulation, self.roles.drivers],
                "rounding": self.config.rounding,
                **{name: digest for name, digest in frozen.items() if digest},
            },
            evaluate=evaluate,
            on_record=add,
            callbacks=self.callbacks,
            run_dir=folder,
        ).run()
        source.feed.log_dropped()
        if folder is None:
            return records
        written = list(read_records(folder / "metrics.jsonl")) if self.roles.is_main else None
        return list(self.roles.broadcast(written))

    def _total_steps(self, feed: Feed) -> int | None:
        count, limit, epochs = feed.count(), self.config.max_steps, self.args.num_train_epochs
        if count is None:
            if limit is None and epochs % 1:
                raise ConfigError(
                    f"num_train_epochs: {epochs:g} of pairs that cannot be counted; set max_steps."
                )
            return limit
        of_epoch = math.ceil(count / self.args.gradient_accumulation_steps)
        total = math.ceil(of_epoch * epochs - 1e-9)  # 100 * 1.1 is more than 110
        return min(total, limit or total)

    def evaluate(
        self, pairs: Iterable[Any], transform: Callable[[Any], Any] | None = None
    ) -> dict[str, float]:
        """Return the metrics of all pairs, weighted by pair: batches do not matter."""
        feed, evaluated, window = self._feed(pairs, transform), list[EvaluatedPart](), Window()
        for micro_batch in feed.micro_batches():
            batches = pack_step([micro_batch])
            facts = StepShare.of(batches, self.policy.mesh).facts
            self.worker.refuse_columns("evaluation", facts)
            reference = self._reference_columns(batches)
            if isinstance(self.policy, LogitsTrainer):
                with packed_attention(self.policy.whole):
                    sums = self.policy.evaluate(batches, reference)
                window.add(sums, pairs=len(facts.weight), tokens=0)
                continue
            evaluated.append((facts, self.worker.compute_log_probs(batches), reference))
        feed.log_dropped()
        return (
            metrics_of(evaluated, self.policy.score, self.metrics) if evaluated else window.means()
        )

    def save_model(self, folder: str | Path, *, merge: bool = False) -> None:
        """Write a folder for `from_pretrained`. All ranks call this.

        Of a PEFT model only the adapter is written, unless `merge` asks for a whole model with the
        adapter merged in.
        """
        if merge and self.adapted is None:
            raise ConfigError("merge: the model has no adapter; leave it out.")
        if self.tokenizer is None:
            raise ConfigError("save_model: give the trainer the tokenizer, which it saves too.")
        rank, folder = self.policy, Path(folder).absolute()
        card = f"# Aligned by Rather ({' + '.join(self.config.loss_names)})\n"
        if self.adapted is not None and not merge:
            export_peft(self.adapted, self.tokenizer, folder, card)
            return
        policy, weights = parts_of(rank.policy)[0], rank.weights()
        if self.adapted is not None:
            policy = PolicyModel(copy.deepcopy(self.adapted).merge_and_unload())
            weights = dict(policy.named_parameters())
        if self.roles.drivers == 1 or self.adapted is not None:
            export_model(policy, weights, self.tokenizer, folder, card)
            return
        with shared_folder(folder) as shards:
            self.worker.write_weights(shards, "model")
            self.roles.max_over_drivers(0)  # all have written
            if self.roles.is_main:
                cast = FileCast(policy.causal_lm.config.dtype, policy.rounding)
                files = stored(shards, "model")
                export_stored(policy.causal_lm, files, self.tokenizer, folder, card, cast)
            self.roles.max_over_drivers(0)  # exported

    def tracker_in(self, log_dir: str | Path | None, *, use_wandb: bool) -> NoTracker:
        """Return a tracker that writes metrics.jsonl and the files of trackers to `log_dir`."""
        if log_dir is None:
            return NoTracker()
        folder = Path(log_dir).expanduser().absolute()
        parent, names = str(folder.parent), [*self.config.trackers]
        if use_wandb and "wandb" not in names:
            names.append("wandb")
        check_installed(names)
        folders = {"output_dir": parent, "logging_dir": parent, "exp_name": folder.name}
        changes = {**folders, "track_with": names, "pair_ledger": False}
        run = TrackedRun(self.config.model_copy(update=changes))
        return RunTracker(run, total_steps=0, start_step=0, quiet=True)


def _unwrap(models: Any) -> tuple[Any, Any]:
    """Return the Hugging Face model of one model or a list with one, and its PEFT model or None."""
    if isinstance(models, list | tuple):
        if len(models) != 1:
            raise ConfigError(
                f"models: got {len(models)}; give one, which `strategy` divides over ranks."
            )
        models = models[0]
    return (
        (models.get_base_model(), models) if hasattr(models, "get_base_model") else (models, None)
    )
