"""Chooses the linear layers of a model on CUDA."""

from __future__ import annotations

from typing import Any

from rather.model.layers import layers_of
from rather.model.policy import PolicyModel
from rather.optim.summing import group_projections, summing


def use_fewer_kernels(policy: PolicyModel, optimizer: Any, *, alone: bool) -> None:
    """Replace the linear layers of a model on CUDA; `alone`: its weights are not sharded."""
    modules = [module for layer in layers_of(policy) for module in layer.modules()]
    adapted = optimizer and hasattr(policy.causal_lm, "peft_config")
    if adapted:
        from rather.model.adapted_layers import AdaptedLinear, group_adapted

        AdaptedLinear.replace(policy.causal_lm, joins=alone)
    if optimizer:
        optimizer.sum_inside(modules)
    elif alone:  # the same products as a policy in half precision
        summing(modules, {p for p in policy.parameters() if p.itemsize == 2})
    if alone:
        group_projections(modules)
    if alone and optimizer:
        optimizer.carry_sums(layers_of(policy))
    if alone and adapted:
        group_adapted(modules)
