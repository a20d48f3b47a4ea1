"""The forecast of a config on a kind of device: memory, time, disk; and of other settings."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rather.arithmetic import ceil_div
from rather.config.load import changed
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, ActorModelArgs, ModelArgs
from rather.config.strategies import layout
from rather.data.batch import TokenPair
from rather.errors import ConfigError
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
DEEP = re.compile(r"\.deepstack_merger_list\.(\d+)\.")
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
    images: int = 0  # different ones
    image_tokens: int = 0  # of these
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
        tokens = pairs.steps * config.tokens_per_step
        self.compiled = compiles(config.compile, config.actor_train, sizes, device.kind, tokens)
        memory = MemoryForecast(
            config,
            sizes,
            device,
            reference=reference,
            compiled=self.compiled,
            images=any(pair.images for step in pairs.sample for pair in step),
            layers=_tried_layers(config.actor_train, sizes, device.kind, pairs.sample),
        )
        self.layout, step = memory.layout, pairs.sample[0]
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
            share = 1 / self.layout.dp
            own, seen = (
                Flops.of(b, sizes, share=share) for b in (packed, memory.pack_forward(step))
            )
            self.seconds = seconds_of_step(
                memory, speed, own, seen, self.chosen.recompute, self.work.batches
            )
            forward = seen.layers / speed.forward + seen.head / speed.head
            evaluation = forward / len(step) * pairs.held_out / (self.layout.devices * share)
            every = config.interval("eval_steps", pairs.steps)
            evaluations = 1 + max(1, pairs.steps // every if every else 0)
            self.run_seconds = pairs.steps * self.seconds.total + evaluations * evaluation
        everything = pairs.count + pairs.held_out if memory.with_reference else 0
        self.disk = self.disk_of(steps=pairs.steps, pairs=everything, data=pairs.data_bytes)
        if pairs.image_tokens and caches_features(config.actor_train.model_args):
            limit = config.actor_train.model_args.vision_cache_gb * 1e9
            rows = pairs.image_tokens * sizes.hidden * memory.compute * feature_layers(sizes)
            self.disk["image features"] = min(rows, limit)
        self.disk_free = free_disk(config.run_dir)

    def disk_of(self, *, steps: int, pairs: int, data: int) -> dict[str, float]:
        """Return the bytes of a run by purpose; `pairs` have reference log-probs.

        While a checkpoint is written, those that are kept are still there.
        """
        config, sizes = self.config, self.sizes
        args = config.actor_train.model_args
        tower = sum(map(prod, sizes.tower.values()))  # is in every export
        each = checkpoint_bytes(args, config.precision, sizes.shapes)
        each += tower * SAVED[config.precision] if trains_tower(args) else 0
        model = (sizes.weights + tower) * sizes.stored
        every = config.interval("save_steps", steps)
        saves = max(1, ceil_div(steps, every)) if every else 1
        kept = min(saves, (config.max_ckpt_to_keep or saves) + 1)
        each += model if config.sync_ref_model else 0
        model += 4 * adapter_weights(args, sizes.shapes) if args.has_adapter else 0
        return {
            "checkpoints": kept * each,
            "model": model * (2 if config.save_best else 1),
            "data": data,
            "reference": 2 * 2 * RECORD * pairs,  # both answers, in the cache and in the run's log
        }

    @property
    def fits(self) -> bool:
        fits_host = self.host <= self.device.host
        return fits_host and self.chosen.fits and self.parts.total <= self.device.memory

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


def caches_features(args: ActorModelArgs) -> bool:
    """Return whether the features of images are kept: those of a tower that does not change."""
    return args.vision_cache == "auto" and set(args.frozen_parts) == set(PARTS)


def feature_layers(sizes: Sizes) -> int:
    """Return how many rows an image token has: one, and those of inner layers (Qwen3-VL)."""
    return 1 + len({match[1] for name in sizes.tower if (match := DEEP.search(name))})


def compiles(choice: str, actor: ActorConfig, sizes: Sizes, kind: str, tokens: int) -> bool:
    """Return whether workers compile for so many tokens; several devices only if it is set."""
    is_alone = kind == "cuda" and layout(actor).devices == 1
    if choice != "auto" or not is_alone:
        return choice == "on" and kind == "cuda"
    return worth_compiling(sizes.active, tokens)


def assumed_pairs(length: int, count: int, steps: int | None, why: str) -> PairSample:
    """Return one step of `count` pairs as long as `length` allows, half of it prompt."""
    prompt = length // 2
    answer = length - prompt
    draw, scored = np.random.default_rng(0), ((prompt, prompt + answer),)
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


# --- other settings for the same run ---

STRATEGY, ARGS = "actor_train.strategy_args", "actor_train.model_args"
NAME = f"{STRATEGY}.strategy_name"
RECOMPUTE = f"{STRATEGY}.strategy_config.recompute_granularity"
TOKENS = "actor_train.max_tokens_per_microbatch_in_train"
LORA, FULL = {f"{ARGS}.lora_rank": 16}, {RECOMPUTE: "full"}

Change = Mapping[str, Any]
Judge = Callable[[DPOConfig], Forecast]


@dataclass(frozen=True)
class Alternative:
    """Settings to add to the command, and their forecast."""

    change: Change
    forecast: Forecast

    @property
    def overrides(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.change.items())

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort those that fit by speed, then by memory, and the others by memory."""
        found, seconds = self.forecast, 0.0
        if found.fits and found.seconds:
            seconds = float(f"{found.seconds.total / found.config.global_batch():.2g}")
        return not found.fits, seconds, found.parts.total


@dataclass(frozen=True)
class OtherSettings:
    """Settings that could replace some of a config's, judged by their forecasts."""

    config: DPOConfig
    sizes: Sizes
    kind: str
    judge: Judge

    def alternatives(self) -> Iterator[Alternative]:
        """Yield the alternatives that the checks of the config accept."""
        for change in self._candidates():
            try:
                yield Alternative(change, self.judge(changed(self.config, change)))
            except ConfigError:
                continue

    def enough_devices(self) -> Alternative | None:
        """Return the fewest devices that hold the run if everything is divided among them."""
        change = {NAME: "zero3", **FULL}
        for count in (2, 4, 8, 16, 32, 64):
            try:
                forecast = self.judge(changed(self.config, change | self.on_devices(count)))
            except ConfigError:
                continue
            if forecast.fits:
                devices = {"actor_train.device_mapping": f"0-{count - 1}"}
                return Alternative({**devices, **change}, forecast)
        return None

    def on_devices(self, count: int) -> dict[str, Any]:
        """Return the settings for `count` devices; roles that shared their devices still do."""
        config = self.config
        policy_devices = reference_devices = range(count)
        if not config.shares_devices:
            reference_devices = range(count, count + len(config.reference.devices))
        change: dict[str, Any] = {
            "actor_train.device_mapping": [*policy_devices],
            "reference.device_mapping": [*reference_devices],
        }
        if config.num_gpus_per_node is not None:
            change |= {"num_nodes": 1, "num_gpus_per_node": reference_devices.stop}
        return change

    def _candidates(self) -> Iterator[Change]:
        """Yield settings that change memory or speed; last those that change what is learned."""
        config, kind = self.config, self.kind
        divided = layout(config.actor_train)
        levels = [level for level in ("selective", "full") if level != divided.recompute]
        alone = divided.devices == 1
        chooses_tokens = alone and kind == "cuda"  # one GPU does so by itself
        tokens_set = config.actor_train.max_tokens_per_microbatch_in_train
        for tokens in (2048, 4096) if alone else (4096, 8192, 16384):
            if tokens_set > tokens if tokens_set else not chooses_tokens:
                yield {TOKENS: tokens}
        if alone:
            yield from ({RECOMPUTE: level} for level in levels)
            if kind == "cuda":
                yield from _smaller_on_one_gpu(config.reference.offload, config.precision)
        else:
            yield from _divisions(self.sizes, divided.devices, levels)
        args = config.actor_train.model_args
        if not args.has_adapter and args.freeze is None:  # an adapter trains no tower
            yield LORA
            if kind == "cuda" and alone:
                yield {**LORA, f"{ARGS}.quantization": "4bit"}


def _smaller_on_one_gpu(offload: str, precision: str) -> Iterator[Change]:
    if offload != "on":
        yield from ({"reference.offload": "on"}, {"reference.offload": "on", **FULL})
    if precision != "lean":
        yield from ({"precision": "lean"}, {"precision": "lean", **FULL})


def _divisions(sizes: Sizes, devices: int, levels: Sequence[str]) -> Iterator[Change]:
    """Yield the degrees of tensor and pipeline parallel that divide devices, heads and layers."""
    for tp, pp in product((1, 2, 4, 8), (1, 2, 4)):
        if devices % (tp * pp) or sizes.heads % tp or sizes.key_heads % tp or sizes.layers < pp:
            continue
        axes = {f"{STRATEGY}.tp_size": tp, f"{STRATEGY}.pp_size": pp}
        degrees = {key: size for key, size in axes.items() if size > 1}
        for name in ("zero1", "zero2", "zero3") if devices > tp * pp else ("ddp",):
            yield {NAME: name, **degrees}
            yield from ({NAME: name, **degrees, RECOMPUTE: level} for level in levels[:1])


def best(options: Sequence[Alternative], count: int = 6) -> list[Alternative]:
    """Return those that fit, fastest first; if none fits, those that need least memory."""
    fitting = [option for option in options if option.forecast.fits]
    return sorted(fitting or options, key=lambda option: option.rank)[:count]
