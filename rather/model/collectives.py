"""Collectives inside autograd: what each does forward and backward. Groups are passed by name.

The communication itself is a custom operator, so that a compiled layer holds it without a graph
break and without guessing at its backward.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

Group = str  # ProcessGroup.group_name


def enter(x: Tensor, group: Group) -> Tensor:
    """Before work that ranks divide. Forward: nothing. Backward: sum of the ranks' gradients."""
    return _apply(x, _same, _sum, 0, group)


def leave(x: Tensor, group: Group) -> Tensor:
    """After work that ranks divide. Forward: sum of the ranks' results. Backward: nothing.

    Each rank's term of a sum has the gradient of the sum.
    """
    return _apply(x, _sum, _same, 0, group)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: concatenate the ranks' equal parts. Backward: this rank's part of the summed
    gradient.

    For parts that each rank then uses in its own way.
    """
    return _apply(x, _concatenate, _part_of_sum, dim, group)


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: this rank's part of the sum over ranks. Backward: concatenate the gradients."""
    return _apply(x, _part_of_sum, _concatenate, dim, group)


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: as `gather`. Backward: this rank's part.

    For ranks that all do the same with the whole, so that there is nothing to sum.
    """
    return _apply(x, _concatenate, _part, dim, group)


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: this rank's part of what all ranks hold. Backward: concatenate the gradients."""
    return _apply(x, _part, _concatenate, dim, group)


def gather_ranks(x: Tensor, group: Group) -> Tensor:
    """Return [ranks, ...]: what each rank has. No gradient."""
    return _concatenate(x[None], 0, group)


def all_reduce_(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the group in place, all of one dtype in one message. No gradient."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in same])
        dist.all_reduce(flat, group=group)
        sizes = [tensor.numel() for tensor in same]
        for tensor, summed in zip(same, flat.split(sizes), strict=True):
            tensor.copy_(summed.view_as(tensor))


Step = Callable[[Tensor, int, Group], Tensor]


class _Collective(torch.autograd.Function):
    """One function of a tensor forward, another one of its gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Step, back: Step, dim: int, group: Group) -> Tensor:
        ctx.back, ctx.dim, ctx.group = back, dim, group
        return run(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], ctx.dim, ctx.group), None, None, None, None


def _apply(x: Tensor, run: Step, back: Step, dim: int, group: Group) -> Tensor:
    result: Tensor = _Collective.apply(x, run, back, dim, group)
    return result


def _ranks(group: Group) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]


# Operators and collectives work along the first dimension; any other is moved there and back.


def _same(x: Tensor, _dim: int, _group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, _dim: int, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.all_reduce(x, group)
    return out


def _concatenate(x: Tensor, dim: int, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.all_gather(x.movedim(dim, 0), group)
    return out.movedim(0, dim)


def _part_of_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    out: Tensor = torch.ops.rather.reduce_scatter(x.movedim(dim, 0), group)
    return out.movedim(0, dim)


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
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
