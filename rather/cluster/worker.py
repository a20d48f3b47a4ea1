"""ActorWorker: a RankTrainer behind the calls of a Role. One worker serves one role on one
device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import ShardedFiles, tensor_of
from rather.cluster.oom_report import explanation, largest, sentence
from rather.cluster.preflight import Peak
from rather.cluster.role import RankInfo
from rather.cluster.writing import Writer
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts, PairLogps
from rather.errors import ConfigError, DiskError, MemoryShortage
from rather.losses.objective import PairLoss, from_config, own_loss
from rather.model.budget import TOKENS, Budget, NoRoom, choose_budget
from rather.model.check import check_length
from rather.model.export import export_adapter, export_model, export_stored
from rather.model.generate import Decoding, GeneratedAnswer, generate
from rather.model.layers import Recompute, arrange_layers, plain_layers
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer, schedule
from rather.parallel.apply import build_mesh
from rather.parallel.canonical import Canonical, RowOptimizer
from rather.parallel.load import Start, compute_dtype, device_of, freeze, load_divided, load_policy
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.plan.speed import worth_compiling
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import RankTrainer, Runner, StepResult, WholeModelRunner

RECOMPUTED = {
    "none": "kept",
    "half": "mostly kept",
    "selective": "in part recomputed",
    "full": "recomputed",
}

CANONICAL_SHORTAGE = (
    "determinism: canonical keeps a run's micro-batches as they are, and memory ran out: {} Set "
    "actor_train.max_tokens_per_microbatch_in_train to less, on every number of devices alike."
)


class ActorWorker:
    """Override `build_loss` in a subclass, and name it in `worker_cls`, to train with a loss of
    your own."""

    def __init__(self, config: DPOConfig, role: str, member: RankInfo | None = None) -> None:
        self.config, self.role, self.member = config, role, member or RankInfo()
        self.worker_config = config.actor_train if role == "actor_train" else config.reference
        self.device = self.member.device or device_of(self.worker_config)
        self.on_gpu = self.device.startswith("cuda")
        self.log = logging.getLogger(f"rather.worker.{role}-{self.member.rank}")
        self.planned: Budget | None = None  # for training
        wanted = config.checkpoint_config.async_save
        self.writer = Writer(role, self.member.rank, self.member.world, wanted, self.log)
        self.neighbour: ActorWorker | None = None  # the policy's worker, in the reference's process
        self.borrowed: ActorWorker | None = (
            None  # the neighbour, if this role computes with its model
        )
        self.trainer: RankTrainer
        self.rows: int

    def build_loss(self) -> PairLoss | Callable[[PairLogps], Tensor]:
        """Return the objective: a PairLoss, or a plain function from PairLogps to one loss per
        pair."""
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
        # The driver reads reference and data for the config's objective, and knows no other.
        more = [
            *(loss.token_columns - config.token_columns),
            *(loss.pair_columns - config.pair_columns),
        ]
        more += ["a reference"] if loss.needs_reference and not config.needs_reference else []
        more += ["whole steps"] if loss.whole_batch and not config.whole_batch else []
        if more:
            raise ConfigError(
                f"build_loss: its PairLoss needs {', '.join(more)}, which pref_loss and the "
                "modifiers of the config do not request; set them in the config, because the "
                "driver reads the reference and the data for them"
            )
        return loss

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Load the model; `model` replaces the configured one (evaluation of other weights)."""
        self._prepare_process()
        self.peak = Peak(self.device)
        args = self.worker_config.model_args
        self.source = (
            model or self.worker_config.model_path,
            args.of_other_weights() if model else args,
        )
        self.layout = layout(self.worker_config)
        other = self.neighbour
        lent = other and other.source[1].has_adapter and self.config.reference_is_policy
        self.borrowed = other if lent else None
        if self.borrowed:
            self.trainer, self.rows = self.borrowed.trainer, self.borrowed.rows
            kept = self.config.keeps_start
            how = "as its adapter began, from a frozen copy" if kept else "with its adapters off"
            self.log.info("%s: the policy %s; there is no second model", self.role, how)
            return
        self.mesh = build_mesh(self.layout, self.device)
        trains = self.role == "actor_train"
        try:
            policy = self._load(total_steps, trains=trains)
            optimizer = self._optimizer(policy, total_steps) if trains else None
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(f"{sentence(error)}\n{explanation(self, 0)}") from error
        runner: Runner | None = None
        if isinstance(policy, PolicyModel):
            canonical, stage = self.layout.canonical, STAGES[self.layout.stage]
            runner = (
                Canonical(policy, self.mesh, self.device)
                if canonical
                else WholeModelRunner(policy, stage)
            )
        zeros = trains and self.config.actor_train.training_args.log_num_zeros_in_grad
        self.trainer = RankTrainer(
            policy, self._objective(), optimizer, mesh=self.mesh, runner=runner, count_zeros=zeros
        )
        if not trains and self.config.reference.offload == "on":
            self.park()

    @property
    def is_divided(self) -> bool:
        """Whether this rank uses the code for several ranks, as a mesh of one rank does too."""
        return bool(self.mesh.sizes) and not self.layout.canonical

    @property
    def _recompute(self) -> Recompute:
        """Of a divided model nothing is rehearsed: all ranks would have to agree on what fits."""
        return self.layout.recompute or ("full" if self.on_gpu else "none")

    def _load(self, total_steps: int, *, trains: bool) -> PolicyModel | Stages:
        name, args = self.source
        start = Start(self.config.seed, trains and self.config.keeps_start)
        self.compiled = self.config.compile == "on"
        policy: PolicyModel | Stages
        if self.is_divided:
            shape = replace(self.layout, recompute=self._recompute if trains else "none")
            options: dict[str, Any] = {"trains": trains, "compiled": self.compiled, "start": start}
            policy = load_divided(name, args, self.device, self.mesh, shape, **options)
        else:
            exact = trains and self.config.precision != "lean"
            policy = load_policy(name, args, self.device, exact=exact, start=start)
            # Compiling takes a minute or two; auto compiles runs that are likely to take many.
            if self.config.compile == "auto" and self.on_gpu and not self.layout.offload:
                weights = sum(p.numel() for p in policy.parameters())
                self.compiled = worth_compiling(self.config, weights, total_steps)
        part = next(module for module in policy.modules() if isinstance(module, PolicyModel))
        self.causal_lm, self.rows = part.causal_lm, part.vocabulary_size
        check_length(self.causal_lm.config, self.config.sequence_length)
        self._log_size(policy)
        if self.is_divided:
            return policy
        assert isinstance(policy, PolicyModel)
        if not trains:  # a policy's layers are arranged by what fits
            arrange_layers(freeze(policy), compiled=self.compiled)
        elif self.layout.canonical:  # what fits may differ with the number of ranks
            options = {"offload": self.layout.offload, "compiled": self.compiled}
            arrange_layers(policy, recompute=self._recompute, **options)
        return policy

    def _log_size(self, policy: PolicyModel | Stages) -> None:
        weights = sum(p.numel() for p in policy.parameters())
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        dtype = str(compute_dtype(self.source[1], self.device)).removeprefix("torch.")
        extra = "; layers are compiled, which takes a minute or two at the first steps"
        extra = extra if self.compiled else ""
        if self.role == "actor_train" and trained < weights:
            extra += f"; {trained / 1e6:.4g}M of them are trained, in an adapter"
        if (strategy := self.worker_config.strategy_args.strategy_name) and not self.mesh.sizes:
            extra += f"; {strategy} has nothing to divide on one device"
        said = (self.role, self.source[0], weights / 1e6, dtype, self.device, extra)
        self.log.info("%s: %s, %.4gM weights in %s on %s%s", *said)

    def _optimizer(self, policy: PolicyModel | Stages, total_steps: int) -> Optimizer:
        training = self.config.actor_train.training_args
        options: dict[str, Any] = {
            "schedule": schedule(training, total_steps),
            "max_grad_norm": self.config.max_grad_norm,
            "exact": policy.exact,
            "lean": self.config.precision == "lean",
            "seed": self.config.seed,
            "compute": compute_dtype(self.source[1], self.device) if self.is_divided else None,
        }
        if self.layout.canonical and self.layout.stage:
            trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
            optimizer: Optimizer = RowOptimizer(trained, self.mesh, training, **options)
        else:
            optimizer = Optimizer(policy.named_parameters(), training, **options)
        policy.exact = {}  # the optimizer's masters now
        return optimizer

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        """Return the tokens of a training micro-batch, as configured or as many as fit; arrange the
        layers for them.

        `make_room` is called if activations would have to be recomputed otherwise.
        """
        tokens = self.config.actor_train.max_tokens_per_microbatch_in_train
        policy = self.trainer.policy
        if self.is_divided or self.layout.canonical or not isinstance(policy, PolicyModel):
            budget = Budget(tokens or TOKENS[self.device.split(":")[0]], self._recompute)
        else:
            fit = partial(
                choose_budget,
                policy,
                self.trainer,
                tokens=tokens,
                recompute=self.layout.recompute,
                offload=self.layout.offload,
                compiled=self.compiled,
                largest_pair=largest_pair,
                make_room=make_room,
            )
            try:
                budget = self._fit(fit)
            except NoRoom as error:
                raise MemoryShortage(f"{error}\n{explanation(self, tokens or 0)}") from error
        self.planned, activations = budget, RECOMPUTED[budget.recompute]
        host = ", on the host" if self.layout.offload else ""
        self.log.info(
            "micro-batches of up to %d tokens, activations %s%s", budget.tokens, activations, host
        )
        self.peak.begin_training()
        return budget.tokens

    def _fit(self, fit: Callable[[], Budget]) -> Budget:
        try:
            return fit()
        except NoRoom:
            if not self.trainer.narrow_gradients():
                raise
            self.log.info("gradients are added up in bfloat16: in float32 no micro-batch would fit")
            return fit()

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        facts: PairFacts | None = None,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """All arguments but the micro-batches of this rank are those of the whole step."""
        try:
            return self.trainer.train_step(batches, reference, facts, limits)
        except torch.OutOfMemoryError as error:
            if self.layout.canonical:
                raise ConfigError(CANONICAL_SHORTAGE.format(error)) from error
            error.add_note(explanation(self, largest(batches)))  # not shown if a retry succeeds
            raise

    def park(self) -> bool:
        """Keep a frozen model on the host between its turns; False if it is there already, or
        cannot be."""
        if parked := self.trainer.park():
            self.log.info("%s: waits on the host while the policy trains", self.role)
        return parked

    def forget(self) -> None:
        """Drop what a call that ran out of memory left behind."""
        if self.trainer.optimizer:
            self.trainer.forget()
        self.release()

    def compute_log_probs(
        self, batches: Sequence[PairBatch], places: Tensor | None = None
    ) -> Columns:
        """Return the columns of these pairs; if other ranks have some too, of all pairs at
        `places`."""
        if self.member.world == 1:
            places = None
        known = None if places is None else int(places.max()) + 1
        try:
            with self._as_own_role():
                columns = self.trainer.log_probs(batches, known)
        except torch.OutOfMemoryError as error:
            error.add_note(explanation(self, largest(batches)))
            raise
        if places is None:
            return columns
        return {name: column[places.to(column.device)] for name, column in columns.items()}

    def _as_own_role(self) -> AbstractContextManager[None]:
        """If this reference is the policy's model, put it meanwhile into the state that it began
        with."""
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
        with (
            self._as_own_role(),
            parked.on_device() if parked else nullcontext(),
            plain_layers(policy),
        ):
            return generate(policy.causal_lm, tokenizer, prompts, Decoding(max_new_tokens))

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return self.trainer.score(facts, policy, reference)

    # --- weights and state ---

    def weights(self) -> Mapping[str, Tensor]:
        return self.trainer.weights()

    def mix_weights(
        self, weights: Mapping[str, Tensor] | Path, share: float, group: str = "reference"
    ) -> None:
        """Move towards `weights`, or towards those that other processes have written to a
        folder."""
        found = weights if isinstance(weights, Mapping) else stored(weights, group)
        self.trainer.mix_weights(found, share)

    def numbers(self) -> dict[str, Any]:
        return self.trainer.numbers()

    def write_state(self, folder: Path) -> None:
        """Add this rank's shards to a checkpoint that is being written, perhaps in the
        background."""
        self.writer.write(folder, self.trainer.state()[0])

    def write_reference(self, folder: Path) -> None:
        """Add the weights of a reference that moves."""
        self.writer.write(folder, {"reference": self.trainer.weight_pieces()})

    def finish_writing(self) -> None:
        self.writer.wait()

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        groups = {group: self.trainer.weight_pieces()}
        try:
            return checkpoint.write_groups(folder, groups, rank=self.member.rank)
        except OSError as error:
            raise DiskError(
                f"{folder}: could not be written ({error.strerror}). Make room on the disk."
            ) from error

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        """Read what this rank holds from a checkpoint that the driver has verified."""
        found = checkpoint.reopen(path)
        names = ("model", "rng", *(["optimizer"] if numbers["updates"] else []))
        groups: dict[str, Mapping[str, Tensor]] = {"optimizer": {}}
        groups |= {name: found.stored(name) for name in names}
        self.trainer.load_state(groups, numbers)

    def embedding_rows(self) -> int:
        return self.rows

    def peak_memory(self) -> int:
        """Return the most bytes in use since the models began to load; on a GPU since training
        began."""
        return self.peak.bytes

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        policy = self.trainer.policy
        assert isinstance(policy, PolicyModel)
        if self.source[1].has_adapter:
            whole = {name: tensor_of(each) for name, each in self.trainer.weight_pieces().items()}
            export_adapter(policy.causal_lm, whole, self.source, tokenizer, folder, card)
        else:
            export_model(policy, self.trainer.weights(), tokenizer, folder, card)

    def export(self, shards: Path, group: str, tokenizer: Any, folder: Path, card: str) -> None:
        """Make a Hugging Face model of the shards that all ranks have written."""
        found = stored(shards, group)
        if self.source[1].has_adapter:
            export_adapter(self.causal_lm, found, self.source, tokenizer, folder, card)
        else:
            export_stored(self.causal_lm, found, tokenizer, folder, card)

    def release(self) -> None:
        """Return unused memory to the device, where another process waits for its turn."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    # --- the process ---

    def set_environment(self) -> None:
        """Set the environment of the process. The allocator reads it once, at the first use of a
        GPU."""
        os.environ.update(self.config.envs(self.worker_config))
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
            # Micro-batches differ in size.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    def _prepare_process(self) -> None:
        """Apply settings of the whole process, before the model is loaded."""
        self.set_environment()
        torch.manual_seed(self.config.seed)
        torch.set_flush_denormal(True)  # tiny gradients become denormal and slow a CPU step tenfold
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if self.config.determinism:
            torch.set_num_threads(self.config.threads(self.worker_config))
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        roles = (self.config.actor_train, self.config.reference)
        limits = [role.strategy_args.gpu_memory_utilization for role in roles]
        if torch.cuda.is_available() and None not in limits:  # both roles are in this process
            torch.cuda.set_per_process_memory_fraction(min(1.0, sum(filter(None, limits))))


def stored(folder: Path, group: str) -> ShardedFiles:
    """Return the tensors that all ranks have written to a folder under one name."""
    return ShardedFiles(sorted(folder.glob(f"{group}-*.safetensors")))
