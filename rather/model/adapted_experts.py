"""Adapters of stacked experts, under the names of PEFT's `target_parameters`.

PEFT wraps the module of the experts once for each stack, and each forward computes the whole stack
with its change, of all experts. Here the change stays two narrow grouped products.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from rather.errors import ConfigError
from rather.model.experts import Factors, is_plain, sorted_experts

STACKS = ("gate_up_proj", "up_proj", "down_proj")  # in the order in which PEFT wraps them
STACK = re.compile(rf"(?:.+\.)?experts\.(?:{'|'.join(STACKS)})")
ALIGNED = 8  # a grouped product wants rows of a multiple of 16 bytes
_MATRIX = re.compile(r"(.+\.experts)((?:\.base_layer)*)\.lora_.+")


def is_stack(name: str) -> bool:
    """Return whether a name in lora_target means stacks of experts, and not linear layers."""
    return STACK.fullmatch(name) is not None


def changed_stack(name: str, targets: Collection[str]) -> str | None:
    """Return the stack that a matrix of an adapter changes; None if it is not one of experts.

    `targets` are the names in target_parameters. The last stack among them has the outer wrapper.
    """
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    experts, inside = match[1], match[2].count(".base_layer")
    stacks = [f"{experts}.{stack}" for stack in STACKS]
    ends = tuple(f".{target}" for target in targets)
    wrapped = [stack for stack in stacks if f".{stack}".endswith(ends)]
    return wrapped[-1 - inside] if inside < len(wrapped) else f"{experts}.weight"


def factors_of(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the matrices of each expert, [expert, rank, in] and [expert, out, rank].

    PEFT stores the first ones expert by expert, and the second ones rank by rank.
    """
    a_ERI = a.view(experts, -1, a.shape[1])
    b_EOR = b.view(len(b), -1, experts).permute(2, 0, 1)
    return a_ERI, b_EOR


def first_factors(shape: tuple[int, ...], config: LoraConfig, adapter: str) -> dict[str, Tensor]:
    """Return PEFT's own start of the adapter of a stack of this shape."""
    experts = nn.Module()
    stack = torch.empty(1).expand(shape)  # its values do not matter
    experts.register_parameter("stack", nn.Parameter(stack, requires_grad=False))
    wrapper: Any = ParamWrapper(
        experts, adapter, "stack", config, r=config.r, lora_alpha=config.lora_alpha
    )
    return {kind: getattr(wrapper, kind)[adapter].weight.detach() for kind in ("lora_A", "lora_B")}


class Factor(nn.Linear):
    """The matrices of all experts. It is not called, so it cannot sum its own gradient."""


class AdaptedExperts(ParamWrapper):
    """PEFT's wrapper of one stack. The outer one runs the experts with the factors of all."""

    def forward(self, x: Tensor, *args: Any, **_kwargs: Any) -> Tensor:
        factors: dict[str, Factors] = {}
        wrapper: Any = self
        while isinstance(wrapper, AdaptedExperts):
            if not wrapper._disable_adapters:
                factors[wrapper.parameter_name] = wrapper.factors()
            wrapper = wrapper.base_layer
        chosen_NK, scores_NK = args
        return sorted_experts(wrapper, x, chosen_NK, scores_NK, factors)

    def factors(self) -> Factors:
        """Return the factors of the active adapter, in the dtype of the stack."""
        (name,) = self.active_adapters
        dtype = self.get_param().dtype
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        a_ERI, b_EOR = factors_of(a.weight.to(dtype), b.weight.to(dtype), self.num_experts)
        missing = -a_ERI.shape[1] % ALIGNED
        if missing:
            a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, missing)), F.pad(b_EOR, (0, missing))
        return Factors(a_ERI, _Contiguous.apply(b_EOR), self.scaling[name])

    @classmethod
    def replace(cls, model: nn.Module) -> None:
        """Use this class for PEFT's wrappers of stacks in a model; refuse other experts."""
        for name, module in list(model.named_modules()):
            if not isinstance(module, ParamWrapper):
                continue
            experts: Any = module.get_base_layer()
            if not (
                hasattr(experts, "has_gate") and is_plain(experts) and not experts.is_transposed
            ):
                raise ConfigError(
                    f"lora_target: {name}: experts with biases, norms or transposed weights cannot "
                    "have adapters; name layers of attention"
                )
            module.__class__ = cls
            for matrices in (module.lora_A, module.lora_B):
                for matrix in matrices.values():
                    matrix.__class__ = Factor


class _Contiguous(torch.autograd.Function):
    """Copies a tensor as a grouped product wants it; a compiler would leave a plain copy out."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        copied: Tensor = torch.ops.rather.contiguous_copy(tensor)
        return copied

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


_operators = torch.library.Library("rather", "FRAGMENT")
_operators.define("contiguous_copy(Tensor tensor) -> Tensor")
_operators.impl("contiguous_copy", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("rather::contiguous_copy", _copy, lib=_operators)
