"""RankTrainer: what one rank does with packed pairs. Log-probs, a training step, its state.

No files, no loop over steps, nothing about where the batches come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rather.batch import Columns, PairBatch, PairFacts
from rather.errors import NonFiniteError
from rather.metrics import Scored, weighted_sums
from rather.model.park import Parked
from rather.model.policy import PolicyModel, pair_columns
from rather.objective import PairLoss
from rather.optim import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What a step tells the driver: a handful of numbers and two log-probs per pair."""

    sums: dict[str, float]  # metrics.weighted_sums over the step
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
        loss: PairLoss,
        optimizer: Optimizer | None = None,
        *,
        count_zeros: bool = False,
    ) -> None:
        self.policy, self.loss, self.optimizer = policy, loss, optimizer
        self.count_zeros = count_zeros
        self.parked: Parked | None = None
        self.device = str(next(policy.parameters()).device)

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        """What the loss asks of a model, of all pairs in their order within the step. On the device: nobody waits."""
        with self.parked.here() if self.parked else nullcontext():
            return self._gathered(batches)

    def park(self) -> bool:
        """From now on a frozen model lies on the host between its turns; False where that is so or cannot be."""
        if self.parked or self.optimizer or not self.device.startswith("cuda"):
            return False
        self.parked = Parked(self.policy)
        return True

    def train_step(self, batches: Sequence[PairBatch], reference: Columns | None) -> StepResult:
        """One optimizer step: sum of weighted losses / sum of weights over all micro-batches, then one update."""
        assert self.optimizer is not None
        facts = PairFacts.of_step(batches)
        total = float(facts.weight.sum()) or 1.0
        facts = facts.to(self.device)
        known = _moved(reference, self.device)
        if self.loss.whole_batch:
            sums, policy, slopes = self._slopes(batches, facts, known, total)
        else:
            sums, policy, slopes = {}, torch.zeros_like(facts.length), {}
        for batch in batches:
            batch = batch.to(self.device)
            columns = pair_columns(self.policy, batch, self.loss.token_columns)
            if slopes:
                objective = sum((columns[name] * slopes[name][batch.pair_P]).sum() for name in slopes)
                assert isinstance(objective, Tensor)
            else:
                scored = self._score(facts.at(batch.pair_P), columns, _rows(known, batch.pair_P), facts)
                objective = scored.losses @ batch.weight_P / total
                policy[batch.pair_P] = scored.x.policy.detach()
                sums = _added(sums, weighted_sums(scored, batch.weight_P, self.loss))
            (objective * self.optimizer.scale).backward()  # type: ignore[no-untyped-call]
        return self._update(sums, policy)

    def rehearse(self, batch: PairBatch) -> None:
        """Forward and backward without an update: shows what memory a micro-batch takes. `forget` ends it."""
        pair_columns(self.policy, batch.to(self.device))["sum"].sum().backward()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Gradients of a step that will not be finished."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()

    def narrow_gradients(self) -> bool:
        """Adds up gradients in the weights' own precision from now on; False where that is so already."""
        return self.optimizer is not None and self.optimizer.narrow_gradients()

    @torch.no_grad()
    def score(self, facts: PairFacts, policy: Columns, reference: Columns | None) -> dict[str, float]:
        """metrics.weighted_sums of pairs whose log-probs are known: a whole evaluation set at once."""
        facts = facts.to(self.device)
        scored = self._score(facts, _moved(policy, self.device) or {}, _moved(reference, self.device), facts)
        return _floats(weighted_sums(scored, facts.weight, self.loss))

    def mix_weights(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Moves every weight by `share` of the way to `weights` (TR-DPO)."""
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(torch.lerp(parameter.float(), weights[name].to(parameter.device).float(), share))

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by group, and numbers: all that a later step depends on."""
        assert self.optimizer is not None
        optimizer = self.optimizer
        numbers: dict[str, Any] = {"updates": optimizer.updates}
        if optimizer.loss_scale:
            numbers["loss_scale"] = [optimizer.loss_scale.value, optimizer.loss_scale.clean]
        masters = {name: master.cpu() for name, master in optimizer.masters.items()}
        return {"model": masters, "optimizer": optimizer.moments(), "rng": _rng_state()}, numbers

    def load_state(self, groups: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        assert self.optimizer is not None
        self.optimizer.load(groups["model"], groups["optimizer"], numbers["updates"])
        if self.optimizer.loss_scale and "loss_scale" in numbers:
            self.optimizer.loss_scale.value, self.optimizer.loss_scale.clean = numbers["loss_scale"]
        torch.set_rng_state(groups["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in groups["rng"]:
            torch.cuda.set_rng_state(groups["rng"]["cuda"])

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's weights as exactly as they are known; each is made when it is asked for."""
        if self.optimizer:
            return self.optimizer.masters
        return {name: parameter.detach() for name, parameter in self.policy.named_parameters()}

    def _gathered(self, batches: Sequence[PairBatch]) -> dict[str, Tensor]:
        order = torch.argsort(torch.cat([batch.pair_P for batch in batches])).to(self.device, non_blocking=True)
        parts = [pair_columns(self.policy, batch.to(self.device), self.loss.token_columns) for batch in batches]
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def _slopes(
        self, batches: Sequence[PairBatch], facts: PairFacts, reference: Columns | None, total: float
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """For a loss over the whole batch: its metrics, and its gradient by every log-prob of the step.

        One pass without gradients sees all pairs; the ordinary pass is then weighted by these slopes.
        """
        with torch.no_grad():
            columns = self._gathered(batches)
        leaves = {name: column.requires_grad_() for name, column in columns.items()}
        scored = self._score(facts, columns, reference, facts)
        slopes = torch.autograd.grad(scored.losses @ facts.weight / total, list(leaves.values()))
        sums = weighted_sums(scored, facts.weight, self.loss)
        return sums, columns["sum"].detach(), dict(zip(leaves, slopes, strict=True))

    def _score(self, facts: PairFacts, policy: Columns, reference: Columns | None, step: PairFacts) -> Scored:
        """Losses and rewards of some pairs; `step` holds all pairs they are averaged with."""
        x = facts.seen_by_a_loss(policy, reference, step.mean_chosen_length)
        return Scored(x, self.loss(x), self.loss.rewards(x))

    def _update(self, sums: dict[str, Tensor], policy: Tensor) -> StepResult:
        """Clip and step, unless the gradient is not finite: float16 then halves its scale, anything else stops."""
        optimizer = self.optimizer
        assert optimizer is not None
        told = [optimizer.grad_norm(), *sums.values(), *self._zeros_in_gradients()]
        # The one host synchronisation of a step.
        numbers = torch.cat([torch.stack(told), policy.flatten()]).cpu()
        grad_norm, *values = numbers[: len(told)].tolist()
        lr = optimizer.lr
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
        zeros = int(values[-1]) if self.count_zeros else None
        named = dict(zip(sums, values, strict=False))
        return StepResult(named, numbers[len(told) :].view_as(policy), grad_norm, lr, skipped, zeros)

    def _zeros_in_gradients(self) -> list[Tensor]:
        if not self.count_zeros or self.optimizer is None:
            return []
        return [torch.stack([(g == 0).sum() for g in self.optimizer.gradients()]).sum().double()]


def _rng_state() -> dict[str, Tensor]:
    """Nothing of ours draws random numbers within a step; a user's own loss may."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _moved(columns: Columns | None, device: str) -> Columns | None:
    return None if columns is None else {name: column.to(device, non_blocking=True) for name, column in columns.items()}


def _rows(columns: Columns | None, places: Tensor) -> Columns | None:
    return None if columns is None else {name: column[places] for name, column in columns.items()}


def _added(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name] + value if name in one else value for name, value in other.items()}


def _floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
