"""Round float32 weights to bfloat16 so that small updates survive.

A bfloat16 source lies on the bfloat16 grid, so rounding to the nearest value discards every update
below half a step. Here each weight has a fixed threshold t in [0, 65535], and the rounded weight is
`(bits of the float32 value + t) >> 16`. A weight on the grid stays where it is, and a tenth of a
step moves one weight in ten. Nearest rounding is the same rule with t = 0x8000 for all weights.

t is a hash of the parameter's name and of the weight's flat index in the whole tensor. It depends
neither on the layout nor on the step, so every rank, kernel and file rounds alike. The hash is a
file format: tests/optim/test_rounding.py holds its vectors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from rather.checkpoint.sharded_tensors import ShardSpec

NEAREST = 0x8000  # the threshold of nearest rounding; exact halves are rounded up
FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
EXPONENT = 0x7F80  # of a bfloat16; all ones in Inf and NaN
CHUNK = 1 << 20  # weights whose thresholds are in memory at a time
# What wrappers add to the name of a parameter. An adapter's frozen start is rounded as the adapter.
WRAPPERS = re.compile(
    r"^(causal_lm\.)?(base_model\.model\.)?"
    r"|\b(base_layer|original_module|modules_to_save\.\w+|default|reference)\."
)


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model itself, without what wrappers add."""
    return WRAPPERS.sub("", name)


@cache
def hash_key(name: str) -> tuple[int, int]:
    """Return the two 32-bit keys of a parameter."""
    digest = hashlib.blake2b(plain_name(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@cache
def place(spec: ShardSpec) -> tuple[int, int, int]:
    """Return (run, stride, offset): local flat index i is i // run * stride + i % run + offset.

    Rows of the first dimension and one further dimension may be cut.
    """
    cut = [dim for dim in range(1, len(spec.whole)) if spec.sizes[dim] != spec.whole[dim]]
    assert len(cut) <= 1, spec
    dim = cut[0] if cut else 0
    strides = [prod(spec.whole[d + 1 :]) for d in range(len(spec.whole))]
    offset = sum(o * s for o, s in zip(spec.offsets, strides, strict=True))
    if not spec.whole:
        return 1, 1, 0
    return spec.sizes[dim] * strides[dim], spec.whole[dim] * strides[dim], offset


def thresholds(
    name: str,
    spec: ShardSpec,
    first: int = 0,
    last: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the thresholds of the weights `first` to `last` of a block, flat, as int32."""
    run, stride, offset = place(spec)
    last = prod(spec.sizes) if last is None else last
    index = torch.arange(first, last, dtype=torch.int64, device=device)
    if run != stride:
        index = index // run * stride + index % run
    index += offset
    first_key, second_key = hash_key(name)
    high = (index >> 32).int().mul_(signed(FACTORS[2])) if prod(spec.whole) >> 32 else 0
    bits = index.int().bitwise_xor_(signed(first_key))  # int32 products wrap around
    bits.mul_(signed(FACTORS[0]))
    bits.bitwise_xor_((bits >> 15).bitwise_and_((1 << 17) - 1))
    bits.add_(signed(second_key)).add_(high).mul_(signed(FACTORS[1]))
    bits.bitwise_xor_((bits >> 13).bitwise_and_((1 << 19) - 1)).mul_(signed(FACTORS[2]))
    return (bits >> 16).bitwise_and_(0xFFFF)


@dataclass(frozen=True)
class Rounding:
    """How the weights of a model are rounded to bfloat16.

    `places` are the blocks that this rank holds of divided parameters. `held` are the float32
    parameters that hold bfloat16 values: shards, which are gathered in bfloat16, and all weights on
    a CPU that computes in float32 instead.
    """

    kind: Literal["dithered", "nearest"] = "nearest"
    places: Mapping[str, ShardSpec] = field(default_factory=dict)
    held: Set[str] = frozenset()

    def applies(self, name: str, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 or name in self.held

    def place(self, name: str, weight: Tensor) -> ShardSpec:
        return self.places.get(name) or ShardSpec.full(weight.shape)

    def thresholds(
        self, name: str, weight: Tensor, first: int = 0, last: int | None = None
    ) -> Tensor | int:
        """Return the thresholds of a weight, or of some of its values, in one dimension."""
        if self.kind == "nearest":
            return NEAREST
        return thresholds(name, self.place(name, weight), first, last, weight.device)

    def rounded(self, name: str, value: Tensor, spec: ShardSpec | None = None) -> Tensor:
        """Return the value of a parameter in bfloat16; a tie of nearest rounding becomes even."""
        if self.kind == "nearest" or value.dtype == torch.bfloat16:
            return value.to(torch.bfloat16)
        return self._in_chunks(rounded, name, spec or self.place(name, value), value)

    def cast(
        self, name: str, value: Tensor, dtype: torch.dtype, spec: ShardSpec | None = None
    ) -> Tensor:
        """Return the value of a parameter in any dtype; only bfloat16 has thresholds."""
        return self.rounded(name, value, spec) if dtype == torch.bfloat16 else value.to(dtype)

    def fill(self, name: str, weight: Tensor, value: Tensor) -> None:
        """Write a value to a frozen weight."""
        is_rounded = self.applies(name, weight)
        weight.copy_(self.rounded(name, value.to(weight.device)) if is_rounded else value)

    def split(self, name: str, weight: Tensor, master: Tensor) -> Tensor:
        """Write a float32 master to a weight, rounded; return its lower 16 bits."""
        master = master.to(weight.device)
        weight.copy_(self._in_chunks(rounded, name, self.place(name, weight), master))
        return low_bits(master)

    def exact(self, name: str, weight: Tensor, low: Tensor) -> Tensor:
        """Return the float32 master of a rounded weight."""
        return self._in_chunks(exact, name, self.place(name, weight), weight, low)

    def _in_chunks(
        self, function: Callable[..., Tensor], name: str, spec: ShardSpec, *tensors: Tensor
    ) -> Tensor:
        """Return a function of tensors and thresholds: those of all weights may not fit."""
        if self.kind == "nearest":
            return function(*tensors, NEAREST)
        flat = [tensor.reshape(-1) for tensor in tensors]
        count = flat[0].numel()
        device = flat[0].device
        results = []
        for first in range(0, max(count, 1), CHUNK):
            last = min(first + CHUNK, count)
            limits = thresholds(name, spec, first, last, device)
            results.append(function(*(tensor[first:last] for tensor in flat), limits))
        return (results[0] if len(results) == 1 else torch.cat(results)).view(tensors[0].shape)


def rounded(master: Tensor, threshold: Tensor | int) -> Tensor:
    """Return a float32 tensor as bfloat16. Inf and NaN stay what they are."""
    bits = master.float().contiguous().view(torch.int32)
    upper = (bits + threshold) >> 16
    finite = (bits >> 16) & EXPONENT != EXPONENT
    unrounded = (bits >> 16) | (bits & 0xFFFF != 0)
    return torch.where(finite, upper, unrounded).short().view(torch.bfloat16)


def low_bits(master: Tensor) -> Tensor:
    return master.contiguous().view(torch.int32).short()


def exact(weight: Tensor, low: Tensor, threshold: Tensor | int) -> Tensor:
    """Return the float32 value of a rounded weight whose 16 low bits are known."""
    low = low.int() & 0xFFFF
    carry = (low + threshold) >> 16
    upper = weight.detach().bfloat16().view(torch.int16).int() - carry
    return ((upper << 16) | low).view(torch.float32)


def signed(number: int) -> int:
    """Return 32 bits as the signed number that torch expects."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)
