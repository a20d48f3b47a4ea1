"""Forecasts of other settings: for the run of a config, and for one GPU the ways to train a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

from rather.config.load import changed, config_from_dict
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.check import check_length
from rather.model.sizes import Sizes, config_of, sizes_of
from rather.plan.forecast import Forecast, assumed_pairs
from rather.plan.memory import Device
from rather.plan.speed import listed_speed

BATCH = "actor_train.training_args.per_device_train_batch_size"
STRATEGY, ARGS = "actor_train.strategy_args", "actor_train.model_args"
NAME = f"{STRATEGY}.strategy_name"
RECOMPUTE = f"{STRATEGY}.strategy_config.recompute_granularity"
TOKENS = "actor_train.max_tokens_per_microbatch_in_train"
FULL, LEAN, LORA = {RECOMPUTE: "full"}, {"precision": "lean"}, {f"{ARGS}.lora_rank": 16}
LORA_4_BITS = {**LORA, f"{ARGS}.quantization": "4bit"}
MOST = 6  # alternatives that are listed

Change = Mapping[str, Any]

METHODS: Mapping[str, Change] = {
    "full": {},
    "full, state on the host": {NAME: "zero2_cpu"},
    "full, lean": LEAN,
    "LoRA": LORA,
    "LoRA on 4-bit weights": LORA_4_BITS,
}
LENGTHS = (2048, 8192, 32_768, 131_072)  # tokens of a prompt with one answer
STEP_TOKENS = 65_536  # a step has as many pairs of a length as make so many tokens, at least one


@dataclass(frozen=True)
class Alternative:
    """Settings to add to the command, and their forecast."""

    change: Change
    forecast: Forecast

    @property
    def overrides(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.change.items())

    @property
    def pairs_per_second(self) -> float | None:
        seconds = self.forecast.seconds
        return self.forecast.config.global_batch() / seconds.total if seconds else None

    @property
    def sort_key(self) -> tuple[float, float]:
        """Return a key that sorts those that fit by speed, then memory, and others by memory."""
        rate = self.pairs_per_second if self.forecast.fits else None
        return -float(f"{rate or 0:.2g}"), self.forecast.parts.total

    @property
    def trained_settings(self) -> tuple[object, ...]:
        """Return the settings that change the trained weights."""
        config = self.forecast.config
        args = config.actor_train.model_args
        return config.global_batch(), config.precision, args.lora_rank, args.quantization

    def as_json(self) -> dict[str, Any]:
        return {"settings": dict(self.change), **self.forecast.as_json()}


def alternatives(own: Forecast, judge: Callable[[Change], Forecast]) -> list[Alternative]:
    """Return other settings that fit, fastest first; if none fits, those that need least memory.

    Settings that are neither faster nor smaller than others that train the same are left out.
    """
    unchanged = Alternative({}, own)
    options = [unchanged]
    for change in _candidates(own):
        with suppress(ConfigError):  # a combination that the checks of the config refuse
            options.append(Alternative(change, judge(change)))
    fitting = [option for option in options if option.forecast.fits]
    least: dict[tuple[object, ...], float] = {}  # bytes, by what is trained
    better = []
    for option in sorted(fitting or options, key=lambda option: option.sort_key):
        size = option.forecast.parts.total
        if size < least.get(option.trained_settings, inf):
            least[option.trained_settings] = size
            better.append(option)
    return [option for option in better if option is not unchanged][:MOST]


def _candidates(own: Forecast) -> Iterator[Change]:
    """Yield settings that change memory or speed; last those that change what is learned."""
    config, divided, is_gpu = own.config, own.layout, own.device.kind == "cuda"
    levels = [level for level in ("selective", "full") if level != divided.recompute]
    alone = divided.devices == 1
    highest = config.actor_train.max_tokens_per_microbatch_in_train
    if highest is None:
        highest = 0 if alone and is_gpu else 1 << 20  # one GPU chooses by itself
    budgets = (2048, 4096) if alone else (4096, 8192, 16384)
    yield from ({TOKENS: tokens} for tokens in budgets if tokens < highest)
    if alone:
        yield from ({RECOMPUTE: level} for level in levels)
        smaller = [{"reference.offload": "on"}, LEAN] if is_gpu else []
        for change in smaller:
            yield change
            yield {**change, **FULL}
    else:
        yield from _divisions(own.sizes, divided.devices, levels)
    args = config.actor_train.model_args
    if not args.has_adapter and args.freeze is None:  # an adapter trains no tower
        yield LORA
        if is_gpu and alone:
            yield LORA_4_BITS


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


def methods_of(model: str, device: Device, gpu: str | None) -> Mapping[str, list[Alternative]]:
    """Return the methods, each at all lengths that the model can be trained on.

    Only its config.json is read.
    """
    sizes = sizes_of(model, ModelArgs())
    speed = listed_speed(gpu, sizes.active, compiled=False) if gpu else None
    lengths = [length for length in LENGTHS if _is_possible(model, length)]
    if not lengths:
        raise ConfigError(f"{model}: it cannot be trained on {LENGTHS[0]} tokens")
    data_args = {"file_name": "pairs.jsonl"}
    values = {"exp_name": "plan", "pretrain": model, "compile": "off"}
    config = config_from_dict({**values, "actor_train": {"data_args": data_args}})

    def judge(change: Change, length: int) -> Alternative:
        count = max(1, STEP_TOKENS // length)
        pairs = assumed_pairs(length, count, None, "no file was given")
        sized = {"sequence_length": length, BATCH: count}
        return Alternative(
            change, Forecast(changed(config, {**change, **sized}), sizes, device, pairs, speed)
        )

    methods = {}
    for name, change in METHODS.items():
        methods[name] = [judge(change, length) for length in lengths]
    return methods


def _is_possible(model: str, length: int) -> bool:
    with suppress(ConfigError):
        check_length(config_of(model, ModelArgs()), length)
        return True
    return False
