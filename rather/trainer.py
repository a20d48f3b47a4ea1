"""RankTrainer: what one rank does with packed pairs. Log-probs, a training step, its state.

No files, no loop over steps, nothing about where the batches come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rather.batch import PairBatch, PairLogps
from rather.errors import NonFiniteError
from rather.losses import Loss
from rather.metrics import Scored, rewards, weighted_sums
from rather.model.policy import PolicyModel, pair_logps, response_logps
from rather.optim import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What a step tells the driver: a handful of numbers and two log-probs per pair."""

    sums: Tensor  # metrics.weighted_sums over the step
    policy: Tensor  # [pairs, 2] log-probs before the update
    grad_norm: float
    lr: float
    skipped: int  # 1 when float16 overflowed and nothing was touched
    zeros_in_grad: int | None


class RankTrainer:
    """One policy on one device, with its loss and, when it is trained, its optimizer."""

    def __init__(
        self,
        policy: PolicyModel,
        loss: Loss | None = None,
        beta: float = 0.0,
        optimizer: Optimizer | None = None,
        *,
        count_zeros: bool = False,
    ) -> None:
        self.policy, self.loss, self.beta, self.optimizer = policy, loss, beta, optimizer
        self.count_zeros = count_zeros
        self.device = str(next(policy.parameters()).device)

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PairBatch]) -> Tensor:
        """[pairs, 2] summed log-probs of the pairs of all micro-batches, in their order within the step."""
        out = torch.zeros(_pairs(batches), 2, dtype=torch.float64, device=self.device)
        for batch in batches:
            batch = batch.to(self.device)
            out[batch.pair_P] = self._pair_logps(batch)
        return out.cpu()

    def train_step(self, batches: Sequence[PairBatch], reference: Tensor | None) -> StepResult:
        """One optimizer step: sum of weighted losses / sum of weights over all micro-batches, then one update."""
        assert self.optimizer is not None
        total_weight = sum(float(batch.weight_P.sum()) for batch in batches)
        policy = torch.zeros(_pairs(batches), 2, dtype=torch.float64, device=self.device)
        sums: Tensor | float = 0.0
        for batch in batches:
            batch = batch.to(self.device)
            scored = self._score(batch, self._pair_logps(batch), reference)
            (scored.losses @ batch.weight_P * (self.optimizer.scale / (total_weight or 1.0))).backward()  # type: ignore[no-untyped-call]
            policy[batch.pair_P] = scored.x.policy.detach()
            sums = sums + weighted_sums(scored, batch.weight_P)
        assert isinstance(sums, Tensor)
        return self._update(sums, policy)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PairBatch], reference: Tensor | None) -> Tensor:
        """metrics.weighted_sums of the micro-batches, nothing trained."""
        sums: Tensor | float = 0.0
        for batch in batches:
            batch = batch.to(self.device)
            scored = self._score(batch, self._pair_logps(batch), reference)
            sums = sums + weighted_sums(scored, batch.weight_P)
        assert isinstance(sums, Tensor)
        return sums.cpu()

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by group, and numbers: all that a later step depends on."""
        assert self.optimizer is not None
        optimizer = self.optimizer
        numbers: dict[str, Any] = {"updates": optimizer.updates}
        if optimizer.loss_scale:
            numbers["loss_scale"] = [optimizer.loss_scale.value, optimizer.loss_scale.clean]
        masters = {name: master.detach() for name, master in optimizer.masters.items()}
        return {"model": masters, "optimizer": optimizer.moments(), "rng": _rng_state()}, numbers

    def load_state(self, groups: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        assert self.optimizer is not None
        self.optimizer.load(groups["model"], groups["optimizer"], numbers["updates"])
        if self.optimizer.loss_scale and "loss_scale" in numbers:
            self.optimizer.loss_scale.value, self.optimizer.loss_scale.clean = numbers["loss_scale"]
        torch.set_rng_state(groups["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in groups["rng"]:
            torch.cuda.set_rng_state(groups["rng"]["cuda"])

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights as exactly as they are known."""
        masters = self.optimizer.masters if self.optimizer else dict(self.policy.named_parameters())
        return {name: master.detach() for name, master in masters.items()}

    def _pair_logps(self, batch: PairBatch) -> Tensor:
        return pair_logps(response_logps(self.policy(batch), batch), batch)

    def _score(self, batch: PairBatch, policy: Tensor, reference: Tensor | None) -> Scored:
        assert self.loss is not None
        length = torch.stack([batch.length_R[batch.chosen_P], batch.length_R[batch.rejected_P]], dim=1)
        known = None if reference is None else reference.to(self.device)[batch.pair_P]
        x = PairLogps(policy, known, length)
        return Scored(x, self.loss(x), rewards(x, self.beta))

    def _update(self, sums: Tensor, policy: Tensor) -> StepResult:
        """Clip and step, unless the gradient is not finite: float16 then halves its scale, anything else stops."""
        optimizer = self.optimizer
        assert optimizer is not None
        grad_norm = float(optimizer.grad_norm())  # the one host synchronisation of a step
        lr = optimizer.lr
        zeros = sum(int((g == 0).sum()) for g in optimizer.gradients()) if self.count_zeros else None
        skipped = 0 if math.isfinite(grad_norm) else 1
        if not skipped:
            optimizer.step(grad_norm)
            if optimizer.loss_scale:
                optimizer.loss_scale.succeeded()
        elif optimizer.loss_scale and optimizer.loss_scale.value > 1:
            optimizer.loss_scale.overflowed()
        else:
            raise NonFiniteError(
                f"the gradient is not finite (norm {grad_norm}); the weights were not touched. "
                "Lower the learning rate, or train in bf16 or fp32."
            )
        optimizer.zero_grad()
        return StepResult(sums.cpu(), policy.cpu(), grad_norm, lr, skipped, zeros)


def _rng_state() -> dict[str, Tensor]:
    """Nothing of ours draws random numbers within a step; a user's own loss may."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _pairs(batches: Sequence[PairBatch]) -> int:
    return sum(len(batch.pair_P) for batch in batches)
