"""A frozen model that waits on the host, so that training can use its GPU memory in between.

Its weights are copied back through pinned memory in the order of their use; the first layers run
while the last ones are still being copied. Nothing is copied to the host again: a frozen model does
not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rather.model.policy import PolicyModel


class HostOffloaded:
    """Moves the weights of a frozen policy to the host; inside `on_device` they are on the GPU."""

    def __init__(self, policy: PolicyModel) -> None:
        self.device = policy.causal_lm.device
        self.carrier: Any = torch.cuda.Stream(self.device)
        buffer, copies = _copy_to_host(policy.parameters())
        # Memory that is freed while pinned cannot be used again.
        weakref.finalize(self, _unpin, _pin(buffer))
        self.groups = [
            _Group(module, [(parameter, copies[parameter]) for parameter in weights])
            for module, weights in _in_order(policy)
        ]
        self._free_device()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            self._copy_to_device()
            yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.carrier)
            self._free_device()

    def _copy_to_device(self) -> None:
        """Allocate on the computing stream, which reuses memory freed by training; then copy."""
        for group in self.groups:
            for parameter, host in group.weights:
                parameter.data = torch.empty_like(host, device=self.device)
        self.carrier.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.carrier):
            for group in self.groups:
                for parameter, host in group.weights:
                    parameter.data.copy_(host, non_blocking=True)
                group.arrived.record(self.carrier)

    def _free_device(self) -> None:
        for group in self.groups:
            for parameter, _ in group.weights:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


class _Group:
    """Weights that a module needs; its forward waits for them."""

    def __init__(self, module: nn.Module, weights: list[tuple[nn.Parameter, Tensor]]) -> None:
        self.weights = weights
        self.arrived: Any = torch.cuda.Event()
        module.register_forward_pre_hook(self._wait)

    def _wait(self, _module: nn.Module, _inputs: Any) -> None:
        torch.cuda.current_stream().wait_event(self.arrived)


def _in_order(policy: PolicyModel) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield modules with the weights they need: embedding, layers, and with the last one the rest.

    The head is not called as a module, so its weights come before the last layer.
    """
    embedding: nn.Module = policy.causal_lm.get_input_embeddings()
    layers = [
        module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    taken: set[nn.Parameter] = set()
    for module in (embedding, *layers[:-1]):
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(own)
        yield module, own
    rest = [parameter for parameter in policy.parameters() if parameter not in taken]
    yield layers[-1] if layers else policy, rest


def _copy_to_host(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Return copies of all weights, and the one buffer that holds them."""
    wanted = list(parameters)
    starts = list(accumulate((_aligned(parameter.nbytes) for parameter in wanted), initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8)
    copies = {}
    for start, parameter in zip(starts[:-1], wanted, strict=True):
        bytes_of_it = buffer[start : start + parameter.nbytes]
        copies[parameter] = (
            bytes_of_it.view(parameter.dtype).view(parameter.shape).copy_(parameter.detach())
        )
    return buffer, copies


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _pin(buffer: Tensor) -> Tensor:
    """Pin memory for the GPU. torch's own pinned memory is rounded up to a power of two."""
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    )
    return buffer


def _unpin(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
