"""AdamW in Triton, one launch over all parameters: with 16-bit remainders, and with 8-bit moments.

A table on the device gives each program the addresses of its parameter; an update copies only this
table and a few numbers per parameter there. Imported only if CUDA is used.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 16  # weights of one program
TILE = 1024  # weights at a time
BLOCK = tl.constexpr(256)  # adamw.BLOCK


def adamw(
    form: str,
    tensors: Sequence[Sequence[Tensor]],
    numbers: Sequence[Sequence[float]],
    seeds: Sequence[int],
    common: Sequence[float],
) -> None:
    """Do one update. `form` names a kernel below, whose docstring explains the lists."""
    device = tensors[0][0].device
    sizes = tuple(row[0].numel() for row in tensors)
    assert max(sizes) < 1 << 31, "offsets are of 32 bits"
    pointers = [[tensor.data_ptr() for tensor in row] for row in tensors]
    aligned = all(pointer % 16 == 0 for row in pointers for pointer in row)
    rows = [[*row, size, seed] for row, size, seed in zip(pointers, sizes, seeds, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    each = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
    chunks = _chunks(sizes, device)
    wide = tensors[0][-1].dtype == torch.float32
    with torch.cuda.device_of(table):
        KERNELS[form][(len(chunks),)](
            table,
            each,
            chunks,
            *common,
            WIDE=wide,
            ALIGN=16 if aligned else 1,
            CHUNK=CHUNK,
            TILE=TILE,
            num_warps=4,
        )


@lru_cache(maxsize=8)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return [programs, 2]: the parameter of each program, and which of its chunks."""
    pairs = [torch.tensor([row, 0]) + torch.arange(-(-size // CHUNK))[:, None] * torch.tensor([0, 1])
             for row, size in enumerate(sizes)]  # fmt: skip
    return torch.cat(pairs).int().to(device)


@triton.jit
def _split_kernel(
    table, each, chunks, beta1, rest1, beta2, rest2, eps, scale,
    WIDE: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tensors: parameter, remainder, exp_avg, exp_avg_sq, gradient. Numbers: step size, correction,
    decay.
    """
    row = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
    entry = table + 7 * row
    upper = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int16)), ALIGN)
    lower = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int16)), ALIGN)
    exp_avg = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.float32)), ALIGN)
    exp_avg_sq = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float32)), ALIGN)
    gradient = _gradient(entry + 4, WIDE, ALIGN)
    size = tl.load(entry + 5).to(tl.int32)
    step, correction, decay = (
        tl.load(each + 3 * row),
        tl.load(each + 3 * row + 1),
        tl.load(each + 3 * row + 2),
    )
    if size - first >= CHUNK:  # a mask would forbid wide loads
        for start in range(0, CHUNK, TILE):
            at = first + start + tl.arange(0, TILE)
            _split_tile(
                upper + at, lower + at, exp_avg + at, exp_avg_sq + at, gradient + at, None,
                step, correction, decay, beta1, rest1, beta2, rest2, eps, scale,
            )  # fmt: skip
    else:
        for start in range(0, size - first, TILE):
            at = first + start + tl.arange(0, TILE)
            _split_tile(
                upper + at, lower + at, exp_avg + at, exp_avg_sq + at, gradient + at, at < size,
                step, correction, decay, beta1, rest1, beta2, rest2, eps, scale,
            )  # fmt: skip


@triton.jit
def _split_tile(
    upper, lower, exp_avg, exp_avg_sq, gradient, inside,
    step, correction, decay, beta1, rest1, beta2, rest2, eps, scale,
):  # fmt: skip
    bits = (tl.load(upper, inside).to(tl.int32) << 16) + tl.load(lower, inside).to(tl.int32)
    w, m, v = _adamw(
        bits.to(tl.float32, bitcast=True), tl.load(exp_avg, inside), tl.load(exp_avg_sq, inside),
        tl.load(gradient, inside).to(tl.float32) * scale,
        step, correction, decay, beta1, rest1, beta2, rest2, eps,
    )  # fmt: skip
    bits = w.to(tl.int32, bitcast=True)
    tl.store(upper, ((bits + 0x8000) >> 16).to(tl.int16), inside)
    tl.store(lower, bits.to(tl.int16), inside)
    tl.store(exp_avg, m, inside)
    tl.store(exp_avg_sq, v, inside)


@triton.jit
def _lean_kernel(
    table, each, chunks, beta1, rest1, beta2, rest2, eps, scale,
    WIDE: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tensors: parameter, exp_avg, its bases, exp_avg_sq, its bases, gradient. Numbers as above."""
    row = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
    entry = table + 8 * row
    weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int16)), ALIGN)
    exp_avg = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.uint8)), ALIGN)
    base = tl.load(entry + 2).to(tl.pointer_type(tl.int16))
    exp_avg_sq = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.uint8)), ALIGN)
    base_sq = tl.load(entry + 4).to(tl.pointer_type(tl.int16))
    gradient = _gradient(entry + 5, WIDE, ALIGN)
    size, seed = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7)
    step, correction, decay = (
        tl.load(each + 3 * row),
        tl.load(each + 3 * row + 1),
        tl.load(each + 3 * row + 2),
    )
    blocks: tl.constexpr = TILE // BLOCK
    here = tl.arange(0, blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    whole = size - first >= CHUNK
    for start in range(0, tl.minimum(CHUNK, size - first), 2 * TILE):
        # Four random words serve two weights each, one in this tile and one in the next.
        noise = tl.randint4x(seed, first + start + here, 7)
        for half in tl.static_range(2):
            origin = first + start + half * TILE
            at, block = origin + here, origin // BLOCK + tl.arange(0, blocks)
            places = (
                weight + at,
                exp_avg + at,
                exp_avg_sq + at,
                gradient + at,
                base + block,
                base_sq + block,
            )
            numbers = (step, correction, decay, beta1, rest1, beta2, rest2, eps, scale)
            if whole:  # a mask would forbid wide loads
                _lean_tile(places, None, None, noise[2 * half], noise[2 * half + 1], numbers)
            else:
                _lean_tile(
                    places,
                    at < size,
                    block * BLOCK < size,
                    noise[2 * half],
                    noise[2 * half + 1],
                    numbers,
                )


@triton.jit
def _lean_tile(places, inside, block_inside, noise, more, numbers):
    weight, exp_avg, exp_avg_sq, gradient, base, base_sq = places
    step, correction, decay, beta1, rest1, beta2, rest2, eps, scale = numbers
    w = (_ints(weight, inside) << 16).to(tl.float32, bitcast=True)
    code = _ints(exp_avg, inside)
    size = ((code & 127) + _ints(base, block_inside)[:, None]) << 20
    m = tl.where((code & 127) == 0, 0.0, (size | ((code & 128) << 24)).to(tl.float32, bitcast=True))
    v = ((_ints(exp_avg_sq, inside) + _ints(base_sq, block_inside)[:, None]) << 20).to(
        tl.float32, bitcast=True
    )
    g = (tl.load(gradient) if inside is None else tl.load(gradient, inside, other=0.0)).to(
        tl.float32
    ) * scale
    w, m, v = _adamw(w, m, v, g, step, correction, decay, beta1, rest1, beta2, rest2, eps)
    noise, more = noise.to(tl.int32, bitcast=True), more.to(tl.int32, bitcast=True)
    sixteen = ((noise >> 20) & 0xFFF) | ((more >> 16) & 0xF000)  # what the other two leave
    tl.store(weight, ((w.to(tl.int32, bitcast=True) + sixteen) >> 16).to(tl.int16), inside)
    bits = m.to(tl.int32, bitcast=True)
    rounded = ((bits & 0x7FFFFFFF) + (noise & 0xFFFFF)) >> 20
    lowest = tl.maximum(tl.max(rounded, 1) - 127, 0)
    code = tl.maximum(rounded - lowest[:, None], 0) | tl.where(bits < 0, 128, 0)
    tl.store(exp_avg, code.to(tl.uint8), inside)
    tl.store(base, lowest.to(tl.int16), block_inside)
    rounded = (v.to(tl.int32, bitcast=True) + (more & 0xFFFFF)) >> 20
    lowest = tl.maximum(tl.max(rounded, 1) - 255, 0)
    tl.store(exp_avg_sq, tl.maximum(rounded - lowest[:, None], 0).to(tl.uint8), inside)
    tl.store(base_sq, lowest.to(tl.int16), block_inside)


@triton.jit
def _ints(place, inside):
    """Load as integers; what is outside counts as 0, so that it is never the largest of a block."""
    return (tl.load(place) if inside is None else tl.load(place, inside, other=0)).to(tl.int32)


@triton.jit
def _gradient(entry, WIDE: tl.constexpr, ALIGN: tl.constexpr):
    if WIDE:
        gradient = tl.load(entry).to(tl.pointer_type(tl.float32))
    else:
        gradient = tl.load(entry).to(tl.pointer_type(tl.bfloat16))
    return tl.multiple_of(gradient, ALIGN)


@triton.jit
def _adamw(w, m, v, g, step, correction, decay, beta1, rest1, beta2, rest2, eps):
    """In the order of torch's fused kernel. `w * (1 - decay)` would round a decay of 5e-8 by a
    fifth.
    """
    w = w - decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return w - tl.div_rn(step * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps), m, v


KERNELS = {"split": _split_kernel, "lean": _lean_kernel}
