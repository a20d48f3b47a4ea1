"""A frozen model that waits on the host: between two of its turns its memory on the GPU serves training.

Its weights come back through pinned memory in the order in which they are used, and the first layers run while the
last ones are still on their way. Nothing goes the other way: a frozen model does not change.
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


class Parked:
    """Takes the weights of a frozen policy off its GPU; inside `here` they are there."""

    def __init__(self, policy: PolicyModel) -> None:
        self.device = policy.causal_lm.device
        self.carrier: Any = torch.cuda.Stream(self.device)
        buffer, copies = _on_the_host(policy.parameters())
        weakref.finalize(
            self, _unpin, _pinned(buffer)
        )  # memory that is freed while pinned cannot be used again
        self.groups = [
            _Group(module, [(parameter, copies[parameter]) for parameter in weights])
            for module, weights in _in_order(policy)
        ]
        self._leave()

    @contextmanager
    def here(self) -> Iterator[None]:
        try:
            self._come()
            yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.carrier)
            self._leave()

    def _come(self) -> None:
        """Memory is taken by the stream that computes, and so comes from what training has just left."""
        for group in self.groups:
            for parameter, host in group.weights:
                parameter.data = torch.empty_like(host, device=self.device)
        self.carrier.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.carrier):
            for group in self.groups:
                for parameter, host in group.weights:
                    parameter.data.copy_(host, non_blocking=True)
                group.arrived.record(self.carrier)

    def _leave(self) -> None:
        for group in self.groups:
            for parameter, _ in group.weights:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


class _Group:
    """Weights that a module, and what comes before it in the model, needs; it waits for them."""

    def __init__(self, module: nn.Module, weights: list[tuple[nn.Parameter, Tensor]]) -> None:
        self.weights = weights
        self.arrived: Any = torch.cuda.Event()
        module.register_forward_pre_hook(self._wait)

    def _wait(self, _module: nn.Module, _inputs: Any) -> None:
        torch.cuda.current_stream().wait_event(self.arrived)


def _in_order(policy: PolicyModel) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules with the weights that must be there when they begin: embedding, layers, and with the last one the rest.

    The head is no module that is called, so its weights come before the last layer.
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


def _on_the_host(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Copies of all weights, and the one buffer in which they lie."""
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


def _pinned(buffer: Tensor) -> Tensor:
    """A GPU can read it by itself from now on. Not torch's pinned memory, which is rounded up to a power of two."""
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    )
    return buffer


def _unpin(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
