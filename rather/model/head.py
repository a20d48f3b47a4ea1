"""Hidden rows -> log-probs of their target tokens, without holding the logits longer than needed.

Only rows that predict a scored token come here. Forward keeps the logits when they fit the budget and turns them
into their own gradient in place (3 matrix products); past the budget it keeps one number per row and computes the
logits again, chunk by chunk (4 products). Log-sum-exp and sums are in float32 (float64 stays float64).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # logits worked on at a time
KEEP_BYTES = 2 << 30  # logits kept from forward to backward


def token_logps(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor]:
    """log p(target | hidden) per row in float32 and, with `squares`, log sum of p^2 over the vocabulary, else nothing.

    `scale` and `softcap` are the family's own treatment of logits.
    """
    keep = torch.is_grad_enabled() and 0 < hidden_TD.shape[0] * _row_bytes(weight_VD) <= keep_bytes
    logps, squared = _TokenLogps.apply(hidden_TD, weight_VD, bias_V, targets_T, scale, softcap, squares, keep)
    return logps, squared


class _TokenLogps(torch.autograd.Function):
    """Kept logits become their gradient in place; a second backward would compute them again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        squares: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logps = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        lse = torch.empty_like(logps)
        squared = torch.empty_like(logps) if squares else logps.new_empty(0)
        kept: list[Tensor] = []
        for rows in _chunks(len(hidden), weight):
            logits = _logits(hidden[rows], weight, bias, scale, softcap)
            lse[rows] = torch.logsumexp(logits.to(exact), dim=-1)
            logps[rows] = logits.gather(1, targets[rows, None])[:, 0].to(exact) - lse[rows]
            if squares:
                squared[rows] = torch.logsumexp(2 * logits.to(exact), dim=-1) - 2 * lse[rows]
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.kept, ctx.scale, ctx.softcap = kept, scale, softcap
        ctx.mark_non_differentiable(squared)
        return logps, squared

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = grads
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        # In at least float32: chunks added up in bfloat16 would each be rounded to the size of the sum.
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None else None
        kept: list[Tensor] = ctx.kept[::-1]
        ctx.kept = []
        for rows in _chunks(len(hidden), weight):
            logits = kept.pop() if kept else _logits(hidden[rows], weight, bias, ctx.scale, ctx.softcap)
            d_logits = _logits_gradient(logits, lse[rows], targets[rows], grad[rows], ctx.scale, ctx.softcap)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None and d_weight.dtype == weight.dtype:
                d_weight.addmm_(d_logits.t(), hidden[rows])
            elif d_weight is not None:
                d_weight += torch.mm(d_logits.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    logits = torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def _logits_gradient(
    logits: Tensor, lse: Tensor, targets: Tensor, grad: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Turns logits into d loss / d (hidden @ weight) in place: grad * (one-hot - softmax), then the chain back."""
    slope = None if softcap is None else 1 - (logits / softcap) ** 2  # tanh' at the capped logit
    wide = logits.to(lse.dtype)  # the same memory when logits are already wide
    d_logits = wide.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    d_logits.scatter_add_(1, targets[:, None], grad[:, None])
    if slope is not None:
        d_logits.mul_(slope)
    if scale != 1.0:
        d_logits.mul_(scale)
    return logits.copy_(d_logits)


def _chunks(rows: int, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // _row_bytes(weight))
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _row_bytes(weight: Tensor) -> int:
    return weight.shape[0] * weight.element_size()


