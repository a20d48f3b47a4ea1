"""How decoder layers run: activations kept, recomputed or offloaded to the host; compiled or not.

A frozen model can wait on the host, so that training can use its GPU memory in between.

Compilation is regional: one layer class is compiled once, for any number of tokens, and shared by
all layers of policy and reference. Small layers are compiled several at a time: their kernels take
less time than the host needs to start a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from itertools import accumulate
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy as Choice
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from rather.arithmetic import round_up
from rather.errors import ConfigError
from rather.model.check import experts_of
from rather.model.policy import PolicyModel
from rather.optim.host import pinned
from rather.optim.summing import SharedInput, ungroup_projections

Recompute = Literal["none", "half", "selective", "full"]
LEVELS: tuple[Recompute, ...] = get_args(Recompute)  # less and less memory, more and more time
SMALL = 8_000_000  # a layer with fewer weights is small
GROUP = 5  # small layers compiled as one: a larger group takes longer to compile

log = logging.getLogger(__name__)


def layers_of(policy: nn.Module) -> list[Any]:
    """Return the decoder layers, as transformers marks them; those of a tower are none."""
    marked = [
        module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    return [layer for layer in marked if not getattr(layer, "outside_language", False)]


def arrange_layers(
    policy: PolicyModel,
    *,
    recompute: Recompute = "none",
    offload: bool = False,
    compiled: bool = False,
    alone: bool = False,
) -> None:
    """Set how the layers run from now on; replaces an earlier setting.

    `alone`: the weights are not sharded, so small layers can be compiled several at a time.
    """
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
        for module in layer.modules():
            if isinstance(group := getattr(module, "group", None), SharedInput):
                group.apart = recompute in ("half", "selective")  # by the width of each product
        layer.forward = MethodType(_run(type(layer).forward, recompute, offload, compiled), layer)
    in_groups = alone and compiled and recompute == "none" and not offload
    if in_groups and (size := _group_size(policy, layers)) > 1:
        for first in range(0, len(layers), size):
            _Group(layers[first : first + size])


def _group_size(policy: PolicyModel, layers: Sequence[nn.Module]) -> int:
    """Return how many layers are compiled as one: a divisor of their number, so groups are equal.

    Layers with adapters gain too little from it; with experts it was not tried. A layer that
    returns more than a tensor cannot wait for the last of its group, nor can one with hooks.
    """
    if hasattr(policy.causal_lm, "peft_config") or experts_of(policy.causal_lm.config):
        return 1
    for layer in layers:
        weights = sum(parameter.numel() for parameter in layer.parameters())
        returned = signature(type(layer).forward).return_annotation
        if weights >= SMALL or returned is not Tensor or layer._forward_hooks:
            return 1
    return max(size for size in range(1, GROUP + 1) if len(layers) % size == 0)


class _Group:
    """Layers that run as one when the last of them is called; the others return their input."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.run = _run(_run_layers, "none", offload=False, compiled=True)
        for index, layer in enumerate(layers):
            layer.forward = partial(self.call, index)

    def call(self, place: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls = [*self.calls[:place], (args, kwargs)]
        if len(self.calls) < len(self.layers):
            return hidden
        calls, self.calls = self.calls, []
        output: Tensor = self.run(self.layers, hidden, calls)
        return output


def _run_layers(layers: Iterable[Any], hidden: Tensor, calls: Iterable[Any]) -> Tensor:
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        hidden = type(layer).forward(layer, hidden, *args, **kwargs)
    return hidden


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
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if recompute != "full":
            options["context_fn"] = partial(_keep_narrow_results, recompute == "half")
        run = partial(checkpoint, forward, **options)
    if compiled:
        # Numbers of a module, such as the scale of attention, are the same in all layers. As
        # symbols they would become tensors in every call.
        torch._dynamo.config.specialize_float = True
        # Without the compiler's checks of its own shapes: about fifty calls per layer.
        run = torch.compile(run, dynamic=True, options={"size_asserts": False})
    if not offload:
        return run

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return run(*args, **kwargs)

    return offloading


def _keep_narrow_results(half_of_the_wide: bool) -> Any:
    """Keep the output of attention and every matrix product that is not much wider than its input.

    The wide ones open the MLP: most of the memory, and the cheapest to recompute per byte. Every
    second one may be kept as well.
    """
    wide_products = {False: 0, True: 0}  # in the first run, and in the recomputation

    def choose(context: Any, operator: Any, *args: Any, **_kwargs: Any) -> Choice:
        if operator == torch.ops.rather.segment_attention.default:
            return Choice.MUST_SAVE
        if operator not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return Choice.PREFER_RECOMPUTE
        inner, outer = args[-1].shape
        if outer <= 2 * inner:
            return Choice.MUST_SAVE
        wide_products[context.is_recompute] += 1
        keep = half_of_the_wide and wide_products[context.is_recompute] % 2 == 1
        return Choice.MUST_SAVE if keep else Choice.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class HostOffloaded:
    """Moves the weights of a frozen policy to the host; inside `on_device` they are on the GPU.

    They are copied back through pinned memory in the order of their use; the first layers run while
    the last ones are still being copied. Nothing is copied to the host again: they do not change.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self.device = policy.causal_lm.device
        ungroup_projections(policy.modules())
        self.carrier: Any = torch.cuda.Stream(self.device)
        self.groups: list[tuple[Any, list[nn.Parameter]]] = []
        for module, weights in _in_order(policy):
            arrived: Any = torch.cuda.Event()
            module.register_forward_pre_hook(_waits_for(arrived))
            self.groups.append((arrived, weights))
        parameters = list(policy.parameters())
        starts = list(accumulate((round_up(p.nbytes, 256) for p in parameters), initial=0))
        buffer = pinned(starts[-1], self)
        self.host: dict[nn.Parameter, Tensor] = {}
        for start, parameter in zip(starts[:-1], parameters, strict=True):
            host_copy = buffer[start : start + parameter.nbytes].view(parameter.dtype)
            self.host[parameter] = host_copy.view(parameter.shape).copy_(parameter.detach())
        self._free_device()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            # Allocated on the computing stream, which reuses memory freed by training.
            for parameter, host in self.host.items():
                parameter.data = torch.empty_like(host, device=self.device)
            self.carrier.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.carrier):
                for arrived, weights in self.groups:
                    for parameter in weights:
                        parameter.data.copy_(self.host[parameter], non_blocking=True)
                    arrived.record(self.carrier)
            yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.carrier)
            self._free_device()

    def _free_device(self) -> None:
        for parameter in self.host:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def _waits_for(event: Any) -> Any:
    return lambda _module, _inputs: torch.cuda.current_stream().wait_event(event)


def _in_order(policy: PolicyModel) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield modules with the weights they need: embedding, layers, and with the last one the rest.

    The head is not called as a module, so its weights come before the last layer.
    """
    layers = layers_of(policy)
    yielded: set[nn.Parameter] = set()
    embedding = policy.causal_lm.get_input_embeddings()
    for module in (embedding, *layers[:-1]):
        weights = [parameter for parameter in module.parameters() if parameter not in yielded]
        if module is embedding and policy.vision:  # the tower runs right behind it
            weights += policy.vision.parameters()
        yielded.update(weights)
        yield module, weights
    remaining = [parameter for parameter in policy.parameters() if parameter not in yielded]
    yield layers[-1] if layers else policy, remaining
