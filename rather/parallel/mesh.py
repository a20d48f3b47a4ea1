"""Mesh: this rank's place among all ranks. Axes have names; one of size 1 has no process group.

Ranks count with tp fastest: pp, replicate, shard, cp, tp. `dp` spans replicate and shard: a step's
micro-batches are dealt out over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rather.errors import ConfigError

AXES = ("pp", "replicate", "shard", "cp", "tp")
SPANS: Mapping[str, tuple[str, ...]] = {
    **{axis: (axis,) for axis in AXES},
    "dp": ("replicate", "shard"),
}


@dataclass(frozen=True)
class Mesh:
    """Sizes, places and groups by axis; an empty one is a process on its own."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    device: str = "cpu"

    @staticmethod
    def one() -> Mesh:
        """Return the mesh of a single process: no process group is ever created."""
        return Mesh()

    @staticmethod
    def build(
        *,
        pp: int = 1,
        replicate: int = 1,
        shard: int = 1,
        cp: int = 1,
        tp: int = 1,
        device: str = "cpu",
    ) -> Mesh:
        """Return the mesh of all ranks of the existing process group. Collective."""
        sizes = dict(zip(AXES, (pp, replicate, shard, cp, tp), strict=True))
        world, asked = dist.get_world_size(), prod(sizes.values())
        if asked != world:
            listed = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"
            raise ConfigError(f"strategy_args: {listed} = {asked} ranks, but {world} were started")
        kind = device.split(":")[0]
        devices = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=AXES)
        groups = {axis: devices.get_group(axis) for axis in AXES if sizes[axis] > 1}
        if replicate * shard > 1:
            dealt = init_device_mesh(
                kind, (pp, replicate * shard, cp * tp), mesh_dim_names=("pp", "dp", "inner")
            )
            groups["dp"] = dealt.get_group("dp")
        return Mesh(sizes, {axis: devices.get_local_rank(axis) for axis in AXES}, groups, kind)

    def size(self, axis: str) -> int:
        return prod(self.sizes.get(each, 1) for each in SPANS[axis])

    def rank(self, axis: str) -> int:
        """Return this rank's place along an axis; along several, counted with the last one
        fastest."""
        place = 0
        for each in SPANS[axis]:
            place = place * self.size(each) + self.places.get(each, 0)
        return place

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups.get(axis)

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    def plane(self, *, sharded: bool) -> DeviceMesh:
        """Return the (replicas, shards) mesh of every parameter, for FSDP2. Gradients are summed
        over both. Collective.

        The tokens of a micro-batch are divided over cp, so its ranks sum their gradients too: they
        are further shards where parameters are sharded, else further replicas.
        """
        pp, replicate, shard, cp, tp = (self.size(axis) for axis in AXES)
        inner = (replicate, shard * cp) if sharded else (replicate * shard * cp, 1)
        whole = init_device_mesh(
            self.device, (pp, *inner, tp), mesh_dim_names=("pp", "replicas", "shards", "tp")
        )
        return whole["replicas", "shards"]
