"""determinism: canonical. Gradients are added in one order: 1, 2 and 4 ranks give equal bits.

The micro-batches of a step, whose number is a multiple of 4, go in turn to 4 lanes, and each rank
has some of the lanes whole. A lane adds up its own gradients in order; lanes are added in pairs.
All ranks need the same number of threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import gcd, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rather.checkpoint.sharded_tensors import LocalShards, ShardSpec
from rather.config.strategies import LANES
from rather.data.batch import PairBatch
from rather.errors import ConfigError
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.optimizer import Optimizer
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Objective

WHOLE_VECTORS = 64  # weights: behind the last whole vector, AdamW on a CPU may round in another way


class Canonical:
    """The Runner of a policy that is whole and unsharded on each rank."""

    def __init__(self, policy: PolicyModel, mesh: Mesh, device: str) -> None:
        if mesh.world != mesh.size("dp") or LANES % mesh.world:
            raise ConfigError(
                "determinism: canonical is for ddp and zero1 on 1, 2 or 4 devices; set it to null"
            )
        half = any(p.requires_grad and p.dtype != torch.float32 for p in policy.parameters())
        if half or policy.rounding.held:
            raise ConfigError(
                "determinism: canonical adds up float32 gradients; set model_args.dtype to fp32"
            )
        self.policy, self.mesh, self.device = policy, mesh, device

    @torch.no_grad()
    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]]:
        return [pair_columns(self.policy, batch.to(self.device), wanted) for batch in batches]

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        own = LANES // self.mesh.world
        lanes: list[list[Tensor | None]] = [
            [None] * len(list(self.policy.parameters())) for _ in range(own)
        ]
        for number, batch in enumerate(batches):
            batch = batch.to(self.device)
            lane = lanes[number % own]
            for parameter, gradient in zip(self.policy.parameters(), lane, strict=True):
                parameter.grad = gradient
            objective(batch, pair_columns(self.policy, batch, wanted)).backward()  # type: ignore[no-untyped-call]
            lane[:] = [parameter.grad for parameter in self.policy.parameters()]
        for parameter, *gradients in zip(self.policy.parameters(), *lanes, strict=True):
            parts = [g for g in gradients if g is not None]
            if parts and self.mesh.world > 1:
                summed = in_pairs(parts).contiguous()
                parts = [torch.empty_like(summed) for _ in range(self.mesh.world)]
                dist.all_gather(parts, summed)
            parameter.grad = in_pairs(parts) if parts else None


def in_pairs(lanes: list[Tensor]) -> Tensor:
    """Add lanes 0 + 2, 1 + 3, then both sums: those of one rank come first on any world size."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


class RowOptimizer(Optimizer):
    """zero1: whole weights and gradients on each rank, moments of this rank's rows only.

    A rank updates its rows and gets those of the others. The norm is that of the whole gradient, as
    in one process.
    """

    rows: Mapping[str, ShardSpec]

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, *args: Any, **options: Any
    ) -> None:
        self.wholes, self.ranks = dict(parameters), range(mesh.world)
        self.rows = {
            name: rows_of(p.shape, mesh.rank("dp"), mesh.world) for name, p in self.wholes.items()
        }
        own = [
            (name, nn.Parameter(p.detach()[self.rows[name].slices]))
            for name, p in self.wholes.items()
        ]
        super().__init__(own, *args, **options)
        self.masters = {name: p.detach() for name, p in self.wholes.items()}

    def named_gradients(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        wanted = {name: p for name, p in self.wholes.items() if names is None or name in names}
        return {name: p.grad for name, p in wanted.items() if p.grad is not None}

    def step(self, grad_norm: float) -> None:
        for name, own in self.parameters.items():
            gradient = self.wholes[name].grad
            own.grad = None if gradient is None else gradient[self.rows[name].slices]
        super().step(grad_norm)
        self._share()

    def zero_grad(self) -> None:
        super().zero_grad()
        for parameter in self.wholes.values():
            parameter.grad = None

    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        super().load(LocalShards(masters, self.rows), LocalShards(moments, self.rows), updates)
        self._share()

    @torch.no_grad()
    def _share(self) -> None:
        for whole in self.masters.values():
            for rank in self.ranks:
                rows = whole[rows_of(whole.shape, rank, len(self.ranks)).slices]
                if rows.numel():
                    dist.broadcast(rows, rank)


def rows_of(shape: Sequence[int], rank: int, ranks: int) -> ShardSpec:
    """Return one rank's rows of a parameter; they begin where a vector of the whole begins."""
    unit = WHOLE_VECTORS // gcd(WHOLE_VECTORS, prod(shape[1:]))
    each = -(-shape[0] // (ranks * unit)) * unit
    first = min(rank * each, shape[0])
    return ShardSpec.full(shape).narrow(0, first, min(each, shape[0] - first))
