"""Linear layers that add their weight gradient into a float32 sum within the matrix product.

Otherwise autograd writes it in bfloat16, and another kernel reads it again to add it up: at 7B this
is a tenth of a step. Only for CUDA: no other device multiplies bfloat16 into float32 in place.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SummingLinear(nn.Linear):
    """A linear layer whose weight gradient goes into `total` while that is set."""

    total: Tensor | None = None

    def set_total(self, total: Tensor | None) -> None:
        object.__setattr__(self, "total", total)  # nn.Module's own takes longer than a launch

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None or not torch.is_grad_enabled():
            return super().forward(x)
        y: Tensor = _Summing.apply(x, self.weight, self.total)
        return y if self.bias is None else y + self.bias


def summing(
    modules: Iterable[nn.Module], weights: Collection[nn.Parameter]
) -> dict[nn.Parameter, SummingLinear]:
    """Turn the plain linear layers with these weights into summing ones; return them by weight."""
    found: dict[nn.Parameter, SummingLinear] = {}
    for module in modules:
        if type(module) is nn.Linear and (weight := module.weight) in weights:
            module.__class__ = SummingLinear
            found[weight] = module  # type: ignore[assignment, index]
    return found


class Totals:
    """The totals of several layers. They are parts of one tensor: one kernel, not hundreds."""

    def __init__(self, linears: Sequence[SummingLinear]) -> None:
        sizes = [-(-linear.weight.numel() // 64) * 64 for linear in linears]  # aligned
        self.flat = linears[0].weight.new_empty(sum(sizes), dtype=torch.float32)
        self.bytes = self.flat.untyped_storage().nbytes()
        # `data`: autograd must not take a change of one for a change of all.
        self.parts = [
            (linear, own.data[: linear.weight.numel()].view_as(linear.weight))
            for linear, own in zip(linears, self.flat.split(sizes), strict=True)
        ]

    def begin(self) -> None:
        """Give each layer a total of zeros."""
        self.flat.untyped_storage().resize_(self.bytes)
        self.flat.zero_()
        for linear, total in self.parts:
            linear.set_total(total)

    def free(self) -> None:
        """Free the memory until `begin`; the tensors stay, since making them takes milliseconds."""
        for linear, _ in self.parts:
            linear.set_total(None)
        self.flat.untyped_storage().resize_(0)


class _Summing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, total)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, total = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        torch.ops.rather.add_product_(total, rows, x.flatten(0, -2))
        d_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return d_x, None, None


# An operator of its own, so that compiled layers see that it changes `total`. Not a `custom_op`:
# its wrappers take ten times as long as the launch.
_operators = torch.library.Library("rather", "FRAGMENT")
_operators.define("add_product_(Tensor(a!) total, Tensor grad_ND, Tensor x_NE) -> ()")


def _add_product_(total: Tensor, grad_ND: Tensor, x_NE: Tensor) -> None:
    """Add grad^T x to a float32 total."""
    if total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, grad_ND.t(), x_NE, torch.float32, out=total)
    else:
        total.addmm_(grad_ND.t().to(total.dtype), x_NE.to(total.dtype))


_operators.impl("add_product_", _add_product_, "CompositeExplicitAutograd")
torch.library.register_fake("rather::add_product_", lambda *_tensors: None, lib=_operators)
