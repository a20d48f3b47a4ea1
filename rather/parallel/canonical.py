"""determinism: canonical. Gradients are added in one order: 1, 2 and 4 ranks give equal bits.

The micro-batches of a step, whose number is a multiple of 4, go in turn to 4 lanes, and each rank
has some of the lanes whole. A lane adds up its own gradients in order; lanes are added in pairs.
All ranks need the same number of threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rather.config.strategies import LANES
from rather.data.batch import PairBatch
from rather.errors import ConfigError
from rather.model.policy import PolicyModel, pair_columns
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Objective


class Canonical:
    """The Runner of a policy that is whole and unsharded on each rank."""

    def __init__(self, policy: PolicyModel, mesh: Mesh, device: str) -> None:
        if mesh.world != mesh.size("dp") or LANES % mesh.world:
            raise ConfigError(
                "determinism: canonical is for ddp on 1, 2 or 4 devices; set it to null"
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
