"""The seconds of a step: the FLOPs that it needs, and how many of them a device does per second.

If the device is here, layers are timed on pairs of the run. Otherwise the data sheet is used, with
the share of it that was measured on an H200 (bench/results).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import Timer

from rather.config.schema import ActorConfig
from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.model.budget import LADDER
from rather.model.layers import Recompute, arrange_layers
from rather.model.policy import PolicyModel, pair_columns
from rather.model.sizes import few_layers
from rather.optim.host import BYTES_ON_HOST
from rather.parallel.load import stored_dtype

if TYPE_CHECKING:
    from rather.model.sizes import Sizes
    from rather.plan.memory import Chosen, MemoryForecast

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
HOST_LINK = 50e9  # bytes/s between a GPU and pinned host memory, one way

FEW, MORE = 1, 3  # layers; their difference is that of two layers without head and embedding
MOST_FLOPS = {"cpu": 5e9, "cuda": 2e14}  # of one forward pass that is timed
REPEATS = 2
COPIED = {"cpu": 1 << 24, "cuda": 1 << 28}  # numbers


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
    """The forward FLOPs of some micro-batches."""

    layers: float
    head: float
    tokens: int

    @staticmethod
    def of(batches: Sequence[PairBatch], sizes: Sizes) -> Flops:
        tokens = sum(len(batch.ids_N) for batch in batches)
        rows = sum(len(batch.rows_U) for batch in batches)
        spans = [zip(b.segments.q_lens, b.segments.k_lens, strict=True) for b in batches]
        cells = sum(q * k - q * q / 2 for each in spans for q, k in each)  # (query, key)
        used = sizes.in_layers - sizes.idle
        layers = 2.0 * used * tokens + 4.0 * sizes.layers * sizes.query * cells
        return Flops(layers, 2.0 * sizes.of_head * rows, tokens)

    def seconds(self, speed: Speed) -> float:
        """Return how long they take without gradients."""
        return self.layers / speed.forward + self.head / speed.head


def passes(recompute: Recompute, *, adapter: bool) -> float:
    """Return the cost of a training pass in forward passes: backward is two, or one if frozen."""
    return (2.0 if adapter else 3.0) + AGAIN[recompute]


def listed_speed(name: str, weights: int, *, compiled: bool) -> Speed:
    gpu = GPUS[name]
    share = _between(MFU, weights) * (1.0 if compiled else _between(EAGER, weights))
    flops, how = gpu.flops * share, "compiled" if compiled else "not compiled"
    source = (
        f"{gpu.flops / 1e12:.0f} TFLOP/s of {name}'s data sheet x {share:.0%} measured on an H200 "
        f"({how})"
    )
    launches = 0.0 if compiled else LAUNCHES
    return Speed(flops, flops, flops, 0.8 * gpu.memory, 0.7 * gpu.link, source, launches)


def _between(measured: Mapping[float, float], weights: int) -> float:
    """Interpolate by the logarithm of the size; outside, return the nearest value."""
    sizes = [math.log(size) for size in measured]
    return float(np.interp(math.log(weights), sizes, list(measured.values())))


def worth_compiling(weights: int, tokens: int) -> bool:
    """Return whether so many tokens take much longer than compiling, a minute or two."""
    return 6.0 * weights * tokens / COMMON_SPEED > WORTH_COMPILING


# --- one step ---


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
    memory: MemoryForecast,
    speed: Speed,
    policy: Flops,
    reference: Flops,
    recompute: Recompute,
    batches: int,
) -> StepSeconds:
    """Return the time of a step, whose FLOPs all devices share."""
    found, sizes, adapter = memory.layout, memory.sizes, memory.args.has_adapter
    # Router choices of several micro-batches are counted in a pass of their own.
    counting = float(sizes.experts > 0 and batches > 1)
    layers = policy.layers * (passes(recompute, adapter=adapter) + counting) / speed.train
    head = policy.head * passes("none", adapter=adapter) / speed.head
    bubble = 1 + (found.pp - 1) / max(1, batches * found.virtual)
    launches = speed.launches * sizes.layers / found.pp * batches
    train = max((layers + head) / found.devices * bubble, launches)
    forward = reference.seconds(speed) / found.devices if memory.with_reference else 0.0
    each = LEAN_UPDATE if memory.config.precision == "lean" else EXACT_UPDATE
    state = memory.state()
    update = state.weights(trained=True, shard=True) * each / speed.memory
    if memory.keeps_state_on_host:  # the norm reads the sums, the update reads everything
        update += (sizes.in_layers * 4 + sizes.weights * BYTES_ON_HOST) / HOST_LINK
    # Between devices, never measured on several GPUs: sums of gradients overlap with the backward
    # pass, those of tp do not.
    rounds = {3: 8.0 * batches, 2: 2.0 + 4.0 * batches}.get(found.stage, 6.0)  # bytes of a weight
    overlapped = state.weights() * rounds / speed.link if found.dp * found.cp > 1 else 0.0
    if memory.keeps_state_on_host:  # sums of gradients come and go with each micro-batch
        overlapped = sizes.in_layers * 4 * batches / HOST_LINK
    exchange = max(0.0, overlapped - train * 2 / 3)
    tokens = round(policy.tokens / found.dp) / found.cp
    rows = tokens * sizes.hidden * sizes.layers / found.pp
    if found.tp > 1:
        exchange += 16 * rows / speed.link
    if found.ep > 1:  # rows go to their experts and back, and so do their gradients
        exchange += 8 * rows * sizes.chosen / speed.link
    return StepSeconds(train, forward, update, exchange)


# --- measured here ---


def measured_speed(
    actor: ActorConfig, sizes: Sizes, pairs: Sequence[TokenPair], chosen: Chosen, kind: str
) -> Speed:
    """Return the FLOP/s of micro-batches as they were chosen. Takes seconds."""
    name, args = actor.model_path, actor.model_args
    batch = _batch(sizes, pairs, chosen.tokens, kind)
    own = batch.to(kind)
    trained, forward = {}, {}
    for layers in (FEW, MORE):
        policy = PolicyModel(few_layers(name, args, layers, kind, stored_dtype(args, kind)))
        arrange_layers(policy, recompute=chosen.recompute)
        trained[layers] = _seconds(partial(_train, policy, own))
        with torch.no_grad():
            forward[layers] = _seconds(partial(pair_columns, policy, own))
        del policy
    flops, adapter = Flops.of([batch], sizes), args.has_adapter
    layer = flops.layers / sizes.layers * (MORE - FEW)
    spent = max(trained[MORE] - trained[FEW], 1e-9)
    rest = max(trained[FEW] - spent / (MORE - FEW), 1e-9)
    one, other = (torch.zeros(COPIED[kind], device=kind) for _ in range(2))
    memory = 3 * one.nbytes / _seconds(lambda: one.add_(other))
    return Speed(
        train=layer * passes(chosen.recompute, adapter=adapter) / spent,
        forward=layer / max(forward[MORE] - forward[FEW], 1e-9),
        head=flops.head * passes("none", adapter=adapter) / rest,
        memory=memory,
        link=memory,
        source=f"{FEW} and {MORE} layers timed on this {kind} with {flops.tokens} tokens",
    )


def _batch(sizes: Sizes, pairs: Sequence[TokenPair], budget: int, kind: str) -> PairBatch:
    """Pack as many pairs of the step as can be timed in a second or two."""
    names = ("prompt", "chosen", "rejected")
    known = [  # assumed pairs may have tokens that the model does not have
        replace(pair, **{name: getattr(pair, name) % sizes.vocabulary for name in names})
        for pair in pairs
    ]
    for count in range(1, len(known) + 1):
        batches = pack(known[:count], budget, ladder=LADDER[kind])
        work = Flops.of(batches[:1], sizes)
        if len(batches) > 1 or work.layers / sizes.layers * MORE + work.head > MOST_FLOPS[kind]:
            break
    return pack(known[: max(1, count - 1)], 10**9, ladder=LADDER[kind])[0]


def _train(policy: PolicyModel, batch: PairBatch) -> None:
    pair_columns(policy, batch)["sum"].sum().backward()  # type: ignore[no-untyped-call]
    for parameter in policy.parameters():
        parameter.grad = None


def _seconds(work: Callable[[], object]) -> float:
    """Return the mean seconds of some runs, after two to warm up."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(timer.timeit(REPEATS).mean)
