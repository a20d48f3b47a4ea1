"""Triton kernels of the model: what torch would do in several passes over large tensors.

Imported only for CUDA tensors. The same arithmetic in plain torch is in head.py, for the CPU.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCABULARY_BLOCK = 8192


@triton.jit(do_not_specialize=["places"])
def _gather_kernel(
    keys, values, keys_stride, values_stride, index, out_keys, out_values, places,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < places)[:, None] & (columns < WIDTH)
    tokens = tl.load(index + rows, mask=rows < places, other=0).to(tl.int64)[:, None]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns
    tl.store(out_keys + at, tl.load(keys + tokens * keys_stride + columns, inside), inside)
    tl.store(out_values + at, tl.load(values + tokens * values_stride + columns, inside), inside)


def gather_by_key(keys_N: Tensor, values_N: Tensor, index_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of these tokens; `index_select` is slow for short rows."""
    assert keys_N.shape[1:] == values_N.shape[1:], "one width for both, or rows would overlap"
    keys_N, values_N = (x if x[0].is_contiguous() else x.contiguous() for x in (keys_N, values_N))
    count, width = len(index_K), keys_N[0].numel()
    keys_K, values_K = (x.new_empty((count, *x.shape[1:])) for x in (keys_N, values_N))
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    if count:
        _gather_kernel[(triton.cdiv(count, rows),)](
            keys_N, values_N, keys_N.stride(0), values_N.stride(0), index_K, keys_K, values_K,
            count, WIDTH=width, BLOCK=block, ROWS=rows,
        )  # fmt: skip
    return keys_K, values_K


@triton.jit
def _sum_by_key_kernel(
    keys, values, order, start, out_keys, out_values, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    of_keys = tl.zeros((BLOCK,), tl.float32)
    of_values = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(start + token), tl.load(start + token + 1)):
        at = tl.load(order + index).to(tl.int64) * WIDTH + columns
        of_keys += tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        of_values += tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * WIDTH + columns
    tl.store(out_keys + at, of_keys, mask=inside)
    tl.store(out_values + at, of_values, mask=inside)


def sum_by_key(
    keys_K: Tensor, values_K: Tensor, order_K: Tensor, start_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of two gathers: for each token the float32 sums over its places.

    `order_K` lists the places token by token, `start_N` where each token's begin. Without atomics,
    so that the bits are always the same.
    """
    assert keys_K.shape == values_K.shape, "one width for both, or rows would overlap"
    keys_K, values_K = keys_K.contiguous(), values_K.contiguous()
    tokens, width = len(start_N) - 1, keys_K[0].numel()
    keys_N, values_N = (keys_K.new_empty((tokens, *keys_K.shape[1:])) for _ in range(2))
    _sum_by_key_kernel[(tokens,)](
        keys_K, values_K, order_K, start_N, keys_N, values_N,
        WIDTH=width, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return keys_N, values_N


@triton.jit
def _gather_rows_kernel(rows, stride, index, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(index + place).to(tl.int64) + tl.zeros((BLOCK,), tl.int64)
    x = tl.load(rows + row * stride + columns, mask=inside & (row >= 0), other=0.0)
    tl.store(out + place * WIDTH + columns, x, mask=inside)


def gather_rows(rows_ND: Tensor, index_K: Tensor) -> Tensor:
    """Return these rows; zeros where an index is negative."""
    if rows_ND.stride(1) != 1:
        rows_ND = rows_ND.contiguous()
    width = rows_ND.shape[1]
    out_KD = rows_ND.new_empty((len(index_K), width))
    block = min(1024, triton.next_power_of_2(width))
    _gather_rows_kernel[(len(index_K), triton.cdiv(width, block))](
        rows_ND, rows_ND.stride(0), index_K, out_KD, WIDTH=width, BLOCK=block
    )
    return out_KD


@triton.jit
def _sum_rows_kernel(rows, order, start, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(start + token), tl.load(start + token + 1)):
        row = tl.load(order + index).to(tl.int64)
        total += tl.load(rows + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, total, mask=inside)


def sum_rows(rows_KD: Tensor, order_K: Tensor, start_N: Tensor) -> Tensor:
    """Return the gradient of `gather_rows`: as `sum_by_key`, of one tensor of any width."""
    rows_KD = rows_KD.contiguous()
    tokens, width = len(start_N) - 1, rows_KD.shape[1]
    out_ND = rows_KD.new_empty((tokens, width))
    block = min(1024, triton.next_power_of_2(width))
    _sum_rows_kernel[(tokens, triton.cdiv(width, block))](
        rows_KD, order_K, start_N, out_ND, WIDTH=width, BLOCK=block
    )
    return out_ND


@triton.jit(do_not_specialize=["count"])
def _unit_kernel(
    vectors, out, inverse, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < count)[:, None] & (columns < WIDTH)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns
    x = tl.load(vectors + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
    tl.store(out + at, x * scale[:, None], mask=inside)
    tl.store(inverse + rows, scale, mask=rows < count)


def unit_vectors(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors of length one along the last dimension, and one over their lengths."""
    vectors = vectors.contiguous()
    unit = torch.empty_like(vectors)
    inverse = vectors.new_empty((*vectors.shape[:-1], 1), dtype=torch.float32)
    grid, sizes = _by_vector(vectors)
    _unit_kernel[grid](vectors, unit, inverse, inverse.numel(), **sizes)
    return unit, inverse


@triton.jit(do_not_specialize=["count"])
def _unit_gradient_kernel(
    grad, unit, inverse, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < count)[:, None] & (columns < WIDTH)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(unit + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(inverse + rows, mask=rows < count, other=0.0)
    across = g - u * tl.sum(u * g, 1)[:, None]
    tl.store(out + at, scale[:, None] * across, mask=inside)


def unit_vectors_gradient(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of `unit_vectors` with respect to the vectors."""
    out = torch.empty_like(unit)
    grid, sizes = _by_vector(unit)
    _unit_gradient_kernel[grid](grad.contiguous(), unit, inverse, out, inverse.numel(), **sizes)
    return out


def _by_vector(vectors: Tensor) -> tuple[tuple[int], dict[str, int]]:
    width = vectors.shape[-1]
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    grid = (triton.cdiv(vectors.numel() // width, rows),)
    return grid, {"WIDTH": width, "BLOCK": block, "ROWS": rows}


@triton.jit
def _sum_of_choices_kernel(
    rows, place, out, WIDTH: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(place + token * CHOICES + choice).to(tl.int64)
        total += tl.load(rows + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, total, mask=inside)


def sum_of_choices(rows_SD: Tensor, place_NK: Tensor) -> Tensor:
    """Return for each token the float32 sum of its rows, in the order of its choices."""
    rows_SD, place_NK = rows_SD.contiguous(), place_NK.contiguous()
    (tokens, choices), width = place_NK.shape, rows_SD.shape[1]
    out_ND = rows_SD.new_empty((tokens, width))
    block = min(1024, triton.next_power_of_2(width))
    if tokens:
        _sum_of_choices_kernel[(tokens, triton.cdiv(width, block))](
            rows_SD, place_NK, out_ND, WIDTH=width, CHOICES=choices, BLOCK=block, num_warps=4
        )
    return out_ND


@triton.jit
def _row_statistics_kernel(
    logits,
    targets,
    logps,
    lse,
    squared,
    vocabulary,
    stride,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    total_squares = tl.zeros((), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        x = tl.load(
            logits + first + columns, mask=first + columns < vocabulary, other=float("-inf")
        ).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp(largest - larger)
        e = tl.exp(x - larger)
        total = total * shrink + tl.sum(e, 0)
        if SQUARES:
            total_squares = total_squares * shrink * shrink + tl.sum(e * e, 0)
        largest = larger
    log_sum = largest + tl.log(total)
    target = tl.load(logits + tl.load(targets + row)).to(tl.float32)
    tl.store(lse + row, log_sum)
    tl.store(logps + row, target - log_sum)
    if SQUARES:
        tl.store(squared + row, 2 * largest + tl.log(total_squares) - 2 * log_sum)


def row_statistics(
    logits: Tensor, targets: Tensor, logps: Tensor, lse: Tensor, squared: Tensor | None = None
) -> None:
    """Compute log-sum-exp, target log-prob and, if `squared` is given, log sum p^2 in one pass."""
    rows, vocabulary = logits.shape
    if rows:
        _row_statistics_kernel[(rows,)](
            logits, targets, logps, lse, lse if squared is None else squared,
            vocabulary, logits.stride(0),
            SQUARES=squared is not None, BLOCK=VOCABULARY_BLOCK, num_warps=16,
        )  # fmt: skip


@triton.jit
def _logits_gradient_kernel(
    logits, lse, targets, grad, vocabulary, stride, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * stride
    g = tl.load(grad + row) * scale
    x = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row))
    hit = columns == tl.load(targets + row)
    tl.store(logits + columns, g * (hit.to(tl.float32) - p), mask=columns < vocabulary)


def logits_gradient_(
    logits: Tensor, lse: Tensor, targets: Tensor, grad: Tensor, scale: float
) -> Tensor:
    """Turn logits into grad * scale * (one-hot - softmax) in place."""
    rows, vocabulary = logits.shape
    if rows:
        grid = (triton.cdiv(vocabulary, VOCABULARY_BLOCK), rows)
        _logits_gradient_kernel[grid](
            logits,
            lse,
            targets,
            grad,
            vocabulary,
            logits.stride(0),
            scale,
            BLOCK=VOCABULARY_BLOCK,
            num_warps=8,
        )
    return logits
