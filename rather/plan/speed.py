"""The seconds of a step: the FLOPs that it needs, and how many of them a device does per second.

If the device is here, layers are timed (calibrate.py). Otherwise the data sheet is used, with the
share of it that was measured on an H200 (bench/results).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rather.config.schema import DPOConfig
from rather.config.strategies import Layout

if TYPE_CHECKING:
    from rather.data.batch import PairBatch
    from rather.model.layers import Recompute
    from rather.model.sizes import Sizes

GIB = 1 << 30
COMMON_SPEED = 3e14  # FLOP/s of a GPU without compilation
WORTH_COMPILING = 600.0  # seconds of training
# Share of the FLOP/s of an H200's data sheet by weights, compiled, on data like UltraFeedback:
# bench/results/gpu_vs_trl_*.json.
MFU = {0.5e9: 0.425, 1.5e9: 0.518, 3.1e9: 0.552, 7.6e9: 0.53}
# Of these without torch.compile: bench/results/plan_vs_measured_cuda.json.
EAGER = {0.5e9: 0.70, 1.5e9: 0.74, 7.6e9: 0.90}
# FLOPs of layers that are recomputed, in forward passes.
AGAIN: Mapping[str, float] = {"none": 0.0, "half": 0.25, "selective": 0.5, "full": 1.0}
LAUNCHES = 2e-3  # seconds to launch all kernels of a layer, forward and backward, not compiled
EXACT_UPDATE, LEAN_UPDATE = 28, 12  # bytes of a weight that an update reads and writes


class Gpu(NamedTuple):
    """From its data sheet; `gib` is what CUDA reports, less than what is printed on the box."""

    gib: float
    flops: float  # dense, in bfloat16
    memory: float  # bytes/s
    link: float  # bytes/s to another GPU of the same machine, one way


GPUS: Mapping[str, Gpu] = {
    "b200": Gpu(178.0, 2250e12, 8.0e12, 900e9),
    "h200": Gpu(139.8, 989e12, 4.8e12, 450e9),
    "h100": Gpu(79.2, 989e12, 3.35e12, 450e9),
    "a100": Gpu(79.2, 312e12, 2.0e12, 300e9),
    "a100-40": Gpu(39.4, 312e12, 1.55e12, 300e9),
    "l40s": Gpu(44.4, 362e12, 0.86e12, 32e9),
    "a10": Gpu(22.1, 125e12, 0.6e12, 32e9),
    "l4": Gpu(22.0, 121e12, 0.3e12, 32e9),
    "rtx4090": Gpu(23.5, 165e12, 1.0e12, 32e9),
    "rtx3090": Gpu(23.5, 71e12, 0.94e12, 32e9),
}


@dataclass(frozen=True)
class Speed:
    """FLOP/s of layers with and without gradients and of the head; bytes/s of memory and link."""

    train: float
    forward: float
    head: float
    memory: float
    link: float
    source: str  # where the numbers come from
    launches: float = 0.0  # least seconds of a layer


@dataclass(frozen=True)
class Flops:
    """The forward FLOPs of some micro-batches of one rank."""

    layers: float
    head: float
    tokens: int

    @staticmethod
    def of(batches: Sequence[PairBatch], sizes: Sizes) -> Flops:
        tokens = sum(len(batch.ids_N) for batch in batches)
        rows = sum(len(batch.rows_U) for batch in batches)
        pairs = [
            pair for b in batches for pair in zip(b.segments.q_lens, b.segments.k_lens, strict=True)
        ]
        cells = sum(q * k - q * q / 2 for q, k in pairs)  # (query, key)
        layers = 2.0 * sizes.in_layers * tokens + 4.0 * sizes.layers * sizes.query * cells
        return Flops(layers, 2.0 * sizes.of_head * rows, tokens)

    def times(self, share: float) -> Flops:
        return Flops(self.layers * share, self.head * share, round(self.tokens * share))


def passes(recompute: Recompute, *, adapter: bool) -> float:
    """Return the cost of a training pass in forward passes: backward is two, or one if frozen."""
    return (2.0 if adapter else 3.0) + AGAIN[recompute]


def listed_speed(name: str, weights: int, *, compiled: bool) -> Speed:
    gpu = GPUS[name]
    share = _between(MFU, weights) * (1.0 if compiled else _between(EAGER, weights))
    flops = gpu.flops * share
    how = "compiled" if compiled else "not compiled"
    source = (
        f"{gpu.flops / 1e12:.0f} TFLOP/s of {name}'s data sheet x {share:.0%} measured on an H200 "
        f"({how})"
    )
    launches = 0.0 if compiled else LAUNCHES
    return Speed(flops, flops, flops, 0.8 * gpu.memory, 0.7 * gpu.link, source, launches)


def _between(measured: Mapping[float, float], weights: int) -> float:
    """Interpolate by the logarithm of the size."""
    known = sorted(measured.items())
    if weights <= known[0][0]:
        return known[0][1]
    for (low, a), (high, b) in pairwise(known):
        if weights <= high:
            return a + (b - a) * math.log(weights / low) / math.log(high / low)
    return known[-1][1]


def worth_compiling(config: DPOConfig, weights: int, steps: int) -> bool:
    """Return whether the run is likely to take much longer than compiling, a minute or two."""
    tokens = steps * config.global_batch() * config.sequence_length
    return 6.0 * weights * tokens / COMMON_SPEED > WORTH_COMPILING


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step of one rank."""

    train: float
    reference: float
    update: float
    exchange: float  # between devices, what training does not hide

    @property
    def total(self) -> float:
        return self.train + self.reference + self.update + self.exchange


def seconds_of_step(
    speed: Speed,
    policy: Flops,
    reference: Flops | None,
    sizes: Sizes,
    found: Layout,
    recompute: Recompute,
    *,
    trained: float,
    adapter: bool,
    lean: bool,
    batches: int,
) -> StepSeconds:
    """Return the time of a step. tp, pp and cp divide the FLOPs of a dp rank further."""
    parts = found.tp * found.pp * found.cp
    layers = policy.layers * passes(recompute, adapter=adapter) / speed.train
    head = policy.head * (2.0 if adapter else 3.0) / speed.head
    bubble = 1 + (found.pp - 1) / max(1, batches * found.virtual)
    train = max(
        (layers + head) / parts * bubble, speed.launches * sizes.layers / found.pp * batches
    )
    forward = 0.0
    if reference is not None:
        forward = (reference.layers / speed.forward + reference.head / speed.head) / parts
    update = trained / parts / found.shard * (LEAN_UPDATE if lean else EXACT_UPDATE) / speed.memory
    return StepSeconds(
        train, forward, update, _exchange(speed, policy, sizes, found, batches, train)
    )


def _exchange(
    speed: Speed, policy: Flops, sizes: Sizes, found: Layout, batches: int, train: float
) -> float:
    """Return the time between devices that training does not hide; never measured on several GPUs.

    Sums of gradients overlap with the backward pass, those of tp do not.
    """
    if found.devices == 1:
        return 0.0
    own = sizes.weights / found.tp / found.pp
    rounds = {3: 8.0 * batches, 2: 2.0 + 4.0 * batches}.get(found.stage, 6.0)  # bytes of a weight
    overlapped = own * rounds / speed.link if found.dp * found.cp > 1 else 0.0
    sums = 16 * policy.tokens / found.cp * sizes.hidden * sizes.layers / found.pp
    return max(0.0, overlapped - train * 2 / 3) + (sums / speed.link if found.tp > 1 else 0.0)
