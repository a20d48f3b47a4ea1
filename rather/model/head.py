"""Hidden rows -> log-probs of their target tokens, keeping the logits no longer than needed.

Only rows that predict a scored token come here. Forward keeps the logits if they fit the budget,
and backward turns them into their own gradient in place (3 matrix products). Over the budget,
forward keeps two numbers per row and backward recomputes the logits in chunks (4 products).
Log-sum-exp and sums are in float32 (float64 stays float64). On CUDA two Triton kernels read the
logits once each; elsewhere torch does the same.

If ranks divide the vocabulary, each does this for its part, and they exchange three numbers a row.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rather.model.collectives import Group, gather_ranks

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # logits that are in work at a time
KEEP_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}  # budget of logits kept for backward


class Words(NamedTuple):
    """This rank's part of the vocabulary: its first word, and the group that holds all of it."""

    first: int
    group: Group


def token_logps(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    words: Words | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target | hidden) per row in float32, and log sum p^2 if `squares`, else nothing.

    `scale` and `softcap` are the family's own treatment of logits. With `words`, weight and bias
    hold only these, while hidden rows, targets and results are the same on all ranks. Then the
    gradient of the hidden rows is this rank's term of a sum over ranks, which the caller has to
    form (`enter`, `gather`). `statistics` [3, rows] is filled with each row's entropy, its mean
    logit, and 1 if the target has the largest logit; not with `words`.
    """
    size, budget = len(hidden_TD) * _row_bytes(weight_VD), KEEP_BYTES[hidden_TD.device.type]
    keep = torch.is_grad_enabled() and 0 < size <= budget
    treatment = _Treatment(scale, softcap)
    return _TokenLogps.apply(
        hidden_TD, weight_VD, bias_V, targets_T, treatment, squares, keep, words, statistics
    )


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
        statistics: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows_of_numbers = 4 if squares else 3  # log-prob, log-sum-exp, largest logit, log sum p^2
        numbers = torch.empty(rows_of_numbers, len(hidden), dtype=exact, device=hidden.device)
        if words:  # -1 for the words of other ranks
            targets = targets - words.first
            targets = targets.masked_fill((targets < 0) | (targets >= len(weight)), -1)
        ctx.kept, ctx.treatment = [], treatment
        for rows in _chunks(len(hidden), weight, whole=keep and hidden.is_cuda):
            logits = treatment.logits(hidden[rows], weight, bias)
            if statistics is not None:  # before the logits become exponentials
                _fill_statistics(statistics[:, rows], logits, targets[rows])
            treatment.fill_numbers(numbers[:, rows], logits, targets[rows].clamp(min=0))
            if keep:
                ctx.kept.append(logits)
        if words:
            _combine(numbers, targets < 0, words.group)
        ctx.save_for_backward(hidden, weight, bias, targets, numbers)
        squared = numbers[3].clone() if squares else numbers.new_empty(0)
        ctx.mark_non_differentiable(squared)
        return numbers[0].clone(), squared

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = grads
        hidden, weight, bias, targets, numbers = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=numbers.dtype) if bias is not None else None
        kept_logits: list[Tensor] = ctx.kept[::-1]
        ctx.kept = []
        for rows in _chunks(len(hidden), weight, whole=bool(kept_logits) and hidden.is_cuda):
            of_rows = (numbers[:, rows], targets[rows], grad[rows])
            if kept_logits:
                d_logits = ctx.treatment.gradient_(kept_logits.pop(), *of_rows, kept=True)
            else:
                logits = ctx.treatment.logits(hidden[rows], weight, bias)
                d_logits = ctx.treatment.gradient_(logits, *of_rows, kept=False)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if ctx.needs_input_grad[1]:
                is_all = len(d_logits) == len(hidden)
                d_weight = _add_weight_gradient(
                    d_weight, d_logits, hidden[rows], numbers.dtype, whole=is_all
                )
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        if ctx.needs_input_grad[1] and d_weight is None:  # no rows at all
            d_weight = torch.zeros_like(weight)
        return d_hidden, d_weight, d_bias, *[None] * 6


class _Treatment(NamedTuple):
    """What a family does with hidden @ weight before the softmax, and the arithmetic after it.

    On a CPU exponentials replace the logits where possible, because exp is slow there; the slope of
    a soft-cap needs the logits.
    """

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

    def _is_fused(self, logits: Tensor) -> bool:
        return logits.is_cuda and self.softcap is None and logits.dtype != torch.float64

    def _uses_exponentials(self, logits: Tensor) -> bool:
        return self.softcap is None and logits.dtype in (torch.float32, torch.float64)

    def fill_numbers(self, numbers: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Fill in the numbers of each row. The logits may become their exponentials."""
        logps, lse, largest, *squared = numbers
        if self._is_fused(logits):
            from rather.model.kernels import row_statistics

            row_statistics(logits, targets, logps, lse, *squared)
            return
        at_target = logits.gather(1, targets[:, None])[:, 0].to(lse.dtype)
        largest.copy_(logits.amax(dim=-1))
        if self._uses_exponentials(logits):
            logits.sub_(largest[:, None]).exp_()
            lse.copy_(logits.sum(dim=-1).log_().add_(largest))
            if squared:
                squared[0].copy_(logits.square().sum(dim=-1).log_() + 2 * (largest - lse))
        else:
            lse.copy_(torch.logsumexp(logits.to(lse.dtype), dim=-1))
            if squared:
                squared[0].copy_(torch.logsumexp(2 * logits.to(lse.dtype), dim=-1) - 2 * lse)
        torch.sub(at_target, lse, out=logps)

    def gradient_(
        self, logits: Tensor, numbers: Tensor, targets: Tensor, grad: Tensor, *, kept: bool
    ) -> Tensor:
        """Turn logits, perhaps `kept` as exponentials, into d loss / d (hidden @ weight) in place.

        That is grad * (one-hot - softmax), then the chain rule through soft-cap and scale.
        """
        _, lse, largest, *_ = numbers
        if self._is_fused(logits):
            from rather.model.kernels import logits_gradient_

            return logits_gradient_(logits, lse, targets, grad, self.scale)
        slope = None
        if self._uses_exponentials(logits):
            if not kept:
                logits.sub_(largest[:, None]).exp_()
            d_logits = logits.mul_((-grad * (largest - lse).exp())[:, None])
        else:
            if self.softcap is not None:
                slope = 1 - (logits / self.softcap) ** 2  # tanh' at the capped logit
            d_logits = logits.to(lse.dtype).sub_(lse[:, None]).exp_().mul_(-grad[:, None])
        at_target = grad.masked_fill(targets < 0, 0)
        d_logits.scatter_add_(1, targets.clamp(min=0)[:, None], at_target[:, None])
        if slope is not None:
            d_logits.mul_(slope)
        if self.scale != 1.0:
            d_logits.mul_(self.scale)
        return d_logits.to(logits.dtype)


def _fill_statistics(statistics: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Fill in entropy, mean logit, and whether the target is the most likely word.

    A CPU takes fewer rows at a time, because memory of 64 MiB is new to it each time.
    """
    size = max(1, CHUNK_BYTES["cpu"] // logits.shape[1] // (4 if logits.is_cuda else 16))
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        part = logits[rows].float()
        largest, likeliest = part.max(dim=-1)
        difference = part - largest[:, None]
        exponentials = difference.exp()
        total = exponentials.sum(dim=-1)
        statistics[0, rows] = total.log() - torch.linalg.vecdot(exponentials, difference) / total
        statistics[1, rows] = part.mean(dim=-1)
        statistics[2, rows] = (likeliest == targets[rows]).float()


def _add_weight_gradient(
    d_weight: Tensor | None, d_logits: Tensor, hidden: Tensor, wide: torch.dtype, *, whole: bool
) -> Tensor:
    """Return d_weight + d_logits^T hidden, summed in at least float32.

    A sum of chunks in bfloat16 would round each chunk to the precision of the sum.
    """
    if d_weight is not None and hidden.dtype == wide:
        return d_weight.addmm_(d_logits.t(), hidden)
    product = torch.mm(d_logits.t(), hidden)
    if d_weight is not None:
        return d_weight.add_(product)
    return product if whole else product.to(wide)


def _combine(numbers: Tensor, outside: Tensor, group: Group) -> None:
    """Combine each row's numbers over this rank's words to those over the vocabulary, in place."""
    logps, lse, _, *squared = numbers
    local = torch.stack([logps.masked_fill(outside, float("-inf")), lse, *squared])
    ranks_3T = gather_ranks(local, group)
    torch.logsumexp(ranks_3T[:, 1], dim=0, out=lse)
    share = ranks_3T[:, 1] - lse  # of each rank's words in the probability, as a logarithm
    torch.amax(ranks_3T[:, 0] + share, dim=0, out=logps)
    if squared:
        torch.logsumexp(ranks_3T[:, 2] + 2 * share, dim=0, out=squared[0])


def _chunks(rows: int, weight: Tensor, *, whole: bool) -> Iterator[slice]:
    """Return the chunks of rows; on CUDA, logits that are kept anyway are one product."""
    size = rows if whole else CHUNK_BYTES[weight.device.type] // _row_bytes(weight)
    return (slice(first, min(first + size, rows)) for first in range(0, rows, max(1, size)))


def _row_bytes(weight: Tensor) -> int:
    return weight.shape[0] * weight.element_size()
