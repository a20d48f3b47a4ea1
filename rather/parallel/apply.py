"""The order in which a model is divided, in one place: pipeline, tensor, context, experts, layers,
shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rather.config.strategies import Layout
from rather.errors import ConfigError
from rather.model.layers import arrange_layers
from rather.model.policy import PolicyModel
from rather.parallel.context import spread_tokens
from rather.parallel.experts import check_experts, refuse_adapted_experts, spread_experts
from rather.parallel.mesh import Mesh
from rather.parallel.shard import STAGES, shard
from rather.parallel.stages import Stages, check_cut, cut
from rather.parallel.tensor import check_split, split_model


def divide(
    policy: PolicyModel,
    mesh: Mesh,
    layout: Layout,
    *,
    compute: torch.dtype,
    compiled: bool = False,
    fill: Callable[[PolicyModel], None] | None = None,
) -> PolicyModel | Stages:
    """Reduce a model to the part that this rank holds. All ranks must call it.

    Parameters that will be sharded and trained must be float32; `compute` is their dtype in
    forward and backward. `fill` loads the values of a model on the meta device, part by part.
    """
    config = policy.causal_lm.config
    pipeline = layout.pipeline
    by_sequence = layout.sequence_parallel
    if layout.pp > 1 and compiled and pipeline.rule.splits_backward:
        raise ConfigError(
            f"compile: schedule '{layout.schedule}' runs the backward of inputs and weights apart, "
            "which compiled layers cannot; set compile: off, or pipeline_schedule: 1f1b or "
            "interleaved"
        )
    refuse_adapted_experts(policy, layout)
    if layout.pp > 1:
        check_cut(config)
    if layout.tp > 1:
        check_split(config, mesh, sequence_parallel=by_sequence)
    if layout.ep > 1:
        check_experts(config, layout.ep)
    stages = cut(policy, pipeline, mesh.rank("pp")) if layout.pp > 1 else []
    models: Sequence[PolicyModel] = stages or [policy]
    for model in models:
        split_model(model, mesh, sequence_parallel=by_sequence)
        spread_tokens(model, mesh)
        spread_experts(model, mesh)
        recompute = layout.recompute or "none"
        arrange_layers(model, recompute=recompute, offload=layout.offload, compiled=compiled)
        if mesh.sums_gradients:
            shard(model, mesh, STAGES[layout.stage], compute=compute, offload=layout.host)
        if fill:
            fill(model)
    return Stages(stages, pipeline, mesh, compute) if stages else policy
