"""ActorWorker: a RankTrainer behind the calls that the driver makes. One worker serves one role on one device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.batch import Columns, PairBatch, PairFacts, PairLogps
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.model.budget import NoRoom, choose_budget
from rather.model.check import check_length
from rather.model.export import export_model
from rather.model.layers import arrange_layers
from rather.model.load import device_of, freeze, load_policy
from rather.model.policy import PolicyModel
from rather.objective import PairLoss, from_config, own_loss
from rather.optim import Optimizer, schedule
from rather.trainer import RankTrainer, StepResult

COMMON_SPEED = 3e14  # FLOP/s of a GPU without compilation
WORTH_COMPILING = 600.0  # seconds of training
RECOMPUTED = {"none": "kept", "half": "mostly kept", "selective": "in part recomputed", "full": "recomputed"}


class ActorWorker:
    """Override `build_loss` in a subclass, and name it in `worker_cls`, to train with a loss of your own."""

    def __init__(self, config: DPOConfig, role: str) -> None:
        self.config, self.role = config, role
        self.worker_config = config.actor_train if role == "actor_train" else config.reference
        self.device = device_of(self.worker_config)
        self.log = logging.getLogger(f"rather.worker.{role}-0")

    def build_loss(self) -> PairLoss | Callable[[PairLogps], Tensor]:
        """The objective; a subclass may return its own, or a plain function: PairLogps -> one loss per pair."""
        return from_config(self.config)

    def _objective(self) -> PairLoss:
        loss = self.build_loss()
        if isinstance(loss, PairLoss):
            return loss
        if self.config.loss_modifiers:
            named = ", ".join(self.config.loss_modifiers)
            raise ConfigError(f"{named}: a plain function from build_loss takes no modifiers; return a PairLoss")
        return own_loss(loss)

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Loads the model; `model` stands in for the configured one (evaluation of other weights)."""
        self._prepare_process()
        args = self.worker_config.model_args
        if model:  # a revision belongs to the configured model
            args = args.model_copy(update={"revision": None})
        name = model or self.worker_config.model_path
        trains, lean = self.role == "actor_train", self.config.precision == "lean"
        policy = load_policy(name, args, self.device, exact=trains and not lean)
        self.rows = policy.vocabulary_size
        check_length(policy.causal_lm.config, self.config.sequence_length)
        self.compiled = self._compiles(policy, total_steps)
        self._tell(name, policy)
        if not trains:
            arrange_layers(policy, compiled=self.compiled)
            self.trainer = RankTrainer(freeze(policy), self._objective())
            if self.config.reference.offload == "on":
                self.park()
            return
        training = self.config.actor_train.training_args
        optimizer = Optimizer(
            policy.named_parameters(),
            training,
            schedule=schedule(training, total_steps),
            max_grad_norm=self.config.max_grad_norm,
            exact=policy.exact,
            lean=lean,
            seed=self.config.seed,
        )
        policy.exact = {}  # the optimizer's masters now
        self.trainer = RankTrainer(
            policy, self._objective(), optimizer, count_zeros=training.log_num_zeros_in_grad
        )

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        """Tokens of a training micro-batch, as told or as many as fit; arranges the layers for them.

        `make_room` is called where activations would have to be recomputed without.
        """
        asked = layout(self.worker_config)
        options: dict[str, Any] = {
            "tokens": self.config.actor_train.max_tokens_per_microbatch_in_train,
            "recompute": asked.recompute,
            "offload": asked.offload,
            "compiled": self.compiled,
            "largest_pair": largest_pair,
            "make_room": make_room,
        }
        trainer = self.trainer
        try:
            budget = choose_budget(trainer.policy, trainer, **options)
        except NoRoom:
            if not trainer.narrow_gradients():
                raise
            self.log.info("gradients are added up in bfloat16: in float32 no micro-batch would fit")
            budget = choose_budget(trainer.policy, trainer, **options)
        told = RECOMPUTED[budget.recompute]
        host = ", on the host" if asked.offload else ""
        self.log.info("micro-batches of up to %d tokens, activations %s%s", budget.tokens, told, host)
        return budget.tokens

    def park(self) -> bool:
        """Keeps a frozen model on the host between its turns; False where that is so already, or cannot be."""
        if parked := self.trainer.park():
            self.log.info("%s: waits on the host while the policy trains", self.role)
        return parked

    def train_step(self, batches: Sequence[PairBatch], reference: Columns | None) -> StepResult:
        return self.trainer.train_step(batches, reference)

    def forget(self) -> None:
        """What a step that ran out of memory left behind."""
        self.trainer.forget()
        torch.cuda.empty_cache()

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        return self.trainer.log_probs(batches)

    def score(self, facts: PairFacts, policy: Columns, reference: Columns | None) -> dict[str, float]:
        return self.trainer.score(facts, policy, reference)

    def weights(self) -> Mapping[str, Tensor]:
        return self.trainer.weights()

    def mix_weights(self, weights: Mapping[str, Tensor], share: float) -> None:
        self.trainer.mix_weights(weights, share)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return self.trainer.state()

    def load_state(self, groups: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        self.trainer.load_state(groups, numbers)

    def embedding_rows(self) -> int:
        return self.rows

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        export_model(self.trainer.policy, self.trainer.weights(), tokenizer, folder, card)

    def _compiles(self, policy: PolicyModel, total_steps: int) -> bool:
        """Compiling takes a minute or two; auto is for runs that are likely to take many."""
        wanted = self.config.compile
        if wanted != "auto" or not self.device.startswith("cuda") or layout(self.worker_config).offload:
            return wanted == "on"
        weights = sum(p.numel() for p in policy.parameters())
        tokens = total_steps * self.config.global_batch() * self.config.sequence_length
        return 6.0 * weights * tokens / COMMON_SPEED > WORTH_COMPILING

    def _tell(self, name: str, policy: PolicyModel) -> None:
        weights = sum(p.numel() for p in policy.parameters())
        dtype = str(policy.causal_lm.dtype).removeprefix("torch.")
        extra = "; layers are compiled, which takes a minute or two at the first steps" if self.compiled else ""
        if strategy := self.worker_config.strategy_args.strategy_name:
            extra += f"; {strategy} has nothing to divide on one device"
        self.log.info("%s: %s, %.4gM weights in %s on %s%s", self.role, name, weights / 1e6, dtype, self.device, extra)

    def _prepare_process(self) -> None:
        """Settings of the whole process, before the model comes."""
        os.environ.update(self.config.envs(self.worker_config))
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # micro-batches differ in size
        torch.set_flush_denormal(True)  # tiny gradients become denormal and slow a CPU step tenfold
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        roles = (self.config.actor_train, self.config.reference)
        shares = [role.strategy_args.gpu_memory_utilization for role in roles]
        if torch.cuda.is_available() and None not in shares:  # both roles live in this process
            torch.cuda.set_per_process_memory_fraction(min(1.0, sum(share or 0.0 for share in shares)))
