"""Data parallelism: ddp, zero1, zero2, zero3 and hsdp are FSDP2 on a (replicas, shards) mesh with
two flags.

Decoder layers are the units; embedding, last norm and head are one group, that of the root, for the
head is used inside the root's forward. Gradients are summed, never averaged: each micro-batch's
loss is divided by the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.model.layers import layers_of
from rather.model.policy import PolicyModel
from rather.parallel.mesh import Mesh
from rather.parallel.tensor import part

Stage = Literal["ddp", "zero1", "zero2", "zero3"]
STAGES: tuple[Stage, ...] = ("ddp", "zero1", "zero2", "zero3")


class Divided(Protocol):
    """A policy, or the pipeline stages of one: what this rank holds of the whole model."""

    tp_dims: dict[str, int]
    tp_sizes: dict[str, int]
    extra_copies: set[str]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class Sharding:
    """What is divided: nothing, the optimizer (zero1), its gradients too (zero2), the weights too
    (zero3).

    With several replicas of the shards zero3 is hsdp. `offload` keeps shards and optimizer on the
    host.
    """

    stage: Stage = "zero3"
    compute: torch.dtype = torch.float32
    offload: bool = False


def shard(policy: PolicyModel, mesh: Mesh, sharding: Sharding) -> None:
    """Shard the policy's parameters over the mesh, in place: each becomes a DTensor that holds a
    shard."""
    narrow = any(sharding.compute != parameter.dtype for parameter in policy.parameters())
    options: dict[str, Any] = {
        "mesh": mesh.plane(sharded=sharding.stage != "ddp"),
        "reshard_after_forward": sharding.stage == "zero3",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.compute if narrow else None,
            reduce_dtype=torch.float32 if narrow else None,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if sharding.offload
        else OffloadPolicy(),
    }
    for layer in layers_of(policy):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for unit in units(policy):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def announce(policy: PolicyModel, stage: Stage, *, last: bool) -> None:
    """Announce a micro-batch, and whether it is the last of its step: collectives that can wait are
    delayed until then."""
    if not isinstance(policy, FSDPModule):
        return
    policy.set_is_last_backward(last)
    if stage == "zero1":
        policy.set_requires_gradient_sync(last)
    else:
        policy.set_requires_all_reduce(last)
    if stage != "zero3":
        policy.set_reshard_after_backward(last)


def settle(policy: PolicyModel) -> None:
    """Release gathered weights after passes without gradients: they would outlive the next update
    of the shards."""
    for unit in units(policy):
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def places(policy: Divided, mesh: Mesh) -> dict[str, ShardSpec]:
    """Return which part of each whole parameter this rank holds; names and shapes are those of the
    undivided model."""
    return {
        name: _place(name, parameter, policy, mesh) for name, parameter in policy.named_parameters()
    }


def counted(policy: Divided, mesh: Mesh) -> set[str]:
    """Return the parameters whose part this rank counts and stores: of equal copies, only one rank
    does."""
    names = set()
    for name, parameter in policy.named_parameters():
        first = mesh.rank("tp") == 0 or name in policy.tp_dims
        if isinstance(parameter, DTensor):
            first = first and parameter.device_mesh.get_local_rank("replicas") == 0
        else:
            first = first and mesh.rank("dp") == 0 and mesh.rank("cp") == 0
        if first and name not in policy.extra_copies:
            names.add(name)
    return names


def _place(name: str, parameter: Tensor, policy: Divided, mesh: Mesh) -> ShardSpec:
    dim, whole = policy.tp_dims.get(name), list(parameter.shape)
    if dim is None:
        place = ShardSpec.full(whole)
    else:
        whole[dim] = policy.tp_sizes[name]
        own = part(whole[dim], mesh.rank("tp"), mesh.size("tp"))
        place = ShardSpec.full(whole).narrow(dim, own.start, own.stop - own.start)
    if not isinstance(parameter, DTensor):
        return place
    shards, mine = parameter.device_mesh.size(1), parameter.device_mesh.get_local_rank("shards")
    if parameter.placements[1] == Shard(0):
        rows = parameter.shape[0]
        each = -(-rows // shards)  # FSDP2 cuts as torch.chunk does
        first = min(mine * each, rows)
        place = place.narrow(0, first, min(each, rows - first))
    assert tuple(local(parameter).shape) == place.sizes, (name, place)
    return place
