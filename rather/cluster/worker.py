"""ActorWorker: what one rank does for a role, alone or together with the role's other ranks.

All ranks call the same methods in the same order, with the same arguments: each does its share, and
all get the answer. If memory runs out, `train_step` and `compute_log_probs` of a single rank raise
torch.OutOfMemoryError: the call can be repeated with smaller micro-batches after `forget`. Of
several ranks, the others wait in a collective, so that MemoryShortage ends the run.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import ShardedFiles, tensor_of
from rather.cluster.group import RankInfo, on_every_rank, shared_folder, started_as_rank
from rather.cluster.health import set_environment
from rather.cluster.images import has_images, make_loader, open_store
from rather.cluster.memory import (
    Ledger,
    Need,
    Peak,
    Room,
    bytes_held,
    explanation,
    free_memory,
    largest,
    need_of,
    sentence,
    shortage,
)
from rather.cluster.preflight import refuse_private_folder, refuse_unlike_cpus
from rather.cluster.process import Process
from rather.cluster.writer import Writer
from rather.config.inherit import value_at
from rather.config.run_config import DPOConfig
from rather.config.schema import ModelArgs, RoleConfig
from rather.config.strategies import keeps_state_on_host, layout, refuse_host_offload
from rather.config.values import worker_class
from rather.data.batch import Columns, PairBatch, PairFacts, PairLogps
from rather.data.shares import RunPairs, Share, share_of
from rather.errors import ConfigError, DiskError, MemoryShortage
from rather.losses.objective import PairLoss, from_config, own_loss
from rather.model.budget import TOKENS, Budget, NoRoom, agree_on_budget, choose_budget
from rather.model.check import check_length
from rather.model.export import Kept, export_run
from rather.model.generate import Decoding, GeneratedAnswer, generate
from rather.model.image_features import FeatureStore
from rather.model.layers import Recompute, arrange_layers, plain_layers
from rather.model.policy import PolicyModel
from rather.model.vision import PARTS, Vision
from rather.optim.host import LEAST
from rather.optim.optimizer import Optimizer, schedule
from rather.optim.rounding import Rounding
from rather.parallel.load import (
    Start,
    compute_dtype,
    device_of,
    load_divided,
    load_policy,
    precision_name,
    stored_dtype,
)
from rather.parallel.mesh import build_mesh, gather_objects, max_over_ranks
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages, parts_of
from rather.plan.speed import GIB, worth_compiling
from rather.train.engine import (
    Engine,
    EngineJob,
    Runner,
    StepOptimizer,
    find_engine,
)
from rather.train.rank_trainer import (
    Limits,
    RankTrainer,
    ReadRequests,
    StepResult,
    WholeModelRunner,
)

RECOMPUTED = {
    "none": "kept",
    "half": "mostly kept",
    "selective": "in part recomputed",
    "full": "recomputed",
}


class ActorWorker:
    """Override `build_loss` in a subclass named in `worker_cls` to train with your own loss."""

    def __init__(self, config: DPOConfig, role: str, member: RankInfo | None = None) -> None:
        self.config, self.role, self.member = config, role, member or RankInfo()
        self.worker_config: RoleConfig = getattr(config, role)
        self.device = self.member.device or device_of(self.worker_config)
        self.on_gpu = self.device.startswith("cuda")
        self.log = logging.getLogger(f"rather.worker.{role}-{self.member.rank}")
        self.planned: Budget | None = None  # for training
        self.has_narrow_gradients = False
        self.fitted: Mapping[str, Any] = {}  # how the run of a checkpoint fitted in memory
        wanted, own = config.checkpoint_config.async_save, self.member
        self.writer = Writer(role, own.rank, own.world, wanted, self.log, own.near)
        self.neighbour: ActorWorker | None = None  # the policy's worker, in the reference's process
        self.read_requests: ReadRequests = tuple  # to stop or to save; a step exchanges them
        self.takes_turns = False  # with a process of the other role on the same device
        self.ledger, self.rooms = Ledger(), list[Room]()  # what ranks hold, and what they found
        self.borrowed: ActorWorker | None = None  # the neighbour, if this role uses its model
        self.trainer: RankTrainer
        self.part: PolicyModel  # with the head, or what this rank holds of the model
        self.place = (0, 1)  # data-parallel rank
        self.engine: Engine | None = None  # not Rather's own; only of a policy
        self.unused: Any = {} if config.pair_ledger else {"ratios": None, "pull": None}
        self.vision: Vision | None = None  # of a model that sees images
        self.pairs: RunPairs | None = None  # of the run; calls name them by numbers

    def build_loss(self) -> PairLoss | Callable[[PairLogps], Tensor]:
        """Return a PairLoss, or a plain function from PairLogps to one loss per pair."""
        return from_config(self.config)

    def _objective(self) -> PairLoss:
        loss, config = self.build_loss(), from_config(self.config)
        if not isinstance(loss, PairLoss):
            if named := ", ".join(self.config.loss_modifiers):
                raise ConfigError(
                    f"{named}: a plain function from build_loss takes no modifiers; return a "
                    "PairLoss"
                )
            return own_loss(loss)
        # The driver prepares reference and data columns for the config's objective only.
        more = [
            *loss.token_columns - config.token_columns,
            *loss.pair_columns - config.pair_columns,
            *["a reference"] * (loss.needs_reference > config.needs_reference),
            *["whole steps"] * (loss.whole_batch > config.whole_batch),
        ]
        if more:
            raise ConfigError(
                f"build_loss: its PairLoss needs {', '.join(more)}, which pref_loss and the "
                "modifiers of the config do not request; set them in the config, because the "
                "driver reads the reference and the data for them"
            )
        return loss

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Load the model; `model` replaces the configured one (evaluation of other weights)."""
        if self.member.world > 1 or started_as_rank():
            self._refuse_what_cannot_run(model)
        self._prepare_process()
        self.peak, trains = Peak(self.device), self.role == "actor_train"
        args, path = self.worker_config.model_args, self.worker_config.model_path
        self.source = (model, args.of_other_weights()) if model else (path, args)
        self.layout, other = layout(self.worker_config), self.neighbour
        if self.member.world > 1:
            self.place = (self.layout.dp_rank(self.member.rank), self.layout.dp)
        if other and other.source[1].has_adapter and self.config.reference_is_policy:
            self._borrow(other)
            return
        key, kind = f"{self.role}.strategy_args", self.device.split(":")[0]
        refuse_host_offload(self.worker_config, kind, self.config.precision, key)
        self.mesh = build_mesh(self.layout, self.device)
        self.engine = self._make_engine(total_steps) if trains else None
        self._refuse_group_of_one(kind, key)
        try:
            policy = self._load(total_steps, trains=trains)
            optimizer = self.build_optimizer(policy, total_steps) if trains else None
            runner = self.build_runner(policy, optimizer)
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(f"{sentence(error)}\n{self.explain_memory(0)}") from error
        actor = self.config.actor_train
        self.trainer = RankTrainer(
            policy, self._objective(), optimizer, mesh=self.mesh, runner=runner,
            count_zeros=trains and actor.training_args.log_num_zeros_in_grad,
            router_loss=actor.model_args.moe_aux_loss_coef if trains else None,
            owns_weights=self.engine is None,
        )  # fmt: skip
        if not trains and self.config.reference.offload == "on":
            self.park()

    def _borrow(self, other: ActorWorker) -> None:
        """Use the model of the policy's worker, without its adapter or with its initial one."""
        self.borrowed, self.trainer, self.part = other, other.trainer, other.part
        kept = self.config.keeps_start
        how = "as its adapter began, from a frozen copy" if kept else "with its adapters off"
        self.log.info("%s: the policy %s; there is no second model", self.role, how)

    def _refuse_group_of_one(self, kind: str, key: str) -> None:
        """Refuse to shard the weights of a single GPU and to keep their state on the host."""
        if self.is_divided and keeps_state_on_host(self.layout, kind):
            raise ConfigError(
                f"{key}: '{self.layout.name}' on one GPU is for one process; start it without "
                "torchrun and ray.address."
            )

    def _refuse_what_cannot_run(self, model: str | None) -> None:
        """Compare machines and memory of all ranks before anything is loaded."""
        kind = self.device.split(":")[0]
        if self.neighbour:  # it found the memory of these processes before it loaded its model
            self.ledger, self.rooms = self.neighbour.ledger, self.neighbour.rooms
        else:
            self.rooms = gather_objects(Room.here(self.member.rank, kind, Process.this().kernel))
        if model is None and (self.worker_config.trains or self.config.sync_ref_model):
            refuse_private_folder(
                self.config.run_dir, lambda folder: gather_objects(self.folder_problem(folder))
            )
        refuse_unlike_cpus(self.role, self.worker_config.model_args, kind, self.rooms)
        self.ledger.add(self.role, self.memory_need(self.worker_config, model), self.rooms)

    def memory_need(self, role: RoleConfig, model: str | None = None) -> Need | None:
        """Return what each rank of a role holds; None if unknown, or if the policy is its model."""
        if not role.trains and self.config.reference_is_policy:
            return None
        return need_of(self.config, role, self.device.split(":")[0], model)

    def explain_memory(self, tokens: int) -> str:
        """Return where the memory of this rank goes, and settings that need less.

        `tokens`: of the largest micro-batch; 0 if there is none yet.
        """
        config, rows = self.config, dict[str, float]()
        if hasattr(self, "trainer"):
            rows = bytes_held(self.trainer)
        elif need := self.memory_need(self.worker_config):
            rows[f"state of {self.role}, computed"] = need.device + need.host
        shares = config.shares_devices and from_config(config).needs_reference
        if self.role == "actor_train" and shares and (need := self.memory_need(config.reference)):
            rows["reference"] = need.device if self.on_gpu else need.host
        rows["activations, at the peak"] = self.peak.bytes - sum(rows.values())
        return explanation(self.device, tokens, rows, self._memory_fixes(tokens))

    def _memory_fixes(self, tokens: int) -> list[str]:
        """Return settings that need less and that the config of the run accepts."""
        role, shape, length = self.role, self.layout, self.config.sequence_length
        trains, has_adapter = self.worker_config.trains, self.worker_config.model_args.has_adapter
        changes: list[tuple[str, str | int]] = []
        if tokens > length:
            work = "train" if trains else "infer"
            changes.append((f"{role}.max_tokens_per_microbatch_in_{work}", tokens // 2))
        if trains and not (self.planned and self.planned.recompute == "full"):
            changes.append((f"{role}.strategy_args.strategy_config.recompute_granularity", "full"))
        if trains and self.on_gpu and not has_adapter:
            changes.append(("precision", "lean"))
        if shape.dp > 1 and shape.stage < 3 and not shape.host:
            sharding = "zero3" if trains else "fsdp2_infer"
            changes.append((f"{role}.strategy_args.strategy_name", sharding))
        changes.append(("sequence_length", length // 2))
        fixes = [f"{key}={value}" for key, value in changes if self._accepts(key, value)]
        if self.config.precision != "lean" and not self.worker_config.model_args.quantization:
            fixes.append("more devices, which share the weights: zero3, fsdp2_infer or tp_size")
        return fixes  # the two are for one device

    def _accepts(self, key: str, value: str | int) -> bool:
        """Return whether the config of the run can be changed in this way."""
        from rather.config.load import changed  # imports hydra

        if value_at(self.config, key) == value:
            return False
        try:
            config = changed(self.config, {key: value})
            for role in (config.actor_train, config.reference):
                refuse_host_offload(role, self.device.split(":")[0], config.precision, "")
        except ConfigError:
            return False
        return True

    @property
    def is_divided(self) -> bool:
        """Return whether this rank uses the multi-rank code, as even a mesh of one rank does."""
        return bool(self.mesh.sizes)

    @property
    def _recompute(self) -> Recompute:
        """Return the recomputation if no measurement decides what fits, as for a divided model."""
        return self.layout.recompute or ("full" if self.on_gpu else "none")

    def _make_engine(self, total_steps: int) -> Engine | None:
        """Return the engine that `actor_train.engine` names; refuse what it cannot do."""
        if self.layout.engine == "torch":
            return None
        config, role = self.config, self.config.actor_train
        model, args = self.source
        training = role.training_args
        job = EngineJob(
            model, args, self.device, self.mesh, self.layout, role.strategy_args.strategy_config,
            training, config.max_grad_norm, schedule(training, total_steps), config.task,
            load=partial(
                load_policy, model, args, self.device, exact=True, start=Start(config.seed),
                rounding=Rounding(config.rounding), reward=config.task == "reward",
            ),
        )  # fmt: skip
        engine = find_engine(role.engine)(job)
        problems = list(engine.problems())
        compute = compute_dtype(args, self.device)
        if compute == torch.bfloat16 and config.rounding == "dithered" and not engine.dithers:
            problems.append(
                "rounding: dithered is not possible: the engine rounds weights to the nearest "
                "bfloat16 number, which loses small updates; set rounding: nearest, or "
                "actor_train.model_args.dtype: fp32"
            )
        if stored_dtype(args, self.device) != compute:
            problems.append(
                "actor_train.model_args.dtype: bf16 is not possible: this CPU has no instructions "
                "for it; set fp32"
            )
        label = f"actor_train.engine: {self.layout.engine}"
        if problems:
            raise ConfigError([f"{label}: {text}" for text in problems])
        self.log.info(
            "%s runs the training steps. It is experimental: no promise about a resume with other "
            "devices or about small updates in bfloat16 holds",
            label,
        )
        return engine

    def build_policy(self, *, trains: bool) -> PolicyModel | Stages:
        """Load the model, or what this rank holds of it."""
        config, (name, args) = self.config, self.source
        if self.engine:
            return self.engine.build_policy()
        options: dict[str, Any] = {
            "start": Start(config.seed, trains and config.keeps_start),
            "rounding": Rounding(config.rounding),
            "reward": config.task == "reward",
        }
        if self.pairs is not None and has_images(self.pairs):
            moves = trains or config.sync_ref_model
            options["frozen"] = config.actor_train.model_args.frozen_parts if moves else PARTS
        if self.is_divided:
            shape = replace(self.layout, recompute=self._recompute if trains else "none")
            options |= {"trains": trains, "compiled": self.compiled}
            policy = load_divided(name, args, self.device, self.mesh, shape, **options)
        else:
            exact = trains and config.precision != "lean"
            policy = load_policy(name, args, self.device, exact=exact, **options)
        if isinstance(policy, PolicyModel) and "frozen" in options:
            self._see_images(policy, options["frozen"])
        return policy

    def _load(self, total_steps: int, *, trains: bool) -> PolicyModel | Stages:
        self.compiled = self.config.compile == "on"
        policy = self.build_policy(trains=trains)
        weights = sum(p.numel() for p in policy.parameters())
        if self.config.compile == "auto" and self._may_compile:
            # Compiling takes a minute or two; auto compiles runs that are likely to take many.
            tokens = total_steps * self.config.tokens_per_step
            self.compiled = worth_compiling(weights, tokens)
        if isinstance(policy, PolicyModel) and not trains:
            if not self.is_divided:
                policy.requires_grad_(False)
            if self.compiled or not self.is_divided:
                arrange_layers(policy, compiled=self.compiled, alone=not self.is_divided)
        self.part = parts_of(policy)[0]
        check_length(self.part.causal_lm.config, self.config.sequence_length)
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self._log_loaded(weights, trained if trains else weights)
        return policy

    @property
    def _may_compile(self) -> bool:
        shape = self.layout
        is_whole = shape.tp == shape.cp == shape.pp == shape.ep == 1
        return self.on_gpu and is_whole and not (shape.offload or self.engine)

    def _log_loaded(self, weights: int, trained: int) -> None:
        name, args = self.source
        compute = compute_dtype(args, self.device)
        dtype = str(compute).removeprefix("torch.")
        if stored_dtype(args, self.device) != compute:
            dtype += " (this CPU has no bf16 instructions: float32 products of rounded weights)"
        extra = "; layers are compiled in the first minutes" if self.compiled else ""
        if trained < weights:
            where = ", in an adapter" if args.has_adapter else ""
            extra += f"; {trained / 1e6:.4g}M of them are trained{where}"
        if (strategy := self.worker_config.strategy_args.strategy_name) and not self.mesh.sizes:
            extra += f"; {strategy} has nothing to divide on one device"
        facts = (name, weights / 1e6, dtype, self.device, extra)
        self.log.info("%s: %s, %.4gM weights in %s on %s%s", self.role, *facts)

    def _see_images(self, policy: PolicyModel, frozen: Collection[str]) -> None:
        """Give the model the images of the run."""
        assert self.pairs is not None
        config, actor = self.config, self.config.actor_train
        store: FeatureStore | None = None
        if actor.model_args.vision_cache == "auto" and set(frozen) == set(PARTS):
            precision = precision_name(self.worker_config, self.device, config.rounding)
            limit = actor.model_args.vision_cache_gb
            store = open_store(config.vision_cache_dir, self.source, precision, limit)
        other = self.neighbour.vision if self.neighbour else None
        if other and other.store:  # only one of the roles needs the pixels of an image
            loader = other.loader
            if store and store.folder == other.store.folder:
                store = other.store  # features that are not yet on the disk are in its memory
        else:
            loader = make_loader(actor, sum(map(len, self.pairs.sets.values())))
        is_summed = self.mesh.sums_gradients
        self.vision = Vision(policy.causal_lm, loader, store, sums_gradients=is_summed)
        policy.vision = self.vision

    def build_runner(self, policy: PolicyModel | Stages, optimizer: StepOptimizer | None) -> Runner:
        """Return what runs the micro-batches of this rank."""
        if self.engine:
            return self.engine.build_runner(policy, optimizer)
        if isinstance(policy, Stages):
            return policy
        return WholeModelRunner(policy, STAGES[self.layout.stage])

    def build_optimizer(self, policy: PolicyModel | Stages, total_steps: int) -> StepOptimizer:
        """Return what updates the weights of this rank."""
        if self.engine:
            return self.engine.build_optimizer(policy)
        training = self.config.actor_train.training_args
        options: dict[str, Any] = {
            "schedule": schedule(training, total_steps),
            "max_grad_norm": self.config.max_grad_norm,
            "exact": policy.exact,
            "rounding": policy.rounding,
            "lean": self.config.precision == "lean",
            "seed": self.config.seed,
            "compute": compute_dtype(self.source[1], self.device) if self.is_divided else None,
        }
        if keeps_state_on_host(self.layout, self.device.split(":")[0]):
            options["on_host"] = LEAST
            self._refuse_small_host()
        optimizer = Optimizer(policy.named_parameters(), training, **options)
        policy.exact = {}  # the optimizer holds them as masters now
        return optimizer

    def _refuse_small_host(self) -> None:
        """Refuse to begin if the host has no room for the optimizer's state."""
        need, free = self.memory_need(self.worker_config), free_memory()
        needed = need.host if need else 0.0
        if needed > free:
            raise MemoryShortage(
                f"'{self.layout.name}' keeps {needed / GIB:.3g} GiB of optimizer state and "
                f"gradients in host memory, which has {free / GIB:.3g} GiB free."
            )
        self.log.info("optimizer state and gradients: %.3g GiB in host memory", needed / GIB)

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        """Return the tokens of a training micro-batch, configured or measured; arrange the layers.

        `make_room` is called before activations are recomputed; it returns whether it freed memory.
        """
        tokens = self.config.actor_train.max_tokens_per_microbatch_in_train
        policy, budget = self.trainer.policy, None
        shape = self.layout
        options: dict[str, Any] = {
            "tokens": tokens,
            "recompute": shape.recompute,
            "offload": shape.offload,
            "compiled": self.compiled,
            "largest_pair": largest_pair,
            "at_least": self.fitted.get("recompute", "none"),
        }
        if self.fitted.get("narrow_gradients"):
            self.has_narrow_gradients = self.trainer.narrow_gradients()
        is_measured = self.on_gpu or not self.is_divided
        is_measured = is_measured and not (self.engine or (self.is_divided and shape.host))
        if not isinstance(policy, PolicyModel) or not is_measured:
            budget = Budget(tokens or TOKENS[self.device.split(":")[0]], self._recompute)
        while budget is None:
            assert isinstance(policy, PolicyModel)
            try:
                if self.is_divided:
                    budget = agree_on_budget(policy, self.trainer, self._least, **options)
                else:
                    budget = choose_budget(policy, self.trainer, make_room=make_room, **options)
            except NoRoom as error:
                if not self.trainer.narrow_gradients():
                    raise MemoryShortage(f"{error}\n{self.explain_memory(tokens or 0)}") from error
                self.has_narrow_gradients = True
                self.log.info(
                    "gradients are added up in bfloat16: in float32 no micro-batch would fit"
                )
        self.planned, how = budget, RECOMPUTED[budget.recompute]
        how += ", on the host" if shape.offload else ""
        self.log.info("micro-batches of up to %d tokens, activations %s", budget.tokens, how)
        self.peak.begin_training()
        return budget.tokens

    def _least(self, number: int) -> int:
        """Return the least of what all ranks of this role pass."""
        return -max_over_ranks(-number, self.device) if self.mesh.world > 1 else number

    # --- pairs ---

    def open_pairs(self, pairs: RunPairs) -> None:
        """Open the tokenised data, of which later calls name the pairs by their numbers."""
        pairs.check_files()
        self.pairs = pairs

    def pack(self, batches: Sequence[PairBatch]) -> None:
        """Pack this rank's share of a step before it is needed, and begin to read its images."""
        share = self._share(batches)
        if self.vision:
            self.vision.ahead(share.batches)

    def _share(self, batches: Sequence[PairBatch]) -> Share:
        return share_of(batches, *self.place)

    # --- work ---

    def train_step(
        self, batches: Sequence[PairBatch], reference: Columns | None, limits: Limits = None
    ) -> StepResult:
        """Train on this rank's share of a step, of which the arguments are those of all ranks."""
        own = self._share(batches)
        with self._shortages_explained(own.batches):
            result = self.trainer.train_step(
                own.batches, reference, own.facts, limits, self.read_requests
            )
        self._end_turn()
        policy = result.policy if own.number in (None, 1) else result.policy.new_empty(0, 2)
        return replace(result, policy=policy, table=None, **self.unused)

    def park(self) -> bool:
        """Offload a frozen model between its turns; return whether that changed anything."""
        if parked := self.trainer.park():
            self.log.info("%s: waits on the host while the policy trains", self.role)
        return parked

    def forget(self) -> None:
        """Drop what a call that ran out of memory left behind."""
        if self.trainer.optimizer:
            self.trainer.forget()
        self.release()

    def release(self) -> None:
        """Return unused memory to the device, for other processes."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        """Return the columns of all pairs of a step, of which this rank computes its share."""
        own = self._share(batches)
        with self._shortages_explained(own.batches), self._as_own_role():
            columns = own.spread(self.trainer.log_probs(own.batches, own.count))
        self._end_turn()
        return columns

    @contextmanager
    def _shortages_explained(self, batches: Sequence[PairBatch]) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            error.add_note(self.explain_memory(largest(batches)))  # not shown if a retry succeeds
            # Other ranks wait for this one in a collective: to repeat the call would not help.
            if self.member.world > 1:
                raise shortage(error) from error
            raise

    def _end_turn(self) -> None:
        if self.takes_turns:
            self.release()

    def _as_own_role(self) -> AbstractContextManager[None]:
        """Return a context in which a model shared with the policy computes as the reference."""
        if not self.borrowed:
            return nullcontext()
        from rather.model.adapters import as_reference

        return as_reference(self.trainer.policy)

    def answer(
        self, prompts: Sequence[Sequence[int]], tokenizer: Any, max_new_tokens: int
    ) -> list[GeneratedAnswer]:
        """Return one greedy answer to each prompt, of a model that is whole on its device."""
        policy, parked = self.trainer.policy, self.trainer.parked
        assert isinstance(policy, PolicyModel)
        on_device = parked.on_device() if parked else nullcontext()
        with self._as_own_role(), on_device, plain_layers(policy):
            return generate(policy.causal_lm, tokenizer, prompts, Decoding(max_new_tokens))

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return self.trainer.score(facts, policy, reference)

    # --- weights and state ---

    def mix_weights(self, weights: Mapping[str, Tensor] | Path, share: float) -> None:
        """Move every weight by `share` of the way to `weights`, or to those in a folder."""
        if isinstance(weights, Mapping):
            self.trainer.mix_weights(weights, share)
        else:
            files = stored(weights, "reference")
            on_every_rank(lambda: self.trainer.mix_weights(files, share))

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not a tensor and is the same on all ranks."""
        numbers = self.trainer.numbers()
        if self.planned:  # a resumed run that fits in another way would round in another way
            numbers["fitted"] = {
                "recompute": self.planned.recompute,
                "narrow_gradients": self.has_narrow_gradients,
            }
        return numbers

    def folder_problem(self, folder: Path) -> str | None:
        """Return why this rank cannot write to a folder that the first one has just made."""
        try:
            (folder / str(self.member.rank)).touch()
        except OSError as error:
            return f"{socket.gethostname()}: {error.strerror}"
        return None

    def write_state(self, folder: Path) -> None:
        """Add this rank's state to a checkpoint, or the weights of a moving reference."""
        if self.trainer.optimizer:
            self.writer.write(folder, self.trainer.state(late=True)[0])
        else:
            self.writer.write(folder, {"reference": self.trainer.weight_pieces()})

    def finish_writing(self) -> None:
        """Wait until this rank has written its part, or a note that says why not."""
        self.writer.wait()

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        """Write the weights of all ranks; return sizes and digests by file."""
        written = on_every_rank(lambda: self._write_weights(folder.absolute(), group))
        return {name: facts for each in written if each for name, facts in each.items()}

    def _write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        groups = {group: self.trainer.weight_pieces()}
        try:
            return checkpoint.write_groups(folder, groups, rank=self.member.rank)
        except OSError as error:
            raise DiskError(
                f"{folder}: could not be written ({error.strerror}). Make room on the disk."
            ) from error

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        """Read what this rank holds from a checkpoint that the first one has verified."""
        found = checkpoint.reopen(path)
        self.fitted = numbers.get("fitted", {})
        groups = {name: found.stored(name) for name in ("model", "rng")}
        moments = found.stored("optimizer") if numbers["updates"] else {}
        self.trainer.load_state({**groups, "optimizer": moments}, numbers)

    def embedding_rows(self) -> int:
        return int(self.part.vocabulary_size)

    def peak_memory(self) -> int:
        """Return the most bytes in use since loading began; on a GPU, since training began."""
        return self.peak.bytes

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> Kept:
        """Export the model; of several ranks all write shards, and one merges them by tensor."""
        if self.member.world > 1 or self.engine:
            with shared_folder(folder) as shards:
                self.write_weights(shards, "model")
                place = shards, tokenizer, folder.absolute(), card
                is_first = self.member.rank == 0
                kept = on_every_rank(lambda: self._export(*place) if is_first else None)[0]
                assert kept
                return kept
        weights = self.trainer.weights()
        if self.source[1].has_adapter:
            found = self.trainer.weight_pieces()
            weights = {name: tensor_of(each) for name, each in found.items()}
        return export_run(self.part, weights, self.source, tokenizer, folder, card)

    def _export(self, shards: Path, tokenizer: Any, folder: Path, card: str) -> Kept:
        """Export the shards that all ranks have written as a Hugging Face model."""
        return export_run(self.part, stored(shards, "model"), self.source, tokenizer, folder, card)

    def compare_file(self, folder: Path, batches: Sequence[PairBatch]) -> list[Columns]:
        """Return the columns of these pairs here, and with the weights of an exported model.

        Empty if that model does not differ from this one, or does not fit next to it.
        """
        weights, dtype = list(self.part.parameters()), self.part.causal_lm.config.dtype
        differs = dtype not in (torch.float32, *(p.dtype for p in weights))
        free = torch.cuda.mem_get_info()[0] if self.on_gpu else free_memory()
        fits = free > 8 * sum(p.numel() for p in weights)
        if not (differs and fits) or self.part.rounding.held or self.is_divided or self.engine:
            return []
        options: dict[str, Any] = {"reward": self.config.task == "reward"}
        if self.vision:
            options["frozen"] = PARTS
        policy = load_policy(str(folder), ModelArgs(dtype="fp32"), self.device, **options)
        if self.vision:
            policy.vision = Vision(policy.causal_lm, self.vision.loader)
        other = RankTrainer(policy.requires_grad_(False), self.trainer.loss)
        return [self.compute_log_probs(batches), other.log_probs(batches)]

    # --- the process ---

    def set_environment(self) -> None:
        set_environment(self.config.envs(self.worker_config))

    def _prepare_process(self) -> None:
        """Apply settings of the whole process, before the model is loaded."""
        self.set_environment()
        torch.manual_seed(self.config.seed)
        torch.set_flush_denormal(True)  # tiny gradients become denormal and slow a CPU step tenfold
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        roles = (self.config.actor_train, self.config.reference)
        here = [role for role in roles if role.devices == self.worker_config.devices]
        limits = [role.strategy_args.gpu_memory_utilization for role in here]
        if torch.cuda.is_available() and None not in limits:
            torch.cuda.set_per_process_memory_fraction(min(1.0, sum(filter(None, limits))))


def make_worker(
    role: str, config: DPOConfig, member: RankInfo, cls: type | str | None = None
) -> ActorWorker:
    """Return the worker of a role. It may be given as a class or as a dotted path.

    The author of the config wrote the path and is trusted; nothing else ever sets it.
    """
    key = f"{role}.worker_cls"
    value = worker_class(cls or getattr(config, role).worker_cls) or ActorWorker
    try:
        found: Any = pkgutil.resolve_name(value) if isinstance(value, str) else value
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: '{value}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ActorWorker)):
        raise ConfigError(
            f"{key}: {found!r} is not a subclass of rather.cluster.worker.ActorWorker"
        )
    return found(config, role, member)


def stored(folder: Path, group: str) -> ShardedFiles:
    """Return the tensors that all ranks have written to a folder under one name."""
    return ShardedFiles(sorted(folder.glob(f"{group}-*.safetensors")))
