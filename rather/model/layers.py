"""How decoder layers run: activations kept, recomputed or offloaded to the host; compiled or not.

Compilation is regional: one layer class is compiled once, for any number of tokens, and shared by
all layers of policy and reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rather.errors import ConfigError
from rather.model.policy import PolicyModel

Recompute = Literal["none", "half", "selective", "full"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
LEVELS: tuple[Recompute, ...] = get_args(Recompute)  # less and less memory, more and more time

log = logging.getLogger(__name__)


def layers_of(policy: PolicyModel) -> list[Any]:
    """Return the decoder layers, as transformers marks them."""
    return [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]


def arrange_layers(
    policy: PolicyModel,
    *,
    recompute: Recompute = "none",
    offload: bool = False,
    compiled: bool = False,
) -> None:
    """Set how the layers run from now on; replaces an earlier setting."""
    layers = layers_of(policy)
    family = policy.causal_lm.config.model_type
    if not layers and (recompute != "none" or offload):
        raise ConfigError(
            f"model family '{family}': its layers cannot recompute activations; "
            "set actor_train.model_args.disable_gradient_checkpointing to true"
        )
    if not layers and compiled:
        log.warning(
            "model family '%s' does not mark its layers: it runs without torch.compile", family
        )
    for layer in layers:
        layer.forward = MethodType(_run(type(layer).forward, recompute, offload, compiled), layer)


@contextmanager
def plain_layers(policy: PolicyModel) -> Iterator[None]:
    """Run the layers uncompiled: a key-value cache would compile them again."""
    arranged = [(layer, layer.__dict__.pop("forward", None)) for layer in layers_of(policy)]
    try:
        yield
    finally:
        for layer, forward in arranged:
            if forward is not None:
                layer.forward = forward


@cache  # all layers of a class get the same function, and with it the same compiled code
def _run(
    forward: Callable[..., Any], recompute: Recompute, offload: bool, compiled: bool
) -> Callable[..., Any]:
    run = forward
    if recompute != "none":
        # Not transformers' own checkpointing: it works only in training mode, which enables
        # dropout.
        keeping = {"half": _keep_half_of_the_wide, "selective": _keep_narrow_results}
        contexts: Any = {"context_fn": keeping[recompute]} if recompute in keeping else {}
        run = partial(
            checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **contexts
        )
    if compiled:
        run = torch.compile(run, dynamic=True)
    if offload:
        run = _with_activations_on_the_host(run)
    return run


def _keep_narrow_results() -> Contexts:
    """Keep the output of attention and every matrix product that is not much wider than its input.

    The wide ones open the MLP: most of the memory, and the cheapest to recompute per byte.
    """
    return _keeping(lambda _number: False)


def _keep_half_of_the_wide() -> Contexts:
    """Keep also every second wide product."""
    return _keeping(lambda number: number % 2 == 1)


def _keeping(keeps_wide: Callable[[int], bool]) -> Contexts:
    """Return contexts that keep a wide product if `keeps_wide` of its number in the layer."""
    seen = {False: 0, True: 0}  # wide products in the first run, and in the recomputation

    def policy(context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.rather.segment_attention.default:
            return CheckpointPolicy.MUST_SAVE
        if operator not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        inner, outer = args[-1].shape
        if outer <= 2 * inner:
            return CheckpointPolicy.MUST_SAVE
        seen[context.is_recompute] += 1
        keep = keeps_wide(seen[context.is_recompute])
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def _with_activations_on_the_host(run: Callable[..., Any]) -> Callable[..., Any]:
    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return run(*args, **kwargs)

    return offloading
