"""Collectives inside autograd: what each does forward and backward. Groups go by name, as the operators take them.

The communication itself is an operator of its own, so that a compiled layer holds it without a break in its graph and
without guessing at its backward.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

Group = str  # ProcessGroup.group_name


def enter(x: Tensor, group: Group) -> Tensor:
    """Before work that is divided among ranks. Forward: nothing. Backward: sum of the ranks' gradients."""
    entered: Tensor = _Enter.apply(x, group)
    return entered


def leave(x: Tensor, group: Group) -> Tensor:
    """After it. Forward: sum of the ranks' results. Backward: nothing, each rank's part of a sum has its gradient."""
    left: Tensor = _Leave.apply(x, group)
    return left


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: the ranks' equal parts one after another. Backward: this rank's part of the sum of all gradients.

    For parts of which each rank then makes a use of its own.
    """
    whole: Tensor = _Gather.apply(x, dim, group)
    return whole


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: this rank's part of the sum over ranks. Backward: all parts' gradients one after another."""
    part: Tensor = _ScatterSum.apply(x, dim, group)
    return part


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward as `gather`. Backward: this rank's part, for all ranks do the same with the whole: nothing to sum."""
    whole: Tensor = _GatherSame.apply(x, dim, group)
    return whole


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Of what all ranks hold. Forward: this rank's part. Backward: all parts' gradients one after another."""
    part: Tensor = _OwnPart.apply(x, dim, group)
    return part


def gathered(x: Tensor, group: Group) -> Tensor:
    """[ranks, ...]: what each rank has. No gradient."""
    return _whole(x[None], 0, group)


def all_reduce_(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors over the group in place, all of one dtype in one message. No gradient."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(
            same, flat.split([tensor.numel() for tensor in same]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _summed(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _whole(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _part_of_sum(grads[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part_of_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _whole(grads[0], ctx.dim, ctx.group), None, None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _whole(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _own(grads[0], ctx.dim, ctx.group), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _whole(grads[0], ctx.dim, ctx.group), None, None


def _ranks(group: Group) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]


# Operators and collectives work along the first dimension; whatever else is asked for is moved there and back.


def _summed(x: Tensor, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.all_reduce(x, group)
    return out


def _whole(x: Tensor, dim: int, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.all_gather(x.movedim(dim, 0), group)
    return out.movedim(0, dim)


def _part_of_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.reduce_scatter(x.movedim(dim, 0), group)
    return out.movedim(0, dim)


def _own(x: Tensor, dim: int, group: Group) -> Tensor:
    ranks = _ranks(group)
    return x.chunk(ranks.size(), dim)[ranks.rank()].contiguous()


@torch.library.custom_op("rather::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_ranks(group))
    return out


@_all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("rather::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str) -> Tensor:
    ranks = _ranks(group)
    out = x.new_empty((x.shape[0] * ranks.size(), *x.shape[1:]))
    ranks._allgather_base(out, x.contiguous()).wait()
    return out


@_all_gather.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] * _ranks(group).size(), *x.shape[1:]))


@torch.library.custom_op("rather::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    ranks = _ranks(group)
    out = x.new_empty((x.shape[0] // ranks.size(), *x.shape[1:]))
    ranks._reduce_scatter_base(out, x.contiguous(), dist.ReduceScatterOptions()).wait()
    return out


@_reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // _ranks(group).size(), *x.shape[1:]))
