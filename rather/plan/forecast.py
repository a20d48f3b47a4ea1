"""The forecast of a config on a kind of device: memory, time, disk."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rather.arithmetic import ceil_div
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, ModelArgs
from rather.config.strategies import layout
from rather.data.batch import TokenPair
from rather.model.budget import SHARE
from rather.model.layer_trial import LayerTrial, is_plain, try_layers
from rather.model.vision import PARTS
from rather.parallel.load import stored_dtype
from rather.plan.memory import Device, MemoryForecast, adapter_weights, trains_tower
from rather.plan.speed import GIB, Flops, Speed, StepSeconds, seconds_of_step, worth_compiling
from rather.reference.logprob_cache import RECORD

if TYPE_CHECKING:
    from rather.model.sizes import Shapes, Sizes

log = logging.getLogger(__name__)

SAMPLE = 2  # steps that are packed
DEEP = re.compile(r"\.deepstack_merger_list\.(\d+)\.")  # inner layers of Qwen3-VL's tower
CPU_GROWTH = "growth of the resident set since before the models were loaded"
CUDA_PEAK = "torch.cuda.max_memory_allocated without planning and the CUDA context (about 0.5 GiB)"
SAVED = {"exact": 12, "lean": 6}  # bytes of a weight with its moments in a checkpoint


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
    image_tokens: int = 0  # of different images
    assumed: str = ""  # why the data could not be read


class Forecast:
    """The forecast of one device of the policy; all are alike."""

    def __init__(
        self,
        config: DPOConfig,
        sizes: Sizes,
        device: Device,
        pairs: PairSample,
        speed: Speed | None,
        *,
        reference: bool = True,
    ) -> None:
        """A complete log-prob cache makes the `reference` unnecessary."""
        self.config, self.device, self.pairs, self.sizes = config, device, pairs, sizes
        self.compiled = compiles(config, sizes, device.kind, pairs.steps)
        memory = MemoryForecast(
            config,
            sizes,
            device,
            reference=reference,
            compiled=self.compiled,
            images=any(pair.images for step in pairs.sample for pair in step),
            layers=_tried_layers(config.actor_train, sizes, device.kind, pairs.sample),
        )
        self.layout, self.rehearses, step = memory.layout, memory.rehearses, pairs.sample[0]
        self.chosen = memory.chosen(pairs.sample, pairs.largest)
        self.work = memory.work(self.chosen, pairs.sample)
        self.parts = memory.peak(self.chosen, self.work)
        self.host = memory.state().on_host
        self.reference_device = 0.0 if config.shares_devices else memory.reference_bytes
        packed = memory.pack(step, self.chosen)
        self.step_tokens = sum(batch.real_tokens for batch in packed)
        self.seconds: StepSeconds | None = None
        self.run_seconds: float | None = None
        self.speed = speed.source if speed else ""
        if speed:
            policy = Flops.of(packed, sizes)
            forward = Flops.of(memory.pack_forward(step), sizes)
            self.seconds = seconds_of_step(
                memory, speed, policy, forward, self.chosen.recompute, self.work.batches
            )
            evaluation = forward.seconds(speed) / len(step) * pairs.held_out / self.layout.devices
            every = config.interval("eval_steps", pairs.steps)
            evaluations = 1 + max(1, pairs.steps // every if every else 0)
            self.run_seconds = pairs.steps * self.seconds.total + evaluations * evaluation
        self.disk = self._disk(with_reference=memory.with_reference)
        self.disk_free = free_disk(config.run_dir)

    def _disk(self, *, with_reference: bool) -> dict[str, float]:
        """Return the bytes of a run by purpose.

        While a checkpoint is written, those that are kept are still there.
        """
        config, sizes, pairs = self.config, self.sizes, self.pairs
        args = config.actor_train.model_args
        tower = sum(map(prod, sizes.tower.values()))  # is in every export
        each = checkpoint_bytes(args, config.precision, sizes.shapes)
        each += tower * SAVED[config.precision] if trains_tower(args) else 0
        model = (sizes.weights + tower) * sizes.stored
        every = config.interval("save_steps", pairs.steps)
        saves = max(1, ceil_div(pairs.steps, every)) if every else 1
        kept = min(saves, (config.max_ckpt_to_keep or saves) + 1)
        each += model if config.sync_ref_model else 0
        model += 4 * adapter_weights(args, sizes.shapes) if args.has_adapter else 0
        records = 2 * (pairs.count + pairs.held_out) if with_reference else 0  # of both answers
        disk: dict[str, float] = {
            "checkpoints": kept * each,
            "model": model * (2 if config.save_best else 1),
            "data": pairs.data_bytes,
            "reference": 2 * RECORD * records,  # in the cache and in the run's log
        }
        # The features of images are kept if no part of the tower changes.
        if (
            pairs.image_tokens
            and args.vision_cache == "auto"
            and set(args.frozen_parts) == set(PARTS)
        ):
            matches = map(DEEP.search, sizes.tower)
            rows = 1 + len({match[1] for match in matches if match})
            width = sizes.hidden * stored_dtype(args, self.device.kind).itemsize
            disk["image features"] = min(
                pairs.image_tokens * rows * width, args.vision_cache_gb * 1e9
            )
        return disk

    @property
    def fits(self) -> bool:
        available = self.device.memory * (1 if self.rehearses else SHARE)
        fits_host = self.host <= self.device.host
        return fits_host and self.chosen.fits and self.parts.total <= available

    @property
    def batch(self) -> str:
        """How many pairs a step has, and why."""
        training, pairs = self.config.actor_train.training_args, self.config.global_batch()
        if self.config.train_batch_size:
            return f"train_batch_size = {pairs} {self.config.unit} per step"
        size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
        return (
            f"{size} per device x {steps} accumulated x {self.layout.dp} data-parallel = {pairs} "
            f"{self.config.unit} per step"
        )

    def as_json(self) -> dict[str, Any]:
        chosen, work, pairs = self.chosen, self.work, self.pairs
        memory = {**asdict(self.parts), "total": self.parts.total}
        return {
            "fits": self.fits,
            "layout": self.layout.describe(),
            "weights": self.sizes.weights,
            "active_weights": self.sizes.active,
            "device": {"kind": self.device.kind, "memory_bytes": round(self.device.memory)},
            "memory_bytes": {name: round(number) for name, number in memory.items()},
            "host_bytes": round(self.host),
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
            "disk_bytes": {name: round(number) for name, number in self.disk.items()},
            "disk_free_bytes": self.disk_free,
            "counted": CPU_GROWTH if self.device.kind == "cpu" else CUDA_PEAK,
        }

    def line(self) -> str:
        """Return the forecast as one line for the console."""
        largest = sorted(asdict(self.parts).items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {number / GIB:.3g}" for name, number in largest)
        time = f"; {self.seconds.total:.3g} s per step" if self.seconds else ""
        total, available = self.parts.total / GIB, self.device.memory / GIB
        fits = "fits" if self.fits else "may NOT fit"
        return f"forecast: {total:.3g} of {available:.3g} GiB ({listed}): {fits}{time}"


def _tried_layers(
    actor: ActorConfig, sizes: Sizes, kind: str, steps: Sequence[Sequence[TokenPair]]
) -> LayerTrial | None:
    """Return what layers keep that the formulas do not know; None for those of plain decoders.

    Scans keep more or less of a token, depending on the lengths of a step: the most counts.
    """
    if is_plain(sizes):
        return None
    itemsize = stored_dtype(actor.model_args, kind).itemsize
    try:
        tried = partial(try_layers, actor.model_path, actor.model_args, kind, itemsize)
        return max(map(tried, steps), key=attrgetter("kept"))
    except Exception as error:  # a forecast must not end a run that could train
        log.warning(
            "%s: its layers cannot be tried without memory (%s); the forecast of memory is that of "
            "a plain decoder",
            actor.model_path,
            str(error).partition("\n")[0],
        )
        return None


def compiles(config: DPOConfig, sizes: Sizes, kind: str, steps: int) -> bool:
    """Return whether workers compile for so many steps; several devices only if it is set."""
    if kind != "cuda" or config.compile != "auto":
        return kind == "cuda" and config.compile == "on"
    is_alone = layout(config.actor_train).devices == 1
    return is_alone and worth_compiling(sizes.active, steps * config.tokens_per_step)


def assumed_pairs(length: int, count: int, steps: int | None, why: str) -> PairSample:
    """Return one step of `count` pairs as long as `length` allows, half of it prompt."""
    prompt = length // 2
    answer = length - prompt
    draw, scored = np.random.default_rng(0), ((prompt, length),)
    lengths = [(prompt, answer, answer)] * count
    ids = [[draw.integers(0, 1 << 30, n).astype(np.int32) for n in each] for each in lengths]
    step = [TokenPair(one, two, three, scored, scored) for one, two, three in ids]
    return PairSample(0, 0, steps or 0, 0.0, [step], step[0].tokens, assumed=why)


# --- disk ---


def checkpoint_bytes(args: ModelArgs, precision: str, shapes: Shapes) -> int:
    """Return the bytes of one checkpoint; with an adapter it holds only the adapter's weights."""
    trained = adapter_weights(args, shapes) if args.has_adapter else sum(map(prod, shapes.values()))
    return trained * SAVED[precision]


def free_disk(folder: Path) -> int:
    """Return the free bytes where the folder is, or will be made."""
    here = folder.expanduser().absolute()
    while not here.exists():
        here = here.parent
    return shutil.disk_usage(here).free
