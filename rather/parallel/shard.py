"""Data parallelism: ddp, zero1-3 and hsdp are FSDP2 on a (replicas, shards) mesh with flags.

Decoder layers are the units; embedding, last norm and head are one group, that of the root, for the
head is used inside the root's forward. Gradients are summed, never averaged: each micro-batch's
loss is divided by the whole step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from rather.arithmetic import ceil_div
from rather.checkpoint.sharded_tensors import ShardSpec
from rather.model.check import expert_blocks
from rather.model.layers import layers_of
from rather.model.policy import PolicyModel
from rather.optim.adamw import local
from rather.optim.rounding import Rounding
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Stages
from rather.parallel.tensor import part

# Sharded are: nothing, the optimizer, its gradients too, the weights too. With several replicas of
# the shards zero3 is hsdp.
Stage = Literal["ddp", "zero1", "zero2", "zero3"]
STAGES: tuple[Stage, ...] = ("ddp", "zero1", "zero2", "zero3")


def shard(
    policy: PolicyModel,
    mesh: Mesh,
    stage: Stage,
    *,
    compute: torch.dtype = torch.float32,
    offload: bool = False,
) -> None:
    """Make of each parameter a DTensor that holds this rank's shard.

    `offload` keeps shards and optimizer on the host.
    """
    narrow = any(compute != parameter.dtype for parameter in policy.parameters())
    on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options: dict[str, Any] = {
        "reshard_after_forward": stage == "zero3",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute if narrow else None,
            reduce_dtype=torch.float32 if narrow else None,
        ),
        "offload_policy": on_host if offload else OffloadPolicy(),
    }
    plane = mesh.plane(sharded=stage != "ddp")
    if (ep := mesh.size("ep")) > 1:
        # Scores of a router may be float32, next to rows in half precision.
        uncast = replace(options["mp_policy"], cast_forward_inputs=False)
        expert_plane = mesh.plane(sharded=stage != "ddp", ep=ep)
        expert_options = {**options, "mp_policy": uncast, "mesh": expert_plane}
        for _, block in expert_blocks(policy):
            fully_shard(block.experts, **expert_options)
    for module in (*layers_of(policy), policy):
        fully_shard(module, mesh=plane, **options)
    for unit in units(policy):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def shard_rounding(
    policy: PolicyModel | Stages,
    kind: Literal["dithered", "nearest"],
    compute: torch.dtype,
    *,
    always: bool = False,
) -> Rounding:
    """Return how float32 parameters are rounded to `compute`.

    Shards need it only if they are dithered: FSDP2 casts them to the nearest value itself.
    """
    rounds = compute == torch.bfloat16 and (kind == "dithered" or always)
    held = [name for name, p in policy.named_parameters() if p.dtype == torch.float32 and rounds]
    return Rounding(kind, held=frozenset(held))


def units(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def announce(policy: PolicyModel, stage: Stage, *, last: bool) -> None:
    """Announce a micro-batch; collectives that can wait are delayed until the last one."""
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
    """Release gathered weights after passes without gradients: they would outlive an update."""
    for unit in units(policy):
        unit.reshard()


def places(policy: PolicyModel | Stages, mesh: Mesh) -> dict[str, ShardSpec]:
    """Return which part of each parameter of the undivided model this rank holds."""
    specs = {}
    for name, parameter in policy.named_parameters():
        dim = policy.tp_dims.get(name)
        shape = list(parameter.shape)
        if dim is None:
            spec = ShardSpec.full(shape)
        else:
            shape[dim] = policy.tp_sizes[name]
            span = part(shape[dim], mesh.rank("tp"), mesh.size("tp"))
            spec = ShardSpec.full(shape).narrow(dim, *span)
        if (count := policy.experts.get(name)) is not None:  # of all ranks; here is a part
            spec = ShardSpec.full([count, *shape[1:]])
            spec = spec.narrow(0, mesh.rank("ep") * shape[0], shape[0])
        if isinstance(parameter, DTensor) and parameter.placements[1] == Shard(0):
            plane = parameter.device_mesh
            rows = parameter.shape[0]
            rows_per_rank = ceil_div(rows, plane.size(1))  # FSDP2 cuts as torch.chunk does
            first = min(plane.get_local_rank("shards") * rows_per_rank, rows)
            spec = spec.narrow(0, first, min(rows_per_rank, rows - first))
        assert tuple(local(parameter).shape) == spec.sizes, (name, spec)
        specs[name] = spec
    return specs


def counted(policy: PolicyModel | Stages, mesh: Mesh) -> set[str]:
    """Return the parameters that this rank counts and stores: one rank does for equal copies."""
    names = set()
    for name, parameter in policy.named_parameters():
        copy = mesh.rank("dp") + mesh.rank("cp")
        if isinstance(parameter, DTensor):
            copy = parameter.device_mesh.get_local_rank("replicas")
        if name not in policy.tp_dims:
            copy += mesh.rank("tp")
        if copy == 0 and name not in policy.extra_copies:
            names.add(name)
    return names
