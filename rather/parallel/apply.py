"""The order in which a model is divided, in one place: pipeline, tensor, context, layers, shard."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rather.config.strategies import Layout
from rather.errors import ConfigError
from rather.model.layers import Recompute, arrange_layers
from rather.model.policy import PolicyModel
from rather.parallel.context import spread_tokens
from rather.parallel.mesh import Mesh
from rather.parallel.shard import STAGES, Sharding, shard
from rather.parallel.stages import Stages, check_cut, cut
from rather.parallel.tensor import check_split, split_model


def build_mesh(layout: Layout, device: str) -> Mesh:
    """Return the mesh of a layout over all ranks of the process group; without a group, that of one
    process. Collective."""
    if not torch.distributed.is_initialized():
        return Mesh.one()
    replicate = layout.dp // layout.shard
    return Mesh.build(
        pp=layout.pp,
        replicate=replicate,
        shard=layout.shard,
        cp=layout.cp,
        tp=layout.tp,
        device=device,
    )


def divide(
    policy: PolicyModel,
    mesh: Mesh,
    layout: Layout,
    *,
    compute: torch.dtype,
    recompute: Recompute = "none",
    compiled: bool = False,
    fill: Callable[[PolicyModel], None] | None = None,
) -> PolicyModel | Stages:
    """Leave in a model what this rank holds of it. Collective.

    Parameters that will be sharded and trained must be float32; `compute` is what they are used in.
    Those of a model on the meta device are given their values by `fill`, part by part.
    """
    _check(policy, mesh, layout, compiled=compiled)
    pipeline = layout.pipeline
    parts: list[PolicyModel] = (
        [*cut(policy, pipeline, mesh.rank("pp"))] if layout.pp > 1 else [policy]
    )
    for part in parts:
        split_model(part, mesh, sequence_parallel=layout.sequence_parallel)
        spread_tokens(part, mesh)
        arrange_layers(part, recompute=recompute, offload=layout.offload, compiled=compiled)
        if shards(mesh):
            shard(part, mesh, Sharding(STAGES[layout.stage], compute, layout.host))
        if fill:
            fill(part)
    return Stages(parts, pipeline, mesh, compute) if layout.pp > 1 else policy  # type: ignore[arg-type]


def shards(mesh: Mesh) -> bool:
    """Return whether gradients are summed over ranks. A mesh of one rank is sharded too, and uses
    the same code."""
    return mesh.size("dp") * mesh.size("cp") > 1 or (bool(mesh.sizes) and mesh.world == 1)


def _check(policy: PolicyModel, mesh: Mesh, layout: Layout, *, compiled: bool) -> None:
    config = policy.causal_lm.config
    if layout.pp > 1:
        if compiled and layout.pipeline.rule.splits_backward:
            raise ConfigError(
                f"compile: schedule '{layout.schedule}' runs the backward of inputs and weights "
                "apart, which compiled layers cannot; set compile: off, or pipeline_schedule: "
                "1f1b or interleaved"
            )
        check_cut(config)
    if layout.tp > 1:
        check_split(config, mesh, sequence_parallel=layout.sequence_parallel)
