"""Collectives inside autograd: what each does forward and backward. Groups are passed by name.

torch's functional operators communicate: a compiled layer holds them without a graph break.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import wait_tensor

Group = str  # ProcessGroup.group_name
_functional = torch.ops._c10d_functional


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


# Collectives work along the first dimension; any other is moved there and back.


def _same(x: Tensor, _dim: int, _group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, _dim: int, group: Group) -> Tensor:
    return wait_tensor(_functional.all_reduce(x.contiguous(), "sum", group))


def _concatenate(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    gathered = _functional.all_gather_into_tensor(first, ranks_of(group).size(), group)
    return wait_tensor(gathered).movedim(0, dim)


def _part_of_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    summed = _functional.reduce_scatter_tensor(first, "sum", ranks_of(group).size(), group)
    return wait_tensor(summed).movedim(0, dim)


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    ranks = ranks_of(group)
    return x.chunk(ranks.size(), dim)[ranks.rank()].contiguous()


def ranks_of(group: Group) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]


def enter(x: Tensor, group: Group) -> Tensor:
    """Before work that ranks divide. Forward: nothing. Backward: sum of the ranks' gradients."""
    return _Collective.apply(x, _same, _sum, 0, group)


def leave(x: Tensor, group: Group) -> Tensor:
    """After work that ranks divide. Forward: sum of the ranks' results. Backward: nothing.

    Each rank's term of a sum has the gradient of the sum.
    """
    return _Collective.apply(x, _sum, _same, 0, group)


def _collective(run: Step, back: Step) -> Step:
    return lambda x, dim, group: _Collective.apply(x, run, back, dim, group)


# Forward: concatenate the ranks' equal parts. Backward: this rank's part of the summed gradient.
# For parts that each rank then uses in its own way.
gather = _collective(_concatenate, _part_of_sum)

# Forward: this rank's part of the sum over ranks. Backward: concatenate the gradients.
scatter_sum = _collective(_part_of_sum, _concatenate)

# Forward: as `gather`. Backward: this rank's part.
# For ranks that all do the same with the whole, so that there is nothing to sum.
gather_same = _collective(_concatenate, _part)

# Forward: this rank's part of what all ranks hold. Backward: concatenate the gradients.
own_part = _collective(_part, _concatenate)


def gather_ranks(x: Tensor, group: Group) -> Tensor:
    """Return [ranks, ...]: what each rank has. No gradient."""
    return _concatenate(x[None], 0, group)


def all_reduce_(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the group in place, all of one dtype in one message. No gradient."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(same)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))
