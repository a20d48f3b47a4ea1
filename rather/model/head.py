"""Hidden rows -> log-probs of their target tokens, keeping the logits no longer than needed.

Only rows that predict a scored token come here. Forward keeps the logits if they fit the budget,
and backward turns them into their own gradient in place (3 matrix products). Over the budget,
forward keeps two numbers per row and backward recomputes the logits in chunks (4 products).
Log-sum-exp and sums are in float32 (float64 stays float64). On CUDA two Triton kernels read the
logits once each; elsewhere torch does the same.

If ranks divide the vocabulary, each does this with its own words, and they exchange three numbers
per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rather.model.collectives import Group, gather_ranks

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # logits that are in work at a time
KEEP_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}  # default budget of logits kept for backward


def token_logps(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    keep_bytes: int | None = None,
    words: Words | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target | hidden) per row in float32 and, with `squares`, log sum p^2, else an
    empty tensor.

    `scale` and `softcap` are the family's own treatment of logits. With `words`, weight and bias
    hold only these, while hidden rows, targets and results are the same on all ranks. Then the
    gradient of the hidden rows is this rank's term of a sum over ranks, which the caller has to
    form (`enter`, `gather`).
    """
    budget = KEEP_BYTES[hidden_TD.device.type] if keep_bytes is None else keep_bytes
    keep = torch.is_grad_enabled() and 0 < hidden_TD.shape[0] * _row_bytes(weight_VD) <= budget
    logps, squared = _TokenLogps.apply(
        hidden_TD, weight_VD, bias_V, targets_T, _Treatment(scale, softcap), squares, keep, words
    )
    return logps, squared


class Words(NamedTuple):
    """This rank's part of the vocabulary: its first word, and the group that holds all of it."""

    first: int
    group: Group


class _Treatment(NamedTuple):
    """What a family does with hidden @ weight before the softmax."""

    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = (
            torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
        )
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class _TokenLogps(torch.autograd.Function):
    """Kept logits become their gradient in place; a second backward recomputes them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        treatment: _Treatment,
        squares: bool,
        keep: bool,
        words: Words | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logps = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        lse, largest = torch.empty_like(logps), torch.empty_like(logps)
        squared = torch.empty_like(logps) if squares else logps.new_empty(0)
        if words:
            targets = targets - words.first
            outside = (targets < 0) | (targets >= len(weight))
            targets = targets.masked_fill(outside, 0)
        rows_of = _chunks(len(hidden), weight, whole=keep and hidden.is_cuda)
        kept: list[Tensor] = []
        for rows in rows_of:
            logits = treatment.logits(hidden[rows], weight, bias)
            if _fused(logits, treatment):
                from rather.model.kernels import row_statistics

                row_statistics(
                    logits,
                    targets[rows],
                    logps[rows],
                    lse[rows],
                    squared[rows] if squares else None,
                )
            else:
                logits = _statistics(
                    logits, targets[rows], logps[rows], lse[rows], largest[rows], treatment
                )
                if squares:
                    squared[rows] = _log_sum_of_squares(logits, lse[rows], largest[rows], treatment)
            if keep:
                kept.append(logits)
        if words:
            _combine(logps, lse, squared, outside, words.group)
        ctx.save_for_backward(
            hidden, weight, bias, targets, lse, largest, outside if words else None
        )
        ctx.kept, ctx.treatment = kept, treatment
        ctx.mark_non_differentiable(squared)
        return logps, squared

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = grads
        hidden, weight, bias, targets, lse, largest, outside = ctx.saved_tensors
        at_target = grad if outside is None else grad.masked_fill(outside, 0)
        treatment: _Treatment = ctx.treatment
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None else None
        kept: list[Tensor] = ctx.kept[::-1]
        ctx.kept = []
        rows_of = _chunks(len(hidden), weight, whole=bool(kept) and hidden.is_cuda)
        for rows in rows_of:
            was_kept = bool(kept)
            logits = kept.pop() if was_kept else treatment.logits(hidden[rows], weight, bias)
            if _fused(logits, treatment):
                from rather.model.kernels import logits_gradient_

                hits = (
                    targets[rows]
                    if outside is None
                    else targets[rows].masked_fill(outside[rows], -1)
                )
                d_logits = logits_gradient_(logits, lse[rows], hits, grad[rows], treatment.scale)
            else:
                if not was_kept and _keeps_exponentials(logits, treatment):
                    _exponentiate_(logits, largest[rows])
                numbers = (lse[rows], largest[rows], targets[rows], grad[rows], at_target[rows])
                d_logits = _gradient(logits, *numbers, treatment)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if ctx.needs_input_grad[1]:
                d_weight = _add_weight_gradient(
                    d_weight, d_logits, hidden[rows], lse.dtype, whole=rows == slice(0, len(hidden))
                )
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        if ctx.needs_input_grad[1] and d_weight is None:  # no rows at all
            d_weight = torch.zeros_like(weight)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _add_weight_gradient(
    d_weight: Tensor | None, d_logits: Tensor, hidden: Tensor, wide: torch.dtype, *, whole: bool
) -> Tensor:
    """Return d_weight + d_logits^T hidden, summed in at least float32.

    A sum of chunks in bfloat16 would round each chunk to the precision of the sum.
    """
    if d_weight is None and (whole or hidden.dtype == wide):
        return torch.mm(d_logits.t(), hidden)
    if d_weight is None:
        return torch.mm(d_logits.t(), hidden).to(wide)
    if hidden.dtype == wide:
        return d_weight.addmm_(d_logits.t(), hidden)
    return d_weight.add_(torch.mm(d_logits.t(), hidden))


# --- a vocabulary divided among ranks ---


def _combine(logps: Tensor, lse: Tensor, squared: Tensor, outside: Tensor, group: Group) -> None:
    """Combine each row's numbers over this rank's words to those over the vocabulary, in place."""
    own = [logps.masked_fill(outside, float("-inf")), lse, *([squared] if len(squared) else [])]
    ranks_3T = gather_ranks(torch.stack(own), group)
    torch.logsumexp(ranks_3T[:, 1], dim=0, out=lse)
    share = ranks_3T[:, 1] - lse  # of each rank's words in the probability, as a logarithm
    torch.amax(ranks_3T[:, 0] + share, dim=0, out=logps)
    if len(squared):
        torch.logsumexp(ranks_3T[:, 2] + 2 * share, dim=0, out=squared)


def _fused(logits: Tensor, treatment: _Treatment) -> bool:
    return logits.is_cuda and treatment.softcap is None and logits.dtype != torch.float64


# --- the same in torch ---


def _keeps_exponentials(logits: Tensor, treatment: _Treatment) -> bool:
    """Return whether exponentials may replace the logits: exp is slow on a CPU.

    The slope of a soft-cap needs the logits.
    """
    return treatment.softcap is None and logits.dtype in (torch.float32, torch.float64)


def _exponentiate_(logits: Tensor, largest: Tensor) -> Tensor:
    return logits.sub_(largest[:, None]).exp_()


def _statistics(
    logits: Tensor,
    targets: Tensor,
    logps: Tensor,
    lse: Tensor,
    largest: Tensor,
    treatment: _Treatment,
) -> Tensor:
    """Fill in the numbers of each row; return the logits, or their exponentials if possible."""
    at_target = logits.gather(1, targets[:, None])[:, 0].to(lse.dtype)
    largest.copy_(logits.amax(dim=-1))
    if _keeps_exponentials(logits, treatment):
        lse.copy_(_exponentiate_(logits, largest).sum(dim=-1).log_().add_(largest))
    else:
        lse.copy_(torch.logsumexp(logits.to(lse.dtype), dim=-1))
    torch.sub(at_target, lse, out=logps)
    return logits


def _log_sum_of_squares(
    logits: Tensor, lse: Tensor, largest: Tensor, treatment: _Treatment
) -> Tensor:
    if _keeps_exponentials(logits, treatment):
        return logits.square().sum(dim=-1).log_() + 2 * (largest - lse)
    return torch.logsumexp(2 * logits.to(lse.dtype), dim=-1) - 2 * lse


def _gradient(
    logits: Tensor,
    lse: Tensor,
    largest: Tensor,
    targets: Tensor,
    grad: Tensor,
    at_target: Tensor,
    treatment: _Treatment,
) -> Tensor:
    """Turn logits (or their exponentials) into d loss / d (hidden @ weight) in place.

    That is grad * (one-hot - softmax), then the chain rule through soft-cap and scale. `at_target`
    is grad, or 0 if another rank holds the target.
    """
    slope = None
    if _keeps_exponentials(logits, treatment):
        d_logits = logits.mul_((-grad * (largest - lse).exp())[:, None])
    else:
        if treatment.softcap is not None:
            slope = 1 - (logits / treatment.softcap) ** 2  # tanh' at the capped logit
        d_logits = logits.to(lse.dtype).sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    d_logits.scatter_add_(1, targets[:, None], at_target[:, None])
    if slope is not None:
        d_logits.mul_(slope)
    if treatment.scale != 1.0:
        d_logits.mul_(treatment.scale)
    return d_logits.to(logits.dtype)


def _chunks(rows: int, weight: Tensor, *, whole: bool) -> Iterator[slice]:
    """Return the chunks of rows; on CUDA, logits that are kept anyway are one product."""
    size = rows if whole else CHUNK_BYTES[weight.device.type] // _row_bytes(weight)
    return (slice(first, min(first + size, rows)) for first in range(0, rows, max(1, size)))


def _row_bytes(weight: Tensor) -> int:
    return weight.shape[0] * weight.element_size()
