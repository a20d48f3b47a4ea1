"""Stacked experts on a GPU: rows go to their experts and back in one pass each.

transformers' own function scales, sorts and sums the outputs in three passes, and the gradient of
its gather sorts all rows again. Here gather and sum are each other's gradient, without atomic
additions, so that the bits are always the same. The scores of the router multiply the narrow rows
before the last product instead of the wide ones behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "rather"
REPLACED = "grouped_mm"  # transformers' function that does the same


class Factors(NamedTuple):
    """What an adapter adds to the weights of each expert: scale x b a."""

    a_ERI: Tensor
    b_EOR: Tensor
    scale: float


def use_sorted_experts(causal_lm: Any) -> None:
    """Let the experts of a model run through `sorted_experts` where it can replace grouped_mm."""
    config = causal_lm.config.get_text_config()
    if getattr(config, "_experts_implementation", None) == REPLACED:
        config._experts_implementation = IMPLEMENTATION


def _run(experts: Any, hidden_ND: Tensor, chosen_NK: Tensor, scores_NK: Tensor) -> Tensor:
    """The experts function of transformers' interface."""
    if is_plain(experts) and hidden_ND.is_cuda and hidden_ND.dtype == torch.bfloat16:
        return sorted_experts(experts, hidden_ND, chosen_NK, scores_NK)
    output: Tensor = ALL_EXPERTS_FUNCTIONS[REPLACED](experts, hidden_ND, chosen_NK, scores_NK)
    return output


def is_plain(experts: Any) -> bool:
    """Return whether experts are their products and an activation, and nothing else."""
    return not experts.has_bias and not getattr(experts, "has_post_expert_norm", False)


def sorted_experts(
    experts: Any,
    hidden_ND: Tensor,
    chosen_NK: Tensor,
    scores_NK: Tensor,
    adapter: Mapping[str, Factors] = {},
) -> Tensor:
    """Return for each token the sum of its experts' outputs times their scores.

    `adapter` has factors by the names of the weights that they change.
    """
    expert_S, order_S = chosen_NK.flatten().sort(stable=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    place_NK, token_S = place_S.view(chosen_NK.shape), order_S // chosen_NK.shape[1]
    experts_E = torch.arange(experts.num_experts, device=expert_S.device)
    end_E = torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)

    rows_SD = _ToExperts.apply(hidden_ND, token_S, place_NK)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner_SI = _product(experts, first, rows_SD, end_E, adapter.get(first))
    inner_SI = experts._apply_gate(inner_SI) if experts.has_gate else experts.act_fn(inner_SI)
    inner_SI = (inner_SI * scores_NK.flatten()[order_S, None]).to(rows_SD.dtype)
    result_SD = _product(experts, "down_proj", inner_SI, end_E, adapter.get("down_proj"))
    output: Tensor = _ToTokens.apply(result_SD, token_S, place_NK)
    return output


def _product(
    experts: Any, name: str, rows_S: Tensor, end_E: Tensor, factors: Factors | None
) -> Tensor:
    weight_E = getattr(experts, name)
    weight_E = weight_E if experts.is_transposed else weight_E.transpose(-2, -1)
    product_S = F.grouped_mm(rows_S, weight_E, offs=end_E)
    if factors is None:
        return product_S
    inner_SR = F.grouped_mm(rows_S, factors.a_ERI.transpose(-2, -1), offs=end_E) * factors.scale
    return product_S + F.grouped_mm(inner_SR, factors.b_EOR.transpose(-2, -1), offs=end_E)


class _ToExperts(torch.autograd.Function):
    """A row for each choice of each token, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, token_S: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return hidden_ND.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (place_NK,) = ctx.saved_tensors
        return torch.ops.rather.sum_of_choices(grads[0], place_NK), None, None


class _ToTokens(torch.autograd.Function):
    """The sum over the choices of each token."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, token_S: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(token_S)
        output: Tensor = torch.ops.rather.sum_of_choices(rows_SD, place_NK)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (token_S,) = ctx.saved_tensors
        return grads[0].index_select(0, token_S), None, None


# An operator, so that a compiler does not take the sum apart.
_operators = torch.library.Library("rather", "FRAGMENT")
_operators.define("sum_of_choices(Tensor rows, Tensor place) -> Tensor")


def _sum_on_cpu(rows_SD: Tensor, place_NK: Tensor) -> Tensor:
    return rows_SD[place_NK].sum(1, dtype=torch.float32).to(rows_SD.dtype)


def _sum_on_gpu(rows_SD: Tensor, place_NK: Tensor) -> Tensor:
    from rather.model.kernels import sum_of_choices

    return sum_of_choices(rows_SD, place_NK)


def _fake_sum(rows_SD: Tensor, place_NK: Tensor) -> Tensor:
    return rows_SD.new_empty((place_NK.shape[0], rows_SD.shape[1]))


_operators.impl("sum_of_choices", _sum_on_cpu, "CPU")
_operators.impl("sum_of_choices", _sum_on_gpu, "CUDA")
torch.library.register_fake("rather::sum_of_choices", _fake_sum, lib=_operators)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run)
