"""AdamW in Triton, one launch over all parameters: with 16-bit remainders, and with 8-bit moments.

A table on the device gives each program the addresses of its parameter; an update copies only this
table and a few numbers per parameter there. Imported only if CUDA is used.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rather.arithmetic import ceil_div
from rather.optim.rounding import hash_key, place, signed

if TYPE_CHECKING:
    from rather.optim.adamw import ParameterState, Update

CHUNK = 1 << 16  # weights of one program
TILE = 1024  # weights at a time
BLOCK = tl.constexpr(256)  # adamw.BLOCK


def prepare(states: Iterable[ParameterState], update: Update) -> Callable[[float], None] | None:
    """Return what updates all parameters in half precision, given the scale of the gradients."""
    half = [state for state in states if state.form != "wide" and state.gradient is not None]
    dtypes = {state.parameter.dtype for state in half}
    by_dtype = [[s for s in half if s.parameter.dtype == dtype] for dtype in dtypes]
    launches = [_prepare(same, update) for same in by_dtype]

    def launch_all(scale: float) -> None:
        for launch in launches:
            launch(scale)

    return launch_all if launches else None


def _prepare(states: Sequence[ParameterState], update: Update) -> Callable[[float], None]:
    """Return one launch for all parameters of one form and dtype: many launches take longer."""
    rows, numbers, gradients = [], [], []
    lean = states[0].form == "lean"
    for state in states:
        gradient = state.gradient
        assert gradient is not None
        gradients.append(gradient.contiguous())
        low_bits = [] if state.rest is None else [state.rest, state.rest]
        weight = state.local
        tensors = [weight, gradients[-1], *state.moments.values(), *low_bits]
        addresses = [tensor.data_ptr() for tensor in tensors]
        first, second = hash_key(state.name)
        seed = update.noise_seed(state.name) if lean else signed(second) << 32 | first
        where = place(state.rounding.place(state.name, weight))
        rows.append([weight.numel(), seed, *addresses, *where])
        done = state.steps + 1
        step_size = update.lr / (1 - update.beta1**done)
        correction = math.sqrt(1 - update.beta2**done)
        numbers.append([step_size, correction, update.lr * state.decay])
    sizes, device = tuple(row[0] for row in rows), gradients[0].device
    assert max(sizes) < 1 << 31, "offsets are of 32 bits"
    aligned = all(address % 16 == 0 for row in rows for address in row[2:8])
    sliced = any(run != stride for *_, run, stride, _ in rows)
    far = sliced or any(row[0] + row[-1] > 1 << 31 for row in rows)
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    factors = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
    chunks = _chunks(sizes, device)
    held, wide = states[0].parameter.dtype == torch.float32, gradients[0].dtype == torch.float32

    def launch(scale: float) -> None:
        assert gradients  # alive until the kernel has its addresses
        with torch.cuda.device_of(table):
            _kernel[(len(chunks),)](
                table, factors, chunks, update.beta1, 1 - update.beta1, update.beta2,
                1 - update.beta2, update.eps, scale, LEAN=lean,
                DITHERED=states[0].rounding.kind == "dithered", SLICED=sliced, FAR=far, HELD=held,
                WIDE=wide, ALIGN=16 if aligned else 1, CHUNK=CHUNK, TILE=TILE, num_warps=4,
            )  # fmt: skip

    return launch


@lru_cache(maxsize=8)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return [programs, 2]: the parameter of each program, and which of its chunks."""
    pairs = [
        (row, chunk) for row, size in enumerate(sizes) for chunk in range(ceil_div(size, CHUNK))
    ]
    return torch.tensor(pairs, dtype=torch.int32).to(device)


@triton.jit
def _kernel(
    table, factors, chunks, beta1, rest1, beta2, rest2, eps, scale, LEAN: tl.constexpr,
    DITHERED: tl.constexpr, SLICED: tl.constexpr, FAR: tl.constexpr, HELD: tl.constexpr,
    WIDE: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A row of the table: size, seed, the addresses of parameter and gradient, and those of
    exp_avg, exp_avg_sq, the low bits twice; if lean: exp_avg, its bases, exp_avg_sq, its bases;
    then its place in the whole tensor (rounding.place). The seed is that of lean noise, or the two
    keys of the thresholds.
    """
    row = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
    entry = table + 11 * row
    factors += 3 * row
    numbers = (tl.load(factors), tl.load(factors + 1), tl.load(factors + 2),
               beta1, rest1, beta2, rest2, eps, scale)  # fmt: skip
    size, seed = tl.load(entry).to(tl.int32), tl.load(entry + 1)
    weight = _pointer(entry + 2, tl.int32 if HELD else tl.int16, ALIGN)
    gradient = _pointer(entry + 3, tl.float32 if WIDE else tl.bfloat16, ALIGN)
    exp_avg = _pointer(entry + 4, tl.uint8 if LEAN else tl.float32, ALIGN)
    exp_avg_sq = _pointer(entry + (6 if LEAN else 5), tl.uint8 if LEAN else tl.float32, ALIGN)
    # The bases of the moments if lean, else the low bits.
    extra = _pointer(entry + (5 if LEAN else 6), tl.int16, ALIGN)
    extra_sq = _pointer(entry + 7, tl.int16, ALIGN)
    blocks: tl.constexpr = TILE // BLOCK
    offsets = tl.arange(0, blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_full = size - first >= CHUNK
    for start in range(0, tl.minimum(CHUNK, size - first), 2 * TILE):
        # Four random words serve two weights each, one in this tile and one in the next.
        noise = tl.randint4x(seed, first + start + offsets, 7) if LEAN else (seed, seed, seed, seed)
        for half in tl.static_range(2):
            origin = first + start + half * TILE
            at, block = origin + offsets, origin // BLOCK + tl.arange(0, blocks)
            pointers = (weight + at, gradient + at, exp_avg + at, exp_avg_sq + at)
            random = (noise[2 * half], noise[2 * half + 1])
            if LEAN:
                bases = (extra + block, extra_sq + block)
                if is_full:  # a mask would forbid wide loads
                    _lean_tile(pointers, bases, None, None, random, numbers, HELD)
                else:
                    inside = at < size
                    _lean_tile(pointers, bases, inside, block * BLOCK < size, random, numbers, HELD)
            else:
                threshold = 0x8000
                if DITHERED:
                    threshold = _threshold(at, entry + 8, seed, SLICED, FAR)
                if is_full:
                    _split_tile(pointers, extra + at, None, threshold, numbers, HELD)
                else:
                    _split_tile(pointers, extra + at, at < size, threshold, numbers, HELD)


@triton.jit
def _threshold(at, place, seed, SLICED: tl.constexpr, FAR: tl.constexpr):
    """Return what `rounding.thresholds` does, for local flat indices."""
    index = at.to(tl.uint32)
    key = (seed >> 32).to(tl.uint32)
    if FAR:
        index = at.to(tl.int64)
        if SLICED:
            run = tl.load(place)
            index = index // run * tl.load(place + 1) + index % run
        index += tl.load(place + 2)
        key += (index >> 32).to(tl.uint32) * 0xC2B2AE35
        index = index.to(tl.uint32)
    else:
        index += tl.load(place + 2).to(tl.uint32)
    bits = (index ^ seed.to(tl.uint32)) * 0x9E3779B1
    bits ^= bits >> 15
    bits = (bits + key) * 0x85EBCA6B
    bits ^= bits >> 13
    return ((bits * 0xC2B2AE35) >> 16).to(tl.int32)


@triton.jit
def _split_tile(places, lower, inside, threshold, numbers, HELD: tl.constexpr):
    upper, gradient, exp_avg, exp_avg_sq = places
    low = tl.load(lower, inside).to(tl.int32) & 0xFFFF
    bits = tl.load(upper, inside).to(tl.int32)
    bits = bits >> 16 if HELD else bits
    bits = ((bits - ((low + threshold) >> 16)) << 16) | low
    w = bits.to(tl.float32, bitcast=True)
    g = tl.load(gradient, inside).to(tl.float32)
    w, m, v = _adamw(w, tl.load(exp_avg, inside), tl.load(exp_avg_sq, inside), g, numbers)
    bits = w.to(tl.int32, bitcast=True)
    threshold = tl.where((bits & 0x7F800000) == 0x7F800000, 0, threshold)  # Inf and NaN stay
    _store(upper, (bits + threshold) >> 16, inside, HELD)
    tl.store(lower, bits.to(tl.int16), inside)
    tl.store(exp_avg, m, inside)
    tl.store(exp_avg_sq, v, inside)


@triton.jit
def _lean_tile(places, bases, inside, block_inside, random, numbers, HELD: tl.constexpr):
    weight, gradient, exp_avg, exp_avg_sq = places
    w = (_ints(weight, inside) << (0 if HELD else 16)).to(tl.float32, bitcast=True)
    code = _ints(exp_avg, inside)
    size = ((code & 127) + _ints(bases[0], block_inside)[:, None]) << 20
    m = tl.where((code & 127) == 0, 0.0, (size | ((code & 128) << 24)).to(tl.float32, bitcast=True))
    code = _ints(exp_avg_sq, inside) + _ints(bases[1], block_inside)[:, None]
    v = (code << 20).to(tl.float32, bitcast=True)
    g = tl.load(gradient) if inside is None else tl.load(gradient, inside, other=0.0)
    w, m, v = _adamw(w, m, v, g.to(tl.float32), numbers)
    noise, noise_sq = random[0].to(tl.int32, bitcast=True), random[1].to(tl.int32, bitcast=True)
    sixteen = ((noise >> 20) & 0xFFF) | ((noise_sq >> 16) & 0xF000)  # what the other two leave
    _store(weight, (w.to(tl.int32, bitcast=True) + sixteen) >> 16, inside, HELD)
    bits = m.to(tl.int32, bitcast=True)
    rounded = ((bits & 0x7FFFFFFF) + (noise & 0xFFFFF)) >> 20
    lowest = tl.maximum(tl.max(rounded, 1) - 127, 0)
    code = tl.maximum(rounded - lowest[:, None], 0) | tl.where(bits < 0, 128, 0)
    tl.store(exp_avg, code.to(tl.uint8), inside)
    tl.store(bases[0], lowest.to(tl.int16), block_inside)
    rounded = (v.to(tl.int32, bitcast=True) + (noise_sq & 0xFFFFF)) >> 20
    lowest = tl.maximum(tl.max(rounded, 1) - 255, 0)
    tl.store(exp_avg_sq, tl.maximum(rounded - lowest[:, None], 0).to(tl.uint8), inside)
    tl.store(bases[1], lowest.to(tl.int16), block_inside)


@triton.jit
def _store(place, upper, inside, HELD: tl.constexpr):
    """Store the upper 16 bits of weights: as bfloat16, or as float32 with zeros below."""
    tl.store(place, upper << 16 if HELD else upper.to(tl.int16), inside)


@triton.jit
def _ints(place, inside):
    """Load as integers; what is outside counts as 0, so that it is never the largest of a block."""
    return (tl.load(place) if inside is None else tl.load(place, inside, other=0)).to(tl.int32)


@triton.jit
def _pointer(entry, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _adamw(w, m, v, g, numbers):
    """Compute as torch's fused kernel does. `w * (1 - decay)` would round a small decay away."""
    step, correction, decay, beta1, rest1, beta2, rest2, eps, scale = numbers
    g = g * scale
    w = w - decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return w - tl.div_rn(step * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps), m, v
