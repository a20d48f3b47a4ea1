"""ActorWorker: a RankTrainer behind the calls that the driver makes. One worker serves one role on one device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather import faults
from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, ShardedFiles, tensor_of
from rather.cluster.oom_report import explained, explanation, sentence
from rather.cluster.role import RankInfo
from rather.cluster.writing import Writer
from rather.config.adapters import keeps_start, reference_is_policy
from rather.config.canonical import threads_of
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts, PairLogps
from rather.errors import ConfigError, DiskError, MemoryShortage
from rather.losses.objective import PairLoss, from_config, own_loss
from rather.model.budget import TOKENS, Budget, NoRoom, choose_budget
from rather.model.check import check_length
from rather.model.export import export_adapter, export_model, export_stored
from rather.model.generate import Answer, Decoding, generate
from rather.model.layers import Recompute, arrange_layers, plain_layers
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer, schedule
from rather.parallel.apply import build_mesh
from rather.parallel.canonical import Canonical, RowOptimizer
from rather.parallel.load import Start, compute_dtype, device_of, freeze, load_divided, load_policy
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.plan.measured import Peak
from rather.plan.speed import worth_compiling
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import RankTrainer, Runner, StepResult, WholeModelRunner

RECOMPUTED = {
    "none": "kept",
    "half": "mostly kept",
    "selective": "in part recomputed",
    "full": "recomputed",
}


class ActorWorker:
    """Override `build_loss` in a subclass, and name it in `worker_cls`, to train with a loss of your own."""

    def __init__(self, config: DPOConfig, role: str, member: RankInfo | None = None) -> None:
        self.config, self.role, self.member = config, role, member or RankInfo()
        self.worker_config = config.actor_train if role == "actor_train" else config.reference
        self.device = self.member.device or device_of(self.worker_config)
        self.log = logging.getLogger(f"rather.worker.{role}-{self.member.rank}")
        self.planned: Budget | None = None  # for training
        wanted = config.checkpoint_config.async_save
        self.writer = Writer(role, self.member.rank, self.member.world, wanted, self.log)
        self.neighbour: ActorWorker | None = None  # the policy's worker, in the reference's process
        self.trainer: RankTrainer
        self.rows: int

    def build_loss(self) -> PairLoss | Callable[[PairLogps], Tensor]:
        """The objective; a subclass may return its own, or a plain function: PairLogps -> one loss per pair."""
        return from_config(self.config)

    def _objective(self) -> PairLoss:
        loss = self.build_loss()
        if isinstance(loss, PairLoss):
            self._refuse_what_nobody_asked_for(loss)
            return loss
        if self.config.loss_modifiers:
            named = ", ".join(self.config.loss_modifiers)
            raise ConfigError(
                f"{named}: a plain function from build_loss takes no modifiers; return a PairLoss"
            )
        return own_loss(loss)

    def _refuse_what_nobody_asked_for(self, own: PairLoss) -> None:
        """The driver asks reference and data for what the config's objective needs, and knows no other."""
        asked = from_config(self.config)
        more = [
            *(own.token_columns - asked.token_columns),
            *(own.pair_columns - asked.pair_columns),
        ]
        more += ["a reference"] if own.needs_reference and not asked.needs_reference else []
        more += ["whole steps"] if own.whole_batch and not asked.whole_batch else []
        if more:
            raise ConfigError(
                f"build_loss: its PairLoss needs {', '.join(more)}, which pref_loss and the modifiers of the config do "
                "not ask for; set them in the config, where the reference and the data are read by them"
            )

    @faults.by_role
    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Loads the model; `model` stands in for the configured one (evaluation of other weights)."""
        self._prepare_process()
        self.peak = Peak(self.device)
        args = self.worker_config.model_args
        self.source = (
            model or self.worker_config.model_path,
            args.of_other_weights() if model else args,
        )
        self.layout = layout(self.worker_config)
        if self.borrowed:
            self.trainer, self.rows = self.borrowed.trainer, self.borrowed.rows
            kept = keeps_start(self.config)
            told = (
                "as its adapter began, of which it keeps a copy"
                if kept
                else "with its adapters off"
            )
            self.log.info("%s: the policy %s; there is no second model", self.role, told)
            return
        self.mesh = build_mesh(self.layout, self.device)
        trains = self.role == "actor_train"
        try:
            divided = self._loaded(total_steps, trains=trains)
            optimizer = self._optimizer(divided, total_steps) if trains else None
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(f"{sentence(error)}\n{explanation(self, 0)}") from error
        runner = self._runner(divided) if isinstance(divided, PolicyModel) else None
        zeros = trains and self.config.actor_train.training_args.log_num_zeros_in_grad
        self.trainer = RankTrainer(
            divided, self._objective(), optimizer, mesh=self.mesh, runner=runner, count_zeros=zeros
        )
        if not trains and self.config.reference.offload == "on":
            self.park()

    @property
    def borrowed(self) -> ActorWorker | None:
        """The policy's worker, where this role computes with its model."""
        lent = (
            self.neighbour is not None
            and self.neighbour.source[1].has_adapter
            and reference_is_policy(self.config)
        )
        return self.neighbour if lent else None

    @property
    def is_divided(self) -> bool:
        """Whether this rank takes the way of many, which a mesh of one rank takes as well."""
        return bool(self.mesh.sizes) and not self.layout.canonical

    def _runner(self, policy: PolicyModel) -> Runner:
        if self.layout.canonical:
            return Canonical(policy, self.mesh, self.device)
        return WholeModelRunner(policy, STAGES[self.layout.stage])

    def _loaded(self, total_steps: int, *, trains: bool) -> PolicyModel | Stages:
        (name, args), lean = self.source, self.config.precision == "lean"
        if self.is_divided:
            self.compiled = self.config.compile == "on"
            recompute = (self.layout.recompute or self._usual_recompute) if trains else "none"
            asked = replace(self.layout, recompute=recompute)
            options: dict[str, Any] = {
                "trains": trains,
                "compiled": self.compiled,
                "start": self._start,
            }
            divided = load_divided(name, args, self.device, self.mesh, asked, **options)
            self._facts(divided)
            return divided
        policy = load_policy(name, args, self.device, exact=trains and not lean, start=self._start)
        self.compiled = self._compiles(policy, total_steps)
        self._facts(policy)
        if not trains:  # a policy's layers are arranged by what fits
            arrange_layers(freeze(policy), compiled=self.compiled)
        elif self.layout.canonical:  # what fits may differ with the number of ranks
            recompute = self.layout.recompute or self._usual_recompute
            arrange_layers(
                policy, recompute=recompute, offload=self.layout.offload, compiled=self.compiled
            )
        return policy

    @property
    def _start(self) -> Start:
        return Start(self.config.seed, self.role == "actor_train" and keeps_start(self.config))

    def _facts(self, policy: PolicyModel | Stages) -> None:
        """What of the whole model is asked for later, checked and told."""
        part = next(module for module in policy.modules() if isinstance(module, PolicyModel))
        self.causal_lm, self.rows = part.causal_lm, part.vocabulary_size
        check_length(self.causal_lm.config, self.config.sequence_length)
        self._tell(policy)

    @property
    def _usual_recompute(self) -> Recompute:
        """Of a divided model nothing is rehearsed: all ranks would have to agree on what fits."""
        return "full" if self.device.startswith("cuda") else "none"

    def _optimizer(self, divided: PolicyModel | Stages, total_steps: int) -> Optimizer:
        training = self.config.actor_train.training_args
        options: dict[str, Any] = {
            "schedule": schedule(training, total_steps),
            "max_grad_norm": self.config.max_grad_norm,
            "exact": divided.exact,
            "lean": self.config.precision == "lean",
            "seed": self.config.seed,
            "compute": compute_dtype(self.source[1], self.device) if self.is_divided else None,
        }
        if self.layout.canonical and self.layout.stage:
            trained = {name: p for name, p in divided.named_parameters() if p.requires_grad}
            optimizer: Optimizer = RowOptimizer(trained, self.mesh, training, **options)
        else:
            optimizer = Optimizer(divided.named_parameters(), training, **options)
        divided.exact = {}  # the optimizer's masters now
        return optimizer

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        """Tokens of a training micro-batch, as told or as many as fit; arranges the layers for them.

        `make_room` is called where activations would have to be recomputed without.
        """
        told = self.config.actor_train.max_tokens_per_microbatch_in_train
        policy = self.trainer.policy
        if self.is_divided or self.layout.canonical or not isinstance(policy, PolicyModel):
            budget = Budget(
                told or TOKENS[self.device.split(":")[0]],
                self.layout.recompute or self._usual_recompute,
            )
        else:
            try:
                budget = self._fitting(policy, told, largest_pair, make_room)
            except NoRoom as error:
                raise MemoryShortage(f"{error}\n{explanation(self, told or 0)}") from error
        self.planned, activations = budget, RECOMPUTED[budget.recompute]
        host = ", on the host" if self.layout.offload else ""
        self.log.info(
            "micro-batches of up to %d tokens, activations %s%s", budget.tokens, activations, host
        )
        self.peak.begin_training()
        return budget.tokens

    def _fitting(
        self,
        policy: PolicyModel,
        told: int | None,
        largest_pair: int,
        make_room: Callable[[], bool] | None,
    ) -> Budget:
        options: dict[str, Any] = {
            "tokens": told,
            "recompute": self.layout.recompute,
            "offload": self.layout.offload,
            "compiled": self.compiled,
            "largest_pair": largest_pair,
            "make_room": make_room,
        }
        try:
            return choose_budget(policy, self.trainer, **options)
        except NoRoom:
            if not self.trainer.narrow_gradients():
                raise
            self.log.info("gradients are added up in bfloat16: in float32 no micro-batch would fit")
            return choose_budget(policy, self.trainer, **options)

    @faults.by_role
    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        facts: PairFacts | None = None,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """`reference`, `facts` and `limits` are those of the whole step, the micro-batches this rank's own."""
        try:
            with explained(self, batches):
                return self.trainer.train_step(batches, reference, facts, limits)
        except torch.OutOfMemoryError as error:
            if not self.layout.canonical:
                raise
            raise ConfigError(
                f"determinism: canonical keeps a run's micro-batches as they are, and memory ran out: {error} Set "
                "actor_train.max_tokens_per_microbatch_in_train to less, on every number of devices alike."
            ) from error

    def park(self) -> bool:
        """Keeps a frozen model on the host between its turns; False where that is so already, or cannot be."""
        if parked := self.trainer.park():
            self.log.info("%s: waits on the host while the policy trains", self.role)
        return parked

    def forget(self) -> None:
        """What work that ran out of memory left behind."""
        if self.trainer.optimizer:
            self.trainer.forget()
        self.release()

    @faults.by_role
    def compute_log_probs(
        self, batches: Sequence[PairBatch], places: Tensor | None = None
    ) -> Columns:
        """Of the pairs in these micro-batches; where other ranks have some too, of all that stand at `places`."""
        with self._as_its_role():
            return self._log_probs(batches, places)

    def _as_its_role(self) -> AbstractContextManager[None]:
        """Where the model is the policy's, and this role is the reference, it is meanwhile what it began as."""
        if not self.borrowed:
            return nullcontext()
        from rather.model.adapters import as_it_began

        return as_it_began(self.trainer.policy)

    def _log_probs(self, batches: Sequence[PairBatch], places: Tensor | None) -> Columns:
        known = None if places is None or self.member.world == 1 else int(places.max()) + 1
        with explained(self, batches):
            columns = self.trainer.log_probs(batches, known)
        if places is None or self.member.world == 1:
            return columns
        return {name: column[places.to(column.device)] for name, column in columns.items()}

    @faults.by_role
    def answer(
        self, prompts: Sequence[Sequence[int]], tokenizer: Any, max_new_tokens: int
    ) -> list[Answer]:
        """One answer to each prompt, of a model that lies whole on its device: the likeliest token each time."""
        policy, parked = self.trainer.policy, self.trainer.parked
        assert isinstance(policy, PolicyModel)
        with self._as_its_role(), parked.here() if parked else nullcontext(), plain_layers(policy):
            return generate(policy.causal_lm, tokenizer, prompts, Decoding(max_new_tokens))

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return self.trainer.score(facts, policy, reference)

    # --- weights and state ---

    def weights(self) -> Mapping[str, Tensor]:
        return self.trainer.weights()

    @faults.by_role
    def mix_weights(
        self, weights: Mapping[str, Tensor] | Path, share: float, group: str = "reference"
    ) -> None:
        """Moves towards `weights`, or towards those that other processes have written to a folder."""
        found = weights if isinstance(weights, Mapping) else stored(weights, group)
        self.trainer.mix_weights(found, share)

    def state(self) -> tuple[dict[str, dict[str, Tensor | Shard]], dict[str, Any]]:
        return self.trainer.state()

    def numbers(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks and no tensor."""
        return self.trainer.numbers()

    @faults.by_role
    def write_state(self, folder: Path) -> None:
        """This rank's pieces as they are now, into a checkpoint that is being written; perhaps beside what follows."""
        self.writer.write(folder, self.trainer.state()[0])

    @faults.by_role
    def write_reference(self, folder: Path) -> None:
        """The same of a reference that moves."""
        self.writer.write(folder, {"reference": self.trainer.weight_pieces()})

    def finish_writing(self) -> None:
        """Returns once what this rank was to write lies in its folder, or a note that says why it does not."""
        self.writer.wait()

    @faults.by_role
    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        pieces = self.trainer.weight_pieces()
        try:
            return checkpoint.write_groups(folder, {group: pieces}, rank=self.member.rank)
        except OSError as error:
            raise DiskError(
                f"{folder}: could not be written ({error.strerror}). Make room on the disk."
            ) from error

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        """From a checkpoint that the driver has verified; only what this rank holds is read."""
        found = checkpoint.reopen(path)
        groups: dict[str, Mapping[str, Tensor]] = {
            name: found.stored(name) for name in ("model", "rng")
        }
        groups["optimizer"] = found.stored("optimizer") if numbers["updates"] else {}
        self.trainer.load_state(groups, numbers)

    def embedding_rows(self) -> int:
        return self.rows

    def peak_memory(self) -> int:
        """Bytes, since the models began to load; on a GPU since training began."""
        return self.peak.bytes

    @faults.by_role
    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        policy = self.trainer.policy
        assert isinstance(policy, PolicyModel)
        if self.source[1].has_adapter:
            whole = {name: tensor_of(piece) for name, piece in self.trainer.weight_pieces().items()}
            export_adapter(policy.causal_lm, whole, self.source, tokenizer, folder, card)
        else:
            export_model(policy, self.trainer.weights(), tokenizer, folder, card)

    @faults.by_role
    def export(self, pieces: Path, group: str, tokenizer: Any, folder: Path, card: str) -> None:
        """The model in Hugging Face's form, of the pieces that all ranks have written."""
        if self.source[1].has_adapter:
            export_adapter(
                self.causal_lm, stored(pieces, group), self.source, tokenizer, folder, card
            )
        else:
            export_stored(self.causal_lm, stored(pieces, group), tokenizer, folder, card)

    def release(self) -> None:
        """Gives memory that is not in use back to the device, where another process waits for its turn."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _compiles(self, policy: PolicyModel, total_steps: int) -> bool:
        """Compiling takes a minute or two; auto is for runs that are likely to take many."""
        wanted = self.config.compile
        if wanted != "auto" or not self.device.startswith("cuda") or self.layout.offload:
            return wanted == "on"
        weights = sum(p.numel() for p in policy.parameters())
        return worth_compiling(self.config, weights, total_steps)

    def _tell(self, policy: PolicyModel | Stages) -> None:
        weights = sum(p.numel() for p in policy.parameters())
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        dtype = str(compute_dtype(self.source[1], self.device)).removeprefix("torch.")
        extra = (
            "; layers are compiled, which takes a minute or two at the first steps"
            if self.compiled
            else ""
        )
        if self.role == "actor_train" and trained < weights:
            extra += f"; {trained / 1e6:.4g}M of them are trained, in an adapter"
        if (strategy := self.worker_config.strategy_args.strategy_name) and not self.mesh.sizes:
            extra += f"; {strategy} has nothing to divide on one device"
        told = (self.role, self.source[0], weights / 1e6, dtype, self.device, extra)
        self.log.info("%s: %s, %.4gM weights in %s on %s%s", *told)

    def set_environment(self) -> None:
        """Of the whole process. Its allocator reads it once, when anybody first looks at a GPU."""
        os.environ.update(self.config.envs(self.worker_config))
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
            os.environ.setdefault(
                "PYTORCH_ALLOC_CONF", "expandable_segments:True"
            )  # micro-batches differ in size

    def _prepare_process(self) -> None:
        """Settings of the whole process, before the model comes."""
        self.set_environment()
        torch.manual_seed(self.config.seed)
        torch.set_flush_denormal(True)  # tiny gradients become denormal and slow a CPU step tenfold
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if self.config.determinism:
            torch.set_num_threads(threads_of(self.config, self.worker_config))
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        roles = (self.config.actor_train, self.config.reference)
        shares = [role.strategy_args.gpu_memory_utilization for role in roles]
        if torch.cuda.is_available() and None not in shares:  # both roles live in this process
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, sum(share or 0.0 for share in shares))
            )


def stored(folder: Path, group: str) -> ShardedFiles:
    """The tensors that all ranks have written to a folder under one name."""
    return ShardedFiles(sorted(folder.glob(f"{group}-*.safetensors")))
