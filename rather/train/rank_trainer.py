"""RankTrainer: log-probs, training steps and state of one rank.

It reads and writes no files. Each of several ranks has its own micro-batches of a step; one
collective sums up their numbers, each of which only one rank contributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

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
from rather.model.vision import part_of
from rather.optim.adamw import local
from rather.optim.optimizer import Masters
from rather.parallel.mesh import Mesh, max_over_ranks
from rather.parallel.routers import balance_of
from rather.parallel.shard import Stage, announce, counted, places, settle
from rather.parallel.stages import Objective, Stages
from rather.train.engine import Runner, StepOptimizer
from rather.train.linear_layers import use_fewer_kernels
from rather.train.nonfinite import (
    NonFiniteReport,
    Reason,
    StepLimits,
    lost_pairs,
    nonfinite_report,
)
from rather.train.packed_numbers import PackedNumbers


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
    ratios: Tensor | None = None  # [pairs, 2] log-ratios; log-probs if there is no reference
    pull: Tensor | None = None  # [pairs] derivatives of the step's loss by both log-probs, added
    real_tokens: int = 0  # of all micro-batches of all ranks, without padding
    laid_out: int = 0  # and with padding
    table: Tensor | None = None  # the same sums of each micro-batch
    requests: Sequence[int] = ()  # how many ranks have each request, in the order of ReadRequests

    def __getstate__(self) -> dict[str, Any]:
        """Pickle float32 copies: a slice would pickle the whole tensor that it views."""
        state = dict(vars(self))
        for name in ("ratios", "pull"):
            if state[name] is not None:
                state[name] = state[name].float()
        return state

    @property
    def by_batch(self) -> list[dict[str, float]]:
        """The sums of each micro-batch that has weight."""
        rows = [] if self.table is None else self.table.tolist()
        sums_of_batches = (dict(zip(self.sums, row, strict=False)) for row in rows)
        return [sums for sums in sums_of_batches if sums["weight"]]

    @property
    def skipped(self) -> int:
        return int(self.skip_reason is not None)

    @property
    def loss(self) -> float:
        return self.sums["loss"] / self.sums["weight"] if self.sums["weight"] else math.nan

    def __str__(self) -> str:
        return f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


class WholeModelRunner:
    """Runs micro-batches through a model without pipeline stages, whole or sharded.

    `backward` accumulates the gradients of the objective, also over dp and cp.
    """

    def __init__(self, policy: PolicyModel, stage: Stage = "ddp") -> None:
        self.policy, self.stage, self.device = policy, stage, device_of(policy)
        self._is_sharded = isinstance(policy, FSDPModule)

    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]]:
        """Return the columns of each micro-batch, without gradients."""
        local_batches = (self.policy.share(batch).to(self.device) for batch in batches)
        columns = [pair_columns(self.policy, batch, wanted) for batch in local_batches]
        if self._is_sharded:
            settle(self.policy)
        return columns

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        for number, batch in enumerate(batches, start=1):
            if self._is_sharded:
                announce(self.policy, self.stage, last=number == len(batches))
            local_batch = self.policy.share(batch).to(self.device)
            objective(local_batch, pair_columns(self.policy, local_batch, wanted)).backward()  # type: ignore[no-untyped-call]


Sums = Mapping[str, Tensor]  # metrics of a micro-batch
Limits = StepLimits | None
ReadRequests = Callable[[], Sequence[int]]  # returns a flag for each kind of request


class RankTrainer:
    """One policy, or this rank's part of one, with its loss and, if it trains, its optimizer."""

    def __init__(
        self,
        policy: PolicyModel | Stages,
        loss: PairLoss,
        optimizer: StepOptimizer | None = None,
        *,
        mesh: Mesh | None = None,
        runner: Runner | None = None,
        count_zeros: bool = False,
        router_loss: float | None = None,
        owns_weights: bool = True,
    ) -> None:
        """`owns_weights`: nothing else replaces weights, so that layers can keep joined copies."""
        self.policy, self.loss, self.optimizer = policy, loss, optimizer
        self.mesh, self.count_zeros = mesh or Mesh(), count_zeros
        self.parked: HostOffloaded | None = None
        self._low_bits: dict[str, Tensor] = {}  # of a moving reference: what rounding leaves out
        self.device = device_of(policy)
        default_runner = policy if isinstance(policy, Stages) else WholeModelRunner(policy)
        self.runner: Runner = runner or default_runner
        self.balance = balance_of(policy, self.mesh, router_loss, self.device)
        self._counted = counted(policy, self.mesh)
        self._is_alone = self.mesh.world == 1
        self._stores_whole = self._is_alone or (optimizer is not None and optimizer.stores_whole)
        if isinstance(policy, PolicyModel) and self.device.startswith("cuda") and owns_weights:
            # A group of one rank is alone as well, but FSDP2 shards its weights.
            is_whole = self._is_alone and not self.mesh.sums_gradients
            use_fewer_kernels(policy, optimizer, alone=is_whole)
        self._dp, self._dp_rank = self.mesh.size("dp"), self.mesh.rank("dp")
        # Of several ranks with the same pairs, only the primary one reports numbers.
        self._is_primary = self.mesh.rank("cp") == self.mesh.rank("tp") == 0
        self._is_first = not any(self.mesh.places.values())

    @property
    def _trained(self) -> StepOptimizer:
        assert self.optimizer is not None, "this rank does not train"
        return self.optimizer

    # --- log-probs ---

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PairBatch], pairs: int | None = None) -> Columns:
        """Return the columns that the loss needs, for all pairs in step order, on the device.

        `pairs` is the number of pairs of all ranks; if it is None, the ranks agree on it.
        """
        with self.parked.on_device() if self.parked else nullcontext():
            columns_of_batches = self.runner.columns(batches, self.loss.token_columns)
        pair_indices = torch.cat([batch.pair_P for batch in batches])
        if self._is_alone:
            assert columns_of_batches is not None
            order = torch.argsort(pair_indices).to(self.device, non_blocking=True)
            return {
                name: torch.cat([columns[name] for columns in columns_of_batches])[order]
                for name in columns_of_batches[0]
            }
        if pairs is None:
            pairs = max_over_ranks(max(pair_indices.tolist(), default=-1) + 1, self.device)
        names = ["sum", *sorted(self.loss.token_columns)]
        table = torch.zeros(len(names), pairs, 2, dtype=torch.float64, device=self.device)
        if columns_of_batches is not None and self._is_primary:
            rows = [
                torch.cat([columns[name].detach() for columns in columns_of_batches])
                for name in names
            ]
            table[:, pair_indices.to(self.device)] = torch.stack(rows)
        dist.all_reduce(table)
        return dict(zip(names, table, strict=True))

    @torch.no_grad()
    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        """Return metrics.weighted_sums of pairs whose log-probs are known: a whole set at once."""
        facts = facts.to(self.device)
        reference = reference and self._on_device(reference)
        scored = self._score(facts, self._on_device(policy), reference, facts)
        sums = weighted_sums(scored, facts.weight, self.loss)
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

    def park(self) -> bool:
        """Offload a frozen model between its turns; return whether that changed anything."""
        policy, on_gpu = self.policy, self.device.startswith("cuda")
        if self.parked or self.optimizer or self.mesh.sizes or not on_gpu:
            return False
        assert isinstance(policy, PolicyModel)
        self.parked = HostOffloaded(policy)
        return True

    # --- a training step ---

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        facts: PairFacts | None = None,
        limits: StepLimits | None = None,
        read_requests: ReadRequests = tuple,
    ) -> StepResult:
        """Take one optimizer step, unless loss or gradient are above the limits or not finite.

        The requests to this rank are read as late as possible, and added to those of the others.
        """
        facts = facts or PairFacts.of_step(batches)  # of all pairs, as `reference` is
        total, scale = float(facts.weight.sum()) or 1.0, self._trained.scale
        facts = facts.to(self.device)
        reference = reference and self._on_device(reference)
        rows, slopes = list[Sums](), dict[str, Tensor]()
        # [policy, slope, reference], [pairs, 2] each
        policy, slope, reference_sums = facts.length.new_zeros(3, len(facts.length), 2)
        if reference and self._is_first:
            reference_sums.copy_(reference["sum"])
        if self.loss.whole_batch:
            sums, logps, slopes = self._slopes(batches, facts, reference, total)
            policy.copy_(logps)
            rows.append(sums)
        self._trained.begin_sums()

        def objective(batch: PairBatch, columns: Columns) -> Tensor:
            indices = batch.pair_P
            self._watch_gradient(columns["sum"], indices, slope)
            if slopes:
                weighted = [(columns[name] * slopes[name][indices]).sum() for name in slopes]
                return sum(weighted[1:], weighted[0]) * scale
            reference_here = reference and _at(reference, indices)
            scored = self._score(facts.at(indices), columns, reference_here, facts)
            policy[indices] = scored.x.policy.detach()
            rows.append(weighted_sums(scored, batch.weight_P, self.loss))
            return scored.losses @ batch.weight_P / total * scale

        token_columns = self.loss.token_columns
        if self.balance:
            self.balance.backward(self.runner, batches, token_columns, objective, scale)
        else:
            self.runner.backward(batches, token_columns, objective)
        self._complete_gradients()
        pairs = {"policy": policy, "slope": slope, "reference": reference_sums}
        rows_to_add = rows or [self._no_sums(facts, reference)]
        step_result = self._update(rows_to_add, pairs, batches, limits, read_requests)
        if step_result.skip_reason == "nonfinite":
            by_pair = torch.cat(list(pairs.values()), dim=1)
            step_result = self._with_report(step_result, by_pair, batches, [] if slopes else rows)
        self._trained.zero_grad()
        return step_result

    def rehearse(self, batch: PairBatch) -> None:
        """Run forward and backward to measure memory, without an update. Call `forget` then."""
        self._trained.begin_sums()
        self.runner.backward([batch], (), lambda _batch, columns: columns["sum"].sum())

    def forget(self) -> None:
        """Drop the gradients of a step that will not be finished."""
        self._trained.zero_grad()

    def narrow_gradients(self) -> bool:
        """Sum gradients in the weights' own precision from now on; return whether that changed."""
        return self.optimizer is not None and self.optimizer.narrow_gradients()

    def _watch_gradient(self, sums: Tensor, places: Tensor, slope: Tensor) -> None:
        """Record the gradient with respect to log-probs, without waiting for the device."""
        if sums.requires_grad:
            sums.register_hook(partial(slope.__setitem__, places))  # type: ignore[no-untyped-call]

    def _score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None, step: PairFacts
    ) -> Scored:
        """Return losses and rewards of some pairs; `step` holds the facts of all pairs."""
        x = facts.with_logps(policy, reference, step.mean_chosen_length)
        return Scored(x, self.loss(x), self.loss.rewards(x))

    def _slopes(
        self,
        batches: Sequence[PairBatch],
        facts: PairFacts,
        reference: Columns | None,
        total: float,
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Return metrics, log-probs and the slope of each column for a loss over the whole batch.

        A pass without gradients sees all pairs; the slopes, d loss / d log-prob, then weight the
        ordinary pass.
        """
        columns = self.log_probs(batches, len(facts.weight))
        leaves = {name: column.requires_grad_() for name, column in columns.items()}
        scored = self._score(facts, columns, reference, facts)
        slopes = torch.autograd.grad(scored.losses @ facts.weight / total, list(leaves.values()))
        sums = weighted_sums(scored, facts.weight, self.loss)
        policy = columns["sum"].detach()
        if not self._is_first:  # all ranks have computed the same; the first reports it
            sums = {name: torch.zeros_like(metric) for name, metric in sums.items()}
            policy = torch.zeros_like(policy)
        return sums, policy, dict(zip(leaves, slopes, strict=True))

    def _complete_gradients(self) -> None:
        """Sum partial gradients: over tp ranks, and over both ends of a pipeline."""
        gradient_of = self._trained.gradient
        partial_gradients = [
            p for p in map(gradient_of, sorted(self.policy.tp_partial)) if p is not None
        ]
        if partial_gradients and (group := self.mesh.group("tp")):
            all_reduce_(partial_gradients, group)
        if isinstance(self.runner, Stages):
            self.runner.sum_copies(gradient_of)

    def _with_report(
        self,
        result: StepResult,
        numbers: Tensor,
        batches: Sequence[PairBatch],
        rows: Sequence[Sums],
    ) -> StepResult:
        """Return the result with a report of where NaN or Inf was found."""
        losses, norms = [row["loss"] for row in rows], self._trained.norms(self._counted)
        lost = lost_pairs(numbers, batches, losses)
        return replace(result, nonfinite=nonfinite_report(lost, norms, alone=self._is_alone))

    def _no_sums(self, facts: PairFacts, reference: Columns | None) -> dict[str, Tensor]:
        """Return the metrics of a rank that has seen no pairs: zeros to add to the others."""
        none = facts.weight.new_zeros(0, dtype=torch.long)
        empty = dict.fromkeys(("sum", *self.loss.token_columns), facts.length[none])
        scored = self._score(facts.at(none), empty, reference and _at(reference, none), facts)
        return weighted_sums(scored, facts.weight[none], self.loss)

    def _update(
        self,
        rows: Sequence[Sums],
        pairs: Mapping[str, Tensor],
        batches: Sequence[PairBatch],
        limits: Limits,
        read_requests: ReadRequests,
    ) -> StepResult:
        """Clip and step, unless the numbers, which all ranks share, are a reason to skip it."""
        optimizer, scale = self._trained, self._trained.loss_scale
        optimizer.prepare()  # now, because `_reduce_numbers` waits for the device
        reduced = self._reduce_numbers(rows, pairs, batches, read_requests())
        real_tokens, laid_out = map(int, reduced.tokens.tolist())
        # Added in the order of the micro-batches, whatever the number of ranks.
        totals = reduce(torch.add, reduced.metrics)
        sums = dict(zip(rows[0], totals.tolist(), strict=True))
        for name, metric in self.balance.metrics().items() if self.balance else ():
            sums[name] = metric * sums["weight"]
        step_result = StepResult(
            sums,
            reduced.policy,
            grad_norm=float(reduced.grad_norm),
            lr=optimizer.lr,
            skip_reason=None,
            zeros_in_grad=int(reduced.zeros) if self.count_zeros else None,
            ratios=reduced.policy - reduced.reference,
            pull=reduced.slope.abs().sum(dim=1) / optimizer.scale,
            real_tokens=real_tokens,
            laid_out=laid_out,
            table=reduced.metrics,
            requests=[int(count) for count in reduced.requests.tolist()],
        )
        reason = self._skip_reason(step_result, limits)
        if reason is None:
            optimizer.step(step_result.grad_norm)
        if scale and reason in (None, "overflow"):
            scale.overflowed() if reason else scale.succeeded()
        return replace(step_result, skip_reason=reason)

    def _skip_reason(self, result: StepResult, limits: Limits) -> Reason | None:
        """Return why not to apply the step. A smaller scale helps gradients, not a loss."""
        scale = self._trained.loss_scale
        if not math.isfinite(result.sums["loss"]):
            return "nonfinite"
        if not result.sums["weight"]:  # momentum would still move the weights
            return "no_weight"
        if not math.isfinite(result.grad_norm):
            return "overflow" if scale and scale.value > 1 else "nonfinite"
        return "spike" if limits and limits.exceeded(result.loss, result.grad_norm) else None

    def _reduce_numbers(
        self,
        rows: Sequence[Sums],
        pairs: Mapping[str, Tensor],
        batches: Sequence[PairBatch],
        requests: Sequence[int],
    ) -> PackedNumbers:
        """Return the numbers of all ranks, on the host: the one host sync of a step."""
        own_metrics = torch.stack([torch.stack(list(row.values())) for row in rows])
        count = own_metrics.shape[1]
        metrics = own_metrics.new_zeros(self._dp * len(batches), count)  # dp ranks take turns
        metrics[self._dp_rank :: self._dp][: len(rows)] = own_metrics
        tokens = own_metrics.new_empty(2)  # filled without waiting for the device
        tokens[0].fill_(sum(batch.real_tokens for batch in batches))
        tokens[1].fill_(sum(len(batch.ids_N) for batch in batches))
        asked = own_metrics.new_empty(len(requests))
        for place, flag in enumerate(requests):
            asked[place].fill_(flag)
        zeros = own_metrics.new_zeros(())
        for part in self._trained.gradients_in_turn(self._counted) if self.count_zeros else ():
            for gradient in part.values():
                zeros += (gradient == 0).sum()
        grad_norm = self._trained.grad_norm(self._counted).to(own_metrics.device)
        numbers = PackedNumbers(grad_norm, zeros, asked, tokens, metrics, **pairs)
        if self._is_alone:
            return numbers.unpack(numbers.pack().cpu())
        numbers.grad_norm = grad_norm.square()
        vector = numbers.pack()
        if not self._is_primary:
            vector[numbers.own_size :] = 0  # another rank reports the rest
        dist.all_reduce(vector)
        vector[0].sqrt_()
        return numbers.unpack(vector.cpu())

    # --- weights and state ---

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's exact weights of the policy; each is computed on access."""
        if self.optimizer:
            return self.optimizer.masters
        return {name: self._weight(name, p) for name, p in self.policy.named_parameters()}

    def _weight(self, name: str, parameter: Tensor) -> Tensor:
        """Return a frozen weight; in float32 and on the host if it has moved."""
        stored = local(parameter.detach())
        if (low := self._low_bits.get(name)) is None:
            return stored
        return self.policy.rounding.exact(name, stored, low).cpu()

    def weight_pieces(self) -> dict[str, Tensor | Shard]:
        """Return the weights that this rank stores, and the initial adapter if it is kept."""
        initial = {
            name: local(p.detach())
            for name, p in self.policy.named_parameters()
            if f".{START}." in name
        }
        return self._pieces({**self.weights(), **initial} if initial else self.weights())

    def mix_weights(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move every weight by `share` of the way to `weights` (TR-DPO)."""
        target_weights = self._local_shards(weights)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if self.optimizer and not parameter.requires_grad:
                    continue
                if name not in weights and part_of(name):  # a frozen part of a vision model
                    continue
                shard = local(parameter)
                before = self._weight(name, parameter).to(shard.device)
                after = target_weights[name].to(shard.device)
                mixed = torch.lerp(before.float(), after.float(), share)
                if self.policy.rounding.applies(name, shard):
                    self._low_bits[name] = self.policy.rounding.split(name, shard, mixed)
                else:
                    shard.copy_(mixed)

    def state(
        self, *, late: bool = False
    ) -> tuple[dict[str, dict[str, Tensor | Shard]], dict[str, Any]]:
        """Return everything a later step depends on: this rank's shards by group, and numbers.

        `late`: masters are made one after another when they are written, before the next step.
        """
        optimizer, rng = self._trained, dict[str, Tensor | Shard]()
        if self._is_first:  # a step draws nothing, but a user's loss may
            rng["cpu"] = torch.get_rng_state()
            if torch.cuda.is_available():
                rng["cuda"] = torch.cuda.get_rng_state()
        masters: Mapping[str, Any]
        if late and isinstance(optimizer.masters, Masters):
            masters = optimizer.masters.late()
        else:
            masters = {name: master.cpu() for name, master in optimizer.masters.items()}
        groups = {
            "model": self._pieces(masters),
            "optimizer": self._pieces(optimizer.moments()),
            "rng": rng,
        }
        return groups, self.numbers()

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is the same on all ranks."""
        numbers: dict[str, Any] = {"updates": self._trained.updates}
        if scale := self._trained.loss_scale:
            numbers["loss_scale"] = [scale.value, scale.clean]
        return numbers

    def load_state(
        self, groups: Mapping[str, Mapping[str, Tensor]], numbers: dict[str, Any]
    ) -> None:
        """Load whole tensors; those of `ShardedFiles` are read part by part as needed."""
        masters = self._local_shards(groups["model"])
        moments = self._local_shards(groups["optimizer"])
        self._trained.load(masters, moments, numbers["updates"])
        if (scale := self._trained.loss_scale) and "loss_scale" in numbers:
            scale.value, scale.clean = numbers["loss_scale"]
        torch.set_rng_state(groups["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in groups["rng"]:
            torch.cuda.set_rng_state(groups["rng"]["cuda"])

    def _pieces(self, tensors: Mapping[str, Any]) -> dict[str, Tensor | Shard]:
        """Return what this rank stores of tensors, or of streams of them."""
        pieces: dict[str, Tensor | Shard] = {}
        if self._stores_whole:
            pieces.update(tensors)  # every rank reads them, because an engine gathers them
            return pieces if self._is_first else {}
        specs = places(self.policy, self.mesh)
        for key, tensor in tensors.items():
            name = key if key in specs else key.rpartition(".")[0]
            has_parameter_shape = len(tensor.shape) == len(specs[name].whole)
            if name in self._counted and tensor.nbytes:
                spec = specs[name] if has_parameter_shape else ShardSpec.full(tensor.shape)
                pieces[key] = Shard(tensor, spec)
        return pieces

    def _local_shards(self, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._stores_whole:
            return source
        return LocalShards(source, places(self.policy, self.mesh))

    def _on_device(self, columns: Columns) -> Columns:
        return {name: column.to(self.device, non_blocking=True) for name, column in columns.items()}


def device_of(policy: PolicyModel | Stages) -> str:
    """Return the compute device. Buffers are always on it; sharded parameters may not be."""
    return str(next(iter(policy.buffers()), next(policy.parameters())).device)


def _at(columns: Columns, places: Tensor) -> Columns:
    return {name: column[places] for name, column in columns.items()}
