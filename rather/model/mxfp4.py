"""Weights that are stored in four bits with a scale for 32 of them (MXFP4), as gpt-oss is released.

A byte holds two numbers of four bits, the lower half first: a sign and one of eight sizes. A scale
is a power of two. Every product of both is a bfloat16 number, so nothing is lost in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # after the name of a tensor
GROUP = 32  # numbers with one scale
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of the exponent in a scale


class PackedExperts:
    """The matrices of experts [experts, columns, rows], read like a tensor of a safetensors file.

    The file has them as [experts, rows, groups, bytes], so that a group is a part of a column.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        """`blocks` and `scales` are slices of safetensors files."""
        self._blocks, self._scales = blocks, scales
        experts, rows, groups, width = blocks.get_shape()
        if 2 * width != GROUP or [*scales.get_shape()] != [experts, rows, groups]:
            raise ValueError(
                f"blocks {[*blocks.get_shape()]} and scales {[*scales.get_shape()]} do not belong "
                "together"
            )
        self.shape = (experts, groups * GROUP, rows)

    def get_slice(self, _name: str) -> PackedExperts:
        return self

    def get_tensor(self, _name: str) -> Tensor:
        return self[(slice(None),) * 3]

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        experts, columns, rows = slices
        first, end, _ = columns.indices(self.shape[1])
        groups = slice(first // GROUP, -(-end // GROUP))
        blocks = self._blocks[experts, rows, groups]
        unpacked = dequantised(blocks, self._scales[experts, rows, groups])
        begin = first - groups.start * GROUP
        return unpacked[..., begin : begin + end - first].transpose(1, 2).contiguous()


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., columns] of `blocks` [..., groups, bytes] in bfloat16."""
    sizes = torch.tensor(SIZES, dtype=torch.bfloat16)
    table = torch.cat([sizes, -sizes])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = table[halves.int()]
    return torch.ldexp(numbers, (scales.int() - BIAS)[..., None]).flatten(-2)
