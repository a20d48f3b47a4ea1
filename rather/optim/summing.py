"""Linear layers that need fewer kernels, for CUDA.

Each adds its weight gradient into a float32 sum within the matrix product. Otherwise autograd
writes it in bfloat16, and another kernel reads it again to add it up: at 7B this is a tenth of a
step. No other device multiplies bfloat16 into float32 in place.

Query, key and value are projections of one input: one product computes all three.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rather.arithmetic import round_up

Layer = TypeVar("Layer", bound=nn.Module)

# Names in transformers. Joining gate_proj and up_proj gains nothing: their products are large
# enough, and a compiler concatenates their gradients in a slow kernel.
GROUPS = (("q_proj", "k_proj", "v_proj"),)


class GroupMember(nn.Module):
    """A layer that may share its input with others."""

    group: SharedInput | None = None
    place: int = 0  # in the group

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.group = None  # a move gives each layer a tensor of its own
        return super()._apply(*args, **kwargs)


class SummingLinear(GroupMember, nn.Linear):
    """A linear layer whose weight gradient goes into `total` while that is set."""

    total: Tensor | None = None

    def set_total(self, total: Tensor | None) -> None:
        object.__setattr__(self, "total", total)  # nn.Module's own takes longer than a launch

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.total is None:
            return super().forward(x)
        group = self.group
        y = group.result(x, self) if group and not group.apart else self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.total)


class SharedInput:
    """Layers of one input. The first call computes the results of all layers."""

    apart = False  # True: each layer computes its own result

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.biased = any(layer.bias is not None for layer in layers)
        self.x: Tensor | None = None  # the input, until the last layer has its result
        self.results: Sequence[Tensor] = ()
        for index, layer in enumerate(layers):
            layer.group, layer.place = self, index

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the layers has no group

    def product(self, x: Tensor) -> Tensor:
        """Return the results of all layers as columns of one tensor, without biases."""
        raise NotImplementedError

    def split(self, y: Tensor) -> Sequence[Tensor]:
        # Without biases, a compiler computes and concatenates the gradients in one slow kernel.
        return y.split(self.sizes, dim=-1) if self.biased else _Split.apply(y, self.sizes)

    def result(self, x: Tensor, layer: Any) -> Tensor:
        """Return the result of one layer, without its bias."""
        if layer.place == 0:
            self.x, self.results = x, self.split(self.product(x))
        elif self.x is not x:
            alone: Tensor = layer.product(x)
            return alone
        output = self.results[layer.place]
        if layer is self.layers[-1]:
            self.x, self.results = None, ()
        return output


class Projections(SharedInput):
    """Linear layers of one input. Their weights become rows of one tensor."""

    weight: Tensor
    total: Tensor | None = None

    def __init__(self, layers: Sequence[SummingLinear]) -> None:
        super().__init__(layers)
        self.weight = torch.cat([layer.weight.data for layer in layers])
        for layer, rows in zip(layers, self.parts(self.weight), strict=True):
            layer.weight.data = rows

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the rows of each layer in a tensor of the shape of `weight`."""
        return whole.split(self.sizes)

    def set_total(self, total: Tensor | None) -> None:
        self.total = total

    def product(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.total)


def summing(
    modules: Iterable[nn.Module], weights: Collection[nn.Parameter]
) -> dict[nn.Parameter, SummingLinear]:
    """Turn the plain linear layers with these weights into summing ones; return them by weight.

    Layers that share a weight stay plain: a weight can be part of one group only.
    """
    linears: dict[nn.Parameter, set[nn.Linear]] = {}
    for module in modules:
        if type(module) is nn.Linear and module.weight in weights:
            linears.setdefault(module.weight, set()).add(module)  # type: ignore[arg-type]
    summing_by_weight: dict[nn.Parameter, SummingLinear] = {}
    for weight, (linear, *sharing) in linears.items():
        if not sharing:
            linear.__class__ = SummingLinear
            summing_by_weight[weight] = linear  # type: ignore[assignment]
    return summing_by_weight


def group_projections(modules: Iterable[nn.Module]) -> None:
    """Group the summing layers of one input. Their weights must not be sharded or replaced."""
    for linears in groups_of(modules, SummingLinear):
        Projections(linears)


def groups_of(modules: Iterable[nn.Module], kind: type[Layer]) -> Iterator[list[Layer]]:
    """Yield the layers that share an input, if all of them are of this kind."""
    for module, names in product(modules, GROUPS):
        layers = [getattr(module, name, None) for name in names]
        if all(type(layer) is kind for layer in layers):
            yield layers  # type: ignore[misc]


def ungroup_projections(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, GroupMember):
            module.group = None


class Totals:
    """The totals of several layers. They are parts of one tensor: one kernel, not hundreds.

    `flat` is that tensor, of `size_of` the layers; without it they get one of their own.
    """

    def __init__(self, linears: Sequence[SummingLinear], flat: Tensor | None = None) -> None:
        units = _units(linears)
        sizes = [_aligned_size(unit) for unit in units]
        if flat is None:
            flat = linears[0].weight.new_empty(sum(sizes), dtype=torch.float32)
        self.flat = flat
        self.bytes = self.flat.untyped_storage().nbytes()
        self.parts: list[tuple[SummingLinear | Projections, Tensor]] = []
        for unit, span in zip(units, self.flat.split(sizes), strict=True):
            # `data`: autograd must not take a change of one for a change of all.
            total = span.data[: unit.weight.numel()].view_as(unit.weight)
            self.parts.append((unit, total))
            if isinstance(unit, Projections):
                views = [view.data for view in unit.parts(total)]
                self.parts += zip(unit.layers, views, strict=True)

    def begin(self) -> None:
        """Give each layer a total of zeros."""
        self.flat.untyped_storage().resize_(self.bytes)
        self.flat.zero_()
        self.give()

    def free(self) -> None:
        """Free the memory until `begin`; the tensors stay, since making them takes milliseconds."""
        self.take()
        self.flat.untyped_storage().resize_(0)

    def give(self) -> None:
        """Let each layer add to its total, whatever is in it."""
        for unit, total in self.parts:
            unit.set_total(total)

    def take(self) -> None:
        for unit, _ in self.parts:
            unit.set_total(None)

    @staticmethod
    def size_of(linears: Sequence[SummingLinear]) -> int:
        return sum(map(_aligned_size, _units(linears)))


def _units(linears: Sequence[SummingLinear]) -> list[SummingLinear | Projections]:
    """Return the layers; those of one input as the group that multiplies for them."""
    groups = {linear: linear.group for linear in linears if isinstance(linear.group, Projections)}
    return list(dict.fromkeys(groups.get(linear, linear) for linear in linears))


def _aligned_size(unit: SummingLinear | Projections) -> int:
    return round_up(unit.weight.numel(), 64)


def _product(x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    if total is None or not torch.is_grad_enabled():
        return F.linear(x, weight)
    y: Tensor = _Summing.apply(x, weight, total)
    return y


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


class _Split(torch.autograd.Function):
    """Splits columns. In backward, one kernel concatenates the gradients."""

    @staticmethod
    def forward(_ctx: Any, y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return y.split(sizes, dim=-1)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return torch.ops.rather.concatenate_columns(grads), None


# Operators of our own, so that compiled layers see that `total` changes. Not a `custom_op`: its
# wrappers take ten times as long as the launch.
_operators = torch.library.Library("rather", "FRAGMENT")
_operators.define("add_product_(Tensor(a!) total, Tensor grad_ND, Tensor x_NE) -> ()")
_operators.define("concatenate_columns(Tensor[] parts) -> Tensor")


def _add_product_(total: Tensor, grad_ND: Tensor, x_NE: Tensor) -> None:
    """Add grad^T x to a float32 total."""
    # `data`: a layer that is called twice saves its total twice. No backward pass reads the
    # numbers, so autograd must not refuse the second one because the first has changed them.
    total = total.data
    if total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, grad_ND.t(), x_NE, torch.float32, out=total)
    else:
        total.addmm_(grad_ND.t().to(total.dtype), x_NE.to(total.dtype))


_operators.impl("add_product_", _add_product_, "CompositeExplicitAutograd")
torch.library.register_fake("rather::add_product_", lambda *_tensors: None, lib=_operators)
_operators.impl(
    "concatenate_columns", lambda parts: torch.cat(parts, -1), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "rather::concatenate_columns", lambda parts: torch.cat(parts, -1), lib=_operators
)
