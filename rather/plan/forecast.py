"""The forecast of one config on one kind of device: memory by part, time, disk, whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.data.batch import TokenPair
from rather.plan.disk import DiskBytes, disk_of, free_disk
from rather.plan.memory import Chosen, Device, MemoryForecast, MemoryParts, Work
from rather.plan.speed import GIB, Flops, Speed, StepSeconds, seconds_of_step, worth_compiling

if TYPE_CHECKING:
    from rather.model.sizes import Sizes

SAMPLE = 2  # steps that are packed
CPU_GROWTH = "growth of the resident set since before the models were loaded"
CUDA_PEAK = "torch.cuda.max_memory_allocated without planning and the CUDA context (about 0.5 GiB)"


@dataclass(frozen=True)
class PairSample:
    """What is known about the data: how much there is, and the pairs of the first steps."""

    count: int  # to train on
    held_out: int
    steps: int
    epochs: float
    sample: Sequence[Sequence[TokenPair]]
    largest: int  # tokens of the largest pair
    data_bytes: int = 0
    assumed: str = ""  # why there is no data to look at


@dataclass(frozen=True)
class Forecast:
    """The forecast of one device of the policy; all are alike."""

    config: DPOConfig
    device: Device
    layout: str
    compiled: bool
    chosen: Chosen
    work: Work
    parts: MemoryParts
    reference_device: float  # bytes of a device that the reference has for itself
    pairs: PairSample
    step_tokens: int
    seconds: StepSeconds | None
    evaluation_seconds: float
    speed: str
    disk: DiskBytes
    disk_free: int

    @property
    def fits(self) -> bool:
        return self.chosen.fits and self.parts.total <= self.device.memory

    @property
    def run_seconds(self) -> float | None:
        if self.seconds is None:
            return None
        every, steps = self.config.eval_steps, self.pairs.steps
        evaluations = 1 + max(1, steps // every if every else 0) if self.pairs.held_out else 0
        return steps * self.seconds.total + evaluations * self.evaluation_seconds

    @property
    def batch(self) -> str:
        """How many pairs a step has, and why."""
        training, pairs = self.config.actor_train.training_args, self.config.global_batch()
        if self.config.train_batch_size:
            return f"train_batch_size = {pairs} pairs per step"
        size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
        dp = layout(self.config.actor_train).dp
        product = f"{size} per device x {steps} accumulated x {dp} data-parallel"
        return f"{product} = {size * steps * dp} pairs per step"

    def as_json(self) -> dict[str, Any]:
        chosen, work, pairs = self.chosen, self.work, self.pairs
        return {
            "fits": self.fits,
            "layout": self.layout,
            "device": {"kind": self.device.kind, "memory_bytes": round(self.device.memory)},
            "memory_bytes": {
                **{name: round(number) for name, number in asdict(self.parts).items()},
                "total": round(self.parts.total),
            },
            "reference_device_bytes": round(self.reference_device),
            "micro_batch": {
                "tokens": chosen.tokens,
                "largest_tokens": work.tokens,
                "largest_scored": work.rows,
            },
            "recompute": chosen.recompute,
            "compiled": self.compiled,
            "narrow_gradients": chosen.narrow,
            "reference_on_host": chosen.parked,
            "pairs_per_step": self.config.global_batch(),
            "batch": self.batch,
            "micro_batches_per_step": work.batches,
            "tokens_per_step": self.step_tokens,
            "train_pairs": pairs.count,
            "steps": pairs.steps,
            "assumed": pairs.assumed or None,
            "seconds_per_step": self.seconds.total if self.seconds else None,
            "seconds": asdict(self.seconds) if self.seconds else None,
            "seconds_of_run": self.run_seconds,
            "speed": self.speed,
            "disk_bytes": {name: round(number) for name, number in asdict(self.disk).items()},
            "disk_free_bytes": self.disk_free,
            "counted": CPU_GROWTH if self.device.kind == "cpu" else CUDA_PEAK,
        }

    def line(self) -> str:
        """Return the forecast as one line for the console."""
        parts, available = asdict(self.parts), self.device.memory / GIB
        largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {number / GIB:.3g}" for name, number in largest)
        time = f"; {self.seconds.total:.3g} s per step" if self.seconds else ""
        total, fits = self.parts.total / GIB, "fits" if self.fits else "may NOT fit"
        return f"forecast: {total:.3g} of {available:.3g} GiB ({listed}): {fits}{time}"


def forecast(
    config: DPOConfig,
    sizes: Sizes,
    device: Device,
    pairs: PairSample,
    speed: Speed | None,
    *,
    reference: bool = True,
) -> Forecast:
    """Return the forecast. A complete log-prob cache makes the `reference` unnecessary."""
    compiled = compiles(config, sizes, device, pairs.steps)
    memory = MemoryForecast(config, sizes, device, reference=reference, compiled=compiled)
    chosen = memory.chosen(pairs.sample, pairs.largest)
    work = memory.work(chosen, pairs.sample)
    packed = memory.pack(pairs.sample[0], chosen)
    share = 1 / memory.layout.dp
    seconds, evaluation = None, 0.0
    if speed is not None:
        own, seen = (
            Flops.of(b, sizes).times(share) for b in (packed, memory.pack_forward(pairs.sample[0]))
        )
        seconds = seconds_of_step(
            speed, own, seen if memory.with_reference else None, sizes, memory.layout,
            chosen.recompute, trained=memory.state().trained, adapter=memory.args.has_adapter,
            lean=config.precision == "lean", batches=work.batches,
        )  # fmt: skip
        forward = seen.layers / speed.forward + seen.head / speed.head
        evaluation = (
            forward / len(pairs.sample[0]) * pairs.held_out / (memory.layout.devices * share)
        )
    shared = memory.reference_bytes() > 0 or config.reference_is_policy
    apart = memory.with_reference and not shared
    return Forecast(
        config=config,
        device=device,
        layout=memory.layout.describe(),
        compiled=compiled,
        chosen=chosen,
        work=work,
        parts=memory.peak(chosen, work),
        reference_device=memory.own_reference_bytes() if apart else 0.0,
        pairs=pairs,
        step_tokens=sum(batch.real_tokens for batch in packed),
        seconds=seconds,
        evaluation_seconds=evaluation,
        speed=speed.source if speed else "",
        disk=disk_of(
            config, sizes, steps=pairs.steps, pairs=pairs.count + pairs.held_out,
            data=pairs.data_bytes, reference=memory.with_reference,
        ),
        disk_free=free_disk(config.run_dir),
    )  # fmt: skip


def compiles(config: DPOConfig, sizes: Sizes, device: Device, steps: int) -> bool:
    """Return whether workers compile; several devices do so only if it is set."""
    alone = device.kind == "cuda" and layout(config.actor_train).devices == 1
    if config.compile != "auto" or not alone:
        return config.compile == "on" and device.kind == "cuda"
    return worth_compiling(config, sizes.weights, steps)


def assumed_pairs(config: DPOConfig, why: str) -> PairSample:
    """Return one step of pairs as long as sequence_length allows, half of it prompt."""
    prompt, answer = (
        config.sequence_length // 2,
        config.sequence_length - config.sequence_length // 2,
    )
    draw = np.random.default_rng(0)

    def pair() -> TokenPair:
        ids = [draw.integers(0, 1 << 30, n).astype(np.int32) for n in (prompt, answer, answer)]
        scored = ((prompt, prompt + answer),)
        return TokenPair(ids[0], ids[1], ids[2], scored, scored)

    step = [pair() for _ in range(config.global_batch())]
    return PairSample(0, 0, config.max_steps or 0, 0.0, [step], step[0].tokens, assumed=why)
