"""Mesh: this rank's place among all ranks. Axes have names; one of size 1 has no process group.

Ranks count with tp fastest: pp, replicate, shard, cp, tp. `dp` spans replicate and shard: a step's
micro-batches are dealt out over it. `ep` is the fast part of dp: its ranks hold different experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rather.config.strategies import Layout
from rather.errors import ConfigError

AXES = ("pp", "replicate", "shard", "cp", "tp")
T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """Sizes, places and groups by axis, also of dp and ep; an empty one is one process."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    device: str = "cpu"

    @staticmethod
    def build(device: str = "cpu", **degrees: int) -> Mesh:
        """Return the mesh of all ranks of the existing process group. Collective."""
        pp, replicate, shard, cp, tp = shape = tuple(degrees.get(axis, 1) for axis in AXES)
        dp = replicate * shard
        ep = degrees.get("ep", 1)
        if prod(shape) != (world := dist.get_world_size()) or dp % ep:
            raise ConfigError(f"strategy_args: {degrees} does not make up {world} ranks")
        kind = device.split(":")[0]
        names = ("pp", "dp", "inner")
        axes = init_device_mesh(kind, shape, mesh_dim_names=AXES)
        dealt = init_device_mesh(kind, (pp, dp, cp * tp), mesh_dim_names=names)
        meshes = {**dict.fromkeys(AXES, axes), "dp": dealt}
        if ep > 1:
            inner = (pp * dp // ep, ep, cp * tp)
            meshes["ep"] = init_device_mesh(kind, inner, mesh_dim_names=("outer", "ep", "inner"))
        sizes = {axis: mesh[axis].size() for axis, mesh in meshes.items()}
        ranks = {axis: mesh.get_local_rank(axis) for axis, mesh in meshes.items()}
        groups = {axis: mesh.get_group(axis) for axis, mesh in meshes.items() if sizes[axis] > 1}
        for group in groups.values():
            # NCCL connects the ranks of a group at its first call, in which all must take part:
            # the exchange of two ends of a pipeline would wait for ever.
            dist.all_reduce(torch.zeros(1, device=kind), group=group)
        return Mesh(sizes, ranks, groups, kind)

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def rank(self, axis: str) -> int:
        return self.places.get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups.get(axis)

    @property
    def world(self) -> int:
        return prod(map(self.size, AXES))

    @property
    def sums_gradients(self) -> bool:
        """Whether FSDP2 sums gradients over ranks. A group of one rank uses the same code."""
        return self.size("dp") * self.size("cp") > 1 or (bool(self.sizes) and self.world == 1)

    def plane(self, *, sharded: bool, ep: int = 1) -> DeviceMesh:
        """Return the (replicas, shards) mesh of parameters, for FSDP2. Collective.

        Gradients are summed over both. The tokens of a micro-batch are divided over cp, so its
        ranks sum their gradients too: they are further shards where parameters are sharded, else
        further replicas. The ranks of `ep` hold different experts and sum nothing.
        """
        pp, replicate, shard, cp, tp = map(self.size, AXES)
        shards = max(1, shard // ep)
        replicas = replicate * shard // ep // shards
        ranks = torch.arange(self.world).view(pp, replicas, shards, ep, cp, tp).transpose(3, 4)
        inner = (replicas, shards * cp) if sharded else (replicas * shards * cp, 1)
        names = ("pp", "replicas", "shards", "ep", "tp")
        all_ranks = DeviceMesh(self.device, ranks.reshape(pp, *inner, ep, tp), mesh_dim_names=names)
        return all_ranks["replicas", "shards"]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, or of all, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def max_over_ranks(number: int, device: str) -> int:
    maximum = torch.tensor(number, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


def build_mesh(layout: Layout, device: str) -> Mesh:
    """Return the mesh of a layout; without a process group, that of one process. Collective."""
    if not dist.is_initialized():
        return Mesh()
    degrees = {axis: getattr(layout, axis) for axis in ("pp", "cp", "tp", "ep", "shard")}
    return Mesh.build(device, replicate=layout.dp // layout.shard, **degrees)
