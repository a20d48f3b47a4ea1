"""Linear layers with LoRA adapters that need fewer kernels than PEFT's, for CUDA.

Computed separately, what an adapter adds to a wide tensor takes a third of the time of the layer's
own product. Here it is part of that product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rather.model.adapters import TRAINED, LoraLinear, tuned_layers
from rather.optim.summing import GroupMember, Projections, SharedInput, SummingLinear, groups_of


class AdaptedLinear(GroupMember, LoraLinear):
    """PEFT's layer without the checks that a compiler would repeat for every layer.

    The scale multiplies the narrow tensor between the two matrices: its gradient is narrow as well.
    """

    joins: bool = False  # whether the adapter is part of the layer's own product

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        base: Any = self.base_layer
        y: Tensor
        if self._disable_adapters:
            y = base(x)
            return y
        if not self.joins:
            a, b, scale = self.active
            y = base(x) + b(a(x) * scale)
            return y
        group = self.group
        if isinstance(group, AdaptedProjections) and group.is_training() and not group.apart:
            y = group.result(x, self)
        else:
            y = self.product(x)
        return y if base.bias is None else y + base.bias

    @property
    def active(self) -> tuple[Any, Any, float]:
        """The two matrices of the active adapter, and its scale."""
        (name,) = self.active_adapters
        return self.lora_A[name], self.lora_B[name], self.scaling[name]

    def product(self, x: Tensor) -> Tensor:
        base: Any = self.base_layer
        a, b, scale = self.active
        totals = getattr(a, "total", None), getattr(b, "total", None)
        y: Tensor = _Joined.apply(x, scale, a.weight, totals[0], base.weight, b.weight, totals[1])
        return y

    @classmethod
    def replace(cls, model: Any, *, joins: bool = False) -> None:
        """Use this class for the plain LoRA layers of a model in one dtype, without dropout.

        `joins`: weights are not sharded, so an adapter can be part of its layer's product.
        """
        rank = model.peft_config[TRAINED].r
        for layer in tuned_layers(model).values():
            dtypes = {parameter.dtype for parameter in layer.parameters()}
            is_plain = type(layer) is LoraLinear and not layer.lora_variant
            if is_plain and len(dtypes) == 1:
                layer.__class__ = cls
                # Other ranks would leave the rows of a product unaligned.
                layer.joins = joins and type(layer.base_layer) is nn.Linear and rank % 8 == 0


class AdaptedProjections(SharedInput):
    """Adapted layers of one input."""

    def __init__(self, layers: Sequence[AdaptedLinear]) -> None:
        super().__init__(layers)
        inner: list[Any] = [layer.lora_A[TRAINED] for layer in layers]
        self.inner = Projections(inner)

    def is_training(self) -> bool:
        return self.inner.total is not None and torch.is_grad_enabled()

    def product(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        weights_and_b = [(layer.base_layer.weight, layer.active[1]) for layer in layers]
        flat = [tensor for w, b in weights_and_b for tensor in (w, b.weight, b.total)]
        scale = layers[0].active[2]
        y: Tensor = _Joined.apply(x, scale, self.inner.weight, self.inner.total, *flat)
        return y


def group_adapted(modules: Iterable[nn.Module]) -> None:
    """Group the layers of one input whose adapters sum their gradients."""
    for layers in groups_of(modules, AdaptedLinear):
        inner = [layer.lora_A[TRAINED] for layer in layers]
        if all(layer.joins for layer in layers) and {*map(type, inner)} == {SummingLinear}:
            AdaptedProjections(layers)


class _Joined(torch.autograd.Function):
    """Linear layers of one input with their adapters.

    What an adapter adds to the wider side, the output or the gradient of the input, is part of the
    same product, as further columns of both factors.

    `a` has the first matrices of all adapters. The parts of each layer are its weight, the second
    matrix of its adapter, and the sum of that matrix's gradients or None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, a: Tensor, total: Any, *parts: Any) -> Tensor:
        ctx.scale, ws, bs = scale, parts[::3], parts[1::3]
        inner = F.linear(x, a) * scale
        ctx.save_for_backward(x, inner, a, total, *parts)
        if sum(map(len, ws)) > x.shape[-1]:
            return F.linear(torch.cat([x, inner], -1), _with_columns(ws, bs))
        return F.linear(x, _stacked(ws)) + F.linear(inner, _diagonal(bs))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, inner, a, total, *per_layer = ctx.saved_tensors
        ws, bs, totals = per_layer[::3], per_layer[1::3], per_layer[2::3]
        rows, x_rows, inner = grads[0].flatten(0, -2), x.flatten(0, -2), inner.flatten(0, -2)
        sizes, ranks = [len(w) for w in ws], [b.shape[1] for b in bs]
        if sum(sizes) > x.shape[-1]:
            d_x, d_inner = (rows @ _with_columns(ws, bs)).split([x.shape[-1], len(a)], -1)
            d_inner = d_inner * ctx.scale
            d_x = d_x + d_inner @ a
        else:
            d_inner = (rows @ _diagonal(bs)) * ctx.scale
            d_x = torch.cat([rows, d_inner], -1) @ torch.cat([*ws, a])
        d_a = _weight_gradient(total, d_inner, x_rows)
        of_layers = zip(totals, rows.split(sizes, -1), inner.split(ranks, -1), strict=True)
        d_parts = [
            grad for tensors in of_layers for grad in (None, _weight_gradient(*tensors), None)
        ]
        return d_x.view(x.shape), None, d_a, None, *d_parts


def _with_columns(ws: Sequence[Tensor], bs: Sequence[Tensor]) -> Tensor:
    """Return each weight followed by the columns of its adapter: [w1 b1 0; w2 0 b2]."""
    return torch.cat([_stacked(ws), _diagonal(bs)], 1)


def _stacked(ws: Sequence[Tensor]) -> Tensor:
    return torch.cat([*ws]) if len(ws) > 1 else ws[0]  # one weight is not copied


def _diagonal(bs: Sequence[Tensor]) -> Tensor:
    return torch.block_diag(*bs) if len(bs) > 1 else bs[0]


def _weight_gradient(total: Tensor | None, grad_ND: Tensor, x_NE: Tensor) -> Tensor | None:
    """Return the gradient of a weight, or add it to its total and return None."""
    if total is None:
        return grad_ND.t() @ x_NE
    torch.ops.rather.add_product_(total, grad_ND, x_NE)
    return None
