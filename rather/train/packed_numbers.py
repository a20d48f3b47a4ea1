"""PackedNumbers: the numbers of a step as one vector, for one collective and one host copy."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class PackedNumbers:
    """What all ranks sum up in a step. Only one rank contributes each number; the others add 0.

    The exceptions come first: every rank has its shard of the gradient, and its own requests. Of
    `grad_norm` the squares are added.
    """

    grad_norm: Tensor  # []
    zeros: Tensor  # [] in the gradient
    requests: Tensor  # [kinds] how many ranks were asked to stop or to save
    tokens: Tensor  # [2] of the micro-batches: without padding, and with it
    metrics: Tensor  # [micro-batches of all dp ranks, metrics]
    policy: Tensor  # [pairs, 2] log-probs
    slope: Tensor  # [pairs, 2] gradients of the loss by the log-probs
    reference: Tensor  # [pairs, 2] log-probs; 0 if there is no reference

    @property
    def own_size(self) -> int:
        """Return how many numbers, the first ones, every rank contributes to."""
        return 2 + self.requests.numel()

    def pack(self) -> Tensor:
        """Return all numbers as one vector."""
        return torch.cat([getattr(self, field.name).flatten() for field in fields(self)])

    def unpack(self, vector: Tensor) -> PackedNumbers:
        """Return the numbers of a vector that was packed from numbers of the same shapes."""
        tensors = [getattr(self, field.name) for field in fields(self)]
        flat_views = torch.split(vector, [tensor.numel() for tensor in tensors])
        views = (flat.view(tensor.shape) for flat, tensor in zip(flat_views, tensors, strict=True))
        return PackedNumbers(*views)
