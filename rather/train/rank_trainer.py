"""RankTrainer: what one rank does with packed pairs: log-probs, a training step, its state.

It knows no files and no loop. On several ranks each has its own micro-batches of the step; one
collective sums up their numbers, and each number comes from one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rather.checkpoint.sharded_tensors import LocalShards, Shard, ShardSpec
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.losses.metrics import Scored, weighted_sums
from rather.losses.objective import PairLoss
from rather.model.collectives import all_reduce_
from rather.model.layers import HostOffloaded
from rather.model.policy import START, PolicyModel, pair_columns
from rather.optim.optimizer import Optimizer
from rather.parallel.mesh import Mesh
from rather.parallel.shard import Stage, announce, counted, local, places, settle
from rather.parallel.stages import Stages
from rather.train.nonfinite import (
    NonFiniteReport,
    Reason,
    StepLimits,
    lost_pairs,
    nonfinite_report,
)

Objective = Callable[[PairBatch, Columns], Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of a step for the driver: a few numbers, and two log-probs per pair."""

    sums: dict[str, float]  # metrics.weighted_sums over the step
    policy: Tensor  # [pairs, 2] log-probs before the update
    grad_norm: float
    lr: float
    skip_reason: Reason | None  # why the step was not applied; None if it was
    zeros_in_grad: int | None
    nonfinite: NonFiniteReport | None = None  # where NaN or Inf was found
    by_batch: Sequence[Mapping[str, float]] = ()  # the same sums of each micro-batch

    @property
    def skipped(self) -> int:
        return int(self.skip_reason is not None)

    @property
    def loss(self) -> float:
        return self.sums["loss"] / self.sums["weight"] if self.sums["weight"] else math.nan


class Runner(Protocol):
    """Sends micro-batches through the model: in sequence, or through pipeline stages."""

    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]] | None:
        """Columns of each micro-batch, without gradients; None on a rank that does not see them."""

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        """Adds up the gradients of the objective of each micro-batch, over dp and cp as well."""

    def sum_copies(self, gradient_of: Callable[[str], Tensor | None]) -> None:
        """Gives parameters that lie on several ranks of the runner the sum of their gradients."""


class WholeModelRunner:
    """The Runner of a model that lies whole, or in shards, on its rank."""

    def __init__(self, policy: PolicyModel, stage: Stage = "ddp") -> None:
        self.policy, self.stage, self.device = policy, stage, device_of(policy)
        self._is_sharded = isinstance(policy, FSDPModule)

    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]]:
        own = (self.policy.share(batch).to(self.device) for batch in batches)
        found = [pair_columns(self.policy, batch, wanted) for batch in own]
        if self._is_sharded:
            settle(self.policy)
        return found

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        for number, batch in enumerate(batches, start=1):
            if self._is_sharded:
                announce(self.policy, self.stage, last=number == len(batches))
            own = self.policy.share(batch).to(self.device)
            objective(own, pair_columns(self.policy, own, wanted)).backward()  # type: ignore[no-untyped-call]

    def sum_copies(self, gradient_of: Callable[[str], Tensor | None]) -> None:
        """A whole model has no parameters on several ranks."""


class RankTrainer:
    """One policy, or this rank's part of one, with its loss and, when it is trained, its optimizer."""

    def __init__(
        self,
        policy: PolicyModel | Stages,
        loss: PairLoss,
        optimizer: Optimizer | None = None,
        *,
        mesh: Mesh | None = None,
        runner: Runner | None = None,
        count_zeros: bool = False,
    ) -> None:
        self.policy, self.loss, self.optimizer = policy, loss, optimizer
        self.mesh = mesh or Mesh()
        self.count_zeros = count_zeros
        self.parked: HostOffloaded | None = None
        self.device = device_of(policy)
        self.runner: Runner = runner or (
            policy if isinstance(policy, Stages) else WholeModelRunner(policy)
        )
        self._counted = counted(policy, self.mesh)
        self._is_alone = self.mesh.world == 1
        self._dp, self._dp_rank = self.mesh.size("dp"), self.mesh.rank("dp")
        self._is_primary = (
            self.mesh.rank("cp") == 0 and self.mesh.rank("tp") == 0
        )  # for ranks with the same pairs

    @property
    def _trained(self) -> Optimizer:
        assert self.optimizer is not None, "this rank does not train"
        return self.optimizer

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PairBatch], pairs: int | None = None) -> Columns:
        """Return the columns that the loss needs, for all pairs in step order, on the device.

        `pairs` is the number of pairs of all ranks; without it the ranks ask each other.
        """
        with self.parked.on_device() if self.parked else nullcontext():
            return self._gathered(batches, pairs)

    def park(self) -> bool:
        """Offload a frozen model between its turns; return False if it is there or cannot be."""
        whole = isinstance(self.policy, PolicyModel) and not self.mesh.sizes
        if self.parked or self.optimizer or not whole or not self.device.startswith("cuda"):
            return False
        assert isinstance(self.policy, PolicyModel)
        self.parked = HostOffloaded(self.policy)
        return True

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        facts: PairFacts | None = None,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """Take one optimizer step on the weighted mean of the losses of all pairs of the step.

        `facts` and `reference` are those of all pairs, even if `batches` are only some of them.
        Above the limits, or if loss or gradient are not finite, nothing changes.
        """
        facts = facts or PairFacts.of_step(batches)
        total = float(facts.weight.sum()) or 1.0
        facts = facts.to(self.device)
        known = _to_device(reference, self.device)
        scale = self._trained.scale
        rows: list[Mapping[str, Tensor]] = []
        policy, watched = torch.zeros_like(facts.length), torch.zeros_like(facts.length)
        slopes: dict[str, Tensor] = {}
        if self.loss.whole_batch:
            sums, logps, slopes = self._slopes(batches, facts, known, total)
            policy.copy_(logps)
            rows.append(sums)

        def objective(batch: PairBatch, columns: Columns) -> Tensor:
            places = batch.pair_P
            self._watch_gradient(columns["sum"], places, watched)
            if slopes:
                weighted = sum((columns[name] * slopes[name][places]).sum() for name in slopes)
                assert isinstance(weighted, Tensor)
                return weighted * scale
            scored = self._score(facts.at(places), columns, _rows(known, places), facts)
            policy[places] = scored.x.policy.detach()
            rows.append(weighted_sums(scored, batch.weight_P, self.loss))
            return scored.losses @ batch.weight_P / total * scale

        self.runner.backward(batches, self.loss.token_columns, objective)
        self._complete_gradients()
        rows = rows or [self._no_sums(facts, known)]
        result = self._update(rows, policy, len(batches), limits)
        if result.skip_reason == "nonfinite":
            losses = [] if slopes else [row["loss"] for row in rows]
            lost = lost_pairs(torch.cat([policy, watched], dim=1), batches, losses)
            result = replace(result, nonfinite=self._nonfinite_report(lost))
        self._trained.zero_grad()
        return result

    def _watch_gradient(self, sums: Tensor, places: Tensor, watched: Tensor) -> None:
        """Record the gradient by the log-probs of a micro-batch, without waiting for the device."""
        if sums.requires_grad:
            sums.register_hook(partial(watched.__setitem__, places))  # type: ignore[no-untyped-call]

    def rehearse(self, batch: PairBatch) -> None:
        """Run forward and backward to measure memory, without an update. `forget` ends it."""
        self.runner.backward([batch], (), lambda _batch, columns: columns["sum"].sum())

    def forget(self) -> None:
        """Drop the gradients of a step that will not be finished."""
        self._trained.zero_grad()

    def narrow_gradients(self) -> bool:
        """Sum up gradients in the weights' own precision from now on; False if that is so already."""
        return self.optimizer is not None and self.optimizer.narrow_gradients()

    @torch.no_grad()
    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        """metrics.weighted_sums of pairs whose log-probs are known: a whole evaluation set at once."""
        facts = facts.to(self.device)
        scored = self._score(
            facts, _to_device(policy, self.device) or {}, _to_device(reference, self.device), facts
        )
        return _floats(weighted_sums(scored, facts.weight, self.loss))

    def mix_weights(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move every weight by `share` of the way to `weights` (TR-DPO)."""
        own = self._own_parts(weights)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if self.optimizer and not parameter.requires_grad:
                    continue
                part = local(parameter)
                part.copy_(torch.lerp(part.float(), own[name].to(part.device).float(), share))

    def state(self) -> tuple[dict[str, dict[str, Tensor | Shard]], dict[str, Any]]:
        """Return everything a later step depends on: this rank's shards by group, and numbers."""
        optimizer = self._trained
        masters = {name: master.cpu() for name, master in optimizer.masters.items()}
        groups: dict[str, dict[str, Tensor | Shard]] = {
            "model": self._pieces(masters),
            "optimizer": self._pieces(optimizer.moments(), optimizer.rows),
            "rng": {} if any(self.mesh.places.values()) else dict(_rng_state()),
        }
        return groups, self.numbers()

    def numbers(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks."""
        numbers: dict[str, Any] = {"updates": self._trained.updates}
        if scale := self._trained.loss_scale:
            numbers["loss_scale"] = [scale.value, scale.clean]
        return numbers

    def load_state(
        self, groups: Mapping[str, Mapping[str, Tensor]], numbers: dict[str, Any]
    ) -> None:
        """Load whole tensors; those of `ShardedFiles` are read part by part as needed."""
        own = self._own_parts(groups["model"]), self._own_parts(groups["optimizer"])
        self._trained.load(*own, numbers["updates"])
        if (scale := self._trained.loss_scale) and "loss_scale" in numbers:
            scale.value, scale.clean = numbers["loss_scale"]
        torch.set_rng_state(groups["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in groups["rng"]:
            torch.cuda.set_rng_state(groups["rng"]["cuda"])

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's exact weights of the policy; each is computed on access."""
        if self.optimizer:
            return self.optimizer.masters
        return {
            name: local(parameter.detach()) for name, parameter in self.policy.named_parameters()
        }

    def weight_pieces(self) -> dict[str, Tensor | Shard]:
        """Return the weights that this rank stores, and the initial adapter if it is kept."""
        begun = {
            name: local(p.detach())
            for name, p in self.policy.named_parameters()
            if f".{START}." in name
        }
        return self._pieces({**self.weights(), **begun} if begun else self.weights())

    def _pieces(
        self, tensors: Mapping[str, Tensor], rows: Mapping[str, ShardSpec] | None = None
    ) -> dict[str, Tensor | Shard]:
        """`rows`: where tensors are parts of parameters that lie whole on each rank."""
        if self._is_alone:
            return dict(tensors)
        own = rows or places(self.policy, self.mesh)
        found: dict[str, Tensor | Shard] = {}
        for key, tensor in tensors.items():
            name = key if key in own else key.rpartition(".")[0]
            place = (
                own[name] if tensor.ndim == len(own[name].whole) else ShardSpec.full(tensor.shape)
            )
            if (rows or name in self._counted) and tensor.numel():
                found[key] = Shard(tensor, place)
        return found

    def _own_parts(self, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return source if self._is_alone else LocalShards(source, places(self.policy, self.mesh))

    def _gathered(self, batches: Sequence[PairBatch], pairs: int | None) -> dict[str, Tensor]:
        """Columns of all pairs of the step, on every rank."""
        parts = self.runner.columns(batches, self.loss.token_columns)
        places_here = torch.cat([batch.pair_P for batch in batches])
        if self._is_alone:
            assert parts is not None
            order = torch.argsort(places_here).to(self.device, non_blocking=True)
            return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        names = ["sum", *sorted(self.loss.token_columns)]
        table = torch.zeros(
            len(names), self._pairs(places_here, pairs), 2, dtype=torch.float64, device=self.device
        )
        if parts is not None and self._is_primary:
            table[:, places_here.to(self.device)] = torch.stack(
                [torch.cat([part[name].detach() for part in parts]) for name in names]
            )
        dist.all_reduce(table)
        return dict(zip(names, table, strict=True))

    def _pairs(self, places_here: Tensor, known: int | None) -> int:
        if known is not None:
            return known
        most = torch.tensor(max(places_here.tolist(), default=-1) + 1, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _slopes(
        self,
        batches: Sequence[PairBatch],
        facts: PairFacts,
        reference: Columns | None,
        total: float,
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Return metrics, and the gradient by every log-prob, of a loss over the whole batch.

        A pass without gradients sees all pairs; these slopes then weight the ordinary pass.
        """
        with torch.no_grad():
            columns = self._gathered(batches, len(facts.weight))
        leaves = {name: column.requires_grad_() for name, column in columns.items()}
        scored = self._score(facts, columns, reference, facts)
        slopes = torch.autograd.grad(scored.losses @ facts.weight / total, list(leaves.values()))
        sums = weighted_sums(scored, facts.weight, self.loss)
        policy = columns["sum"].detach()
        if any(self.mesh.places.values()):  # all ranks have computed the same; the first reports it
            sums, policy = (
                {name: torch.zeros_like(value) for name, value in sums.items()},
                torch.zeros_like(policy),
            )
        return sums, policy, dict(zip(leaves, slopes, strict=True))

    def _score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None, step: PairFacts
    ) -> Scored:
        """Return losses and rewards of some pairs; `step` holds all that they are averaged with."""
        x = facts.with_logps(policy, reference, step.mean_chosen_length)
        return Scored(x, self.loss(x), self.loss.rewards(x))

    def _update(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        policy: Tensor,
        batches: int,
        limits: StepLimits | None,
    ) -> StepResult:
        """Clip and step, unless the numbers, the same on all ranks, demand to skip the step."""
        optimizer, table = self._trained, self._by_batch(rows, batches)
        # The one host synchronisation of a step.
        numbers = self._reduce_numbers(torch.cat([table.flatten(), policy.flatten()]))
        grad_norm, zeros = numbers[:2].tolist()
        reduced = numbers[2 : 2 + table.numel()].view_as(table)
        lists = [_in_order(reduced).tolist(), *reduced.tolist()]
        named, *each = (dict(zip(rows[0], row, strict=True)) for row in lists)
        logps, lr = numbers[2 + table.numel() :].view_as(policy), optimizer.lr
        found = int(zeros) if self.count_zeros else None
        by_batch = [row for row in each if row["weight"]]
        result = StepResult(named, logps, grad_norm, lr, None, found, by_batch=by_batch)
        reason = self._skip_reason(result, limits)
        if reason is None:
            optimizer.step(grad_norm)
        if optimizer.loss_scale and reason in (None, "overflow"):
            optimizer.loss_scale.overflowed() if reason else optimizer.loss_scale.succeeded()
        return replace(result, skip_reason=reason)

    def _skip_reason(self, result: StepResult, limits: StepLimits | None) -> Reason | None:
        """Return why not to apply the step. A smaller scale helps a float16 gradient, not a loss."""
        scale = self._trained.loss_scale
        if not math.isfinite(result.sums["loss"]):
            return "nonfinite"
        if not math.isfinite(result.grad_norm):
            return "overflow" if scale and scale.value > 1 else "nonfinite"
        exceeded = limits and limits.exceeded(result.loss, result.grad_norm)
        return "spike" if exceeded else None

    def _nonfinite_report(self, lost_pairs: list[int]) -> NonFiniteReport:
        return nonfinite_report(
            lost_pairs, self._trained.norms(self._counted), alone=self._is_alone
        )

    def _by_batch(self, rows: Sequence[Mapping[str, Tensor]], batches: int) -> Tensor:
        """Return the sums of each micro-batch; those of the dp ranks take turns in the rows."""
        values = torch.stack([torch.stack(list(row.values())) for row in rows])
        table = values.new_zeros(self._dp * batches, values.shape[1])
        table[self._dp_rank :: self._dp][: len(rows)] = values
        return table

    def _reduce_numbers(self, known: Tensor) -> Tensor:
        """Return [norm of the gradient, zeros in it, *known] of all ranks, on the host."""
        norm = self._trained.grad_norm(self._counted).to(known.device)
        zeros = self._zeros_in_gradients() if self.count_zeros else torch.zeros_like(norm)
        if self._is_alone:
            return torch.cat([torch.stack([norm, zeros]), known]).cpu()
        own = known if self._is_primary else torch.zeros_like(known)
        vector = torch.cat([torch.stack([norm.square(), zeros]), own])
        dist.all_reduce(vector)
        vector[0].sqrt_()
        return vector.cpu()

    def _zeros_in_gradients(self) -> Tensor:
        counts = [(g == 0).sum() for g in self._trained.gradients(self._counted)]
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(counts).sum().to(none) if counts else none

    def _complete_gradients(self) -> None:
        """Sum up gradients of which ranks of tp, or both ends of a pipeline, have a part each."""
        gradient_of = self._trained.gradient
        found = map(gradient_of, sorted(self.policy.tp_partial))
        parts = [gradient for gradient in found if gradient is not None]
        if parts and (group := self.mesh.group("tp")):
            all_reduce_(parts, group)
        self.runner.sum_copies(gradient_of)

    def _no_sums(self, facts: PairFacts, reference: Columns | None) -> dict[str, Tensor]:
        """The metrics of a rank that has seen no pairs: zeros, for the sum over all ranks."""
        none = facts.weight.new_zeros(0, dtype=torch.long)
        empty = dict.fromkeys(("sum", *self.loss.token_columns), facts.length[none])
        scored = self._score(facts.at(none), empty, _rows(reference, none), facts)
        return weighted_sums(scored, facts.weight[none], self.loss)


def device_of(policy: PolicyModel | Stages) -> str:
    """Return the device on which it computes; shards may be elsewhere, buffers are not."""
    return str(next(iter(policy.buffers()), next(policy.parameters())).device)


def _rng_state() -> dict[str, Tensor]:
    """Return the generators' states: Rather draws nothing within a step, but a user's loss may."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _to_device(columns: Columns | None, device: str) -> Columns | None:
    if columns is None:
        return None
    return {name: column.to(device, non_blocking=True) for name, column in columns.items()}


def _rows(columns: Columns | None, places: Tensor) -> Columns | None:
    return None if columns is None else {name: column[places] for name, column in columns.items()}


def _in_order(table: Tensor) -> Tensor:
    """Return the sum of the rows, added in order: the same bits on any number of ranks."""
    total = table[0]
    for row in table[1:]:
        total = total + row
    return total


def _floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
