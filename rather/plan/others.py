"""Alternative settings for the same run: which would fit, and how fast they would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rather.config.load import config_from_dict
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.model.sizes import Sizes
from rather.plan.forecast import Forecast

STRATEGY, ARGS = "actor_train.strategy_args", "actor_train.model_args"
RECOMPUTE = f"{STRATEGY}.strategy_config.recompute_granularity"
TOKENS = "actor_train.max_tokens_per_microbatch_in_train"
LORA_RANK = 16

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


def changed(config: DPOConfig, change: Change) -> DPOConfig:
    """Return the config with some settings changed, checked like a file."""
    values = config.model_dump(exclude_unset=True)
    for key, value in change.items():
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config_from_dict(values)


def on_devices(config: DPOConfig, count: int) -> DPOConfig:
    """Return the config on `count` devices; a reference that shared its devices still does."""
    actor, reference = (
        config.actor_train.device_mapping or [0],
        config.reference.device_mapping or [0],
    )
    if len(actor) == count:
        return config
    change: dict[str, Any] = {"actor_train.device_mapping": list(range(count))}
    apart = len(reference) if reference != actor else 0
    change["reference.device_mapping"] = [count + i for i in range(apart)] or list(range(count))
    if config.num_gpus_per_node is not None:
        change |= {"num_nodes": 1, "num_gpus_per_node": count + apart}
    return changed(config, change)


def candidates(config: DPOConfig, sizes: Sizes, kind: str) -> Iterator[Change]:
    """Yield settings that change memory or speed; last those that change what is learned."""
    found = layout(config.actor_train)
    levels = [level for level in ("selective", "full") if level != found.recompute]
    if found.devices == 1:
        yield from _on_one(config, kind, levels)
    else:
        yield from _on_many(config, sizes, found.devices, levels)
    if not config.actor_train.model_args.has_adapter:
        yield {f"{ARGS}.lora_rank": LORA_RANK}
        if kind == "cuda" and found.devices == 1:
            yield {f"{ARGS}.lora_rank": LORA_RANK, f"{ARGS}.quantization": "4bit"}


def _on_one(config: DPOConfig, kind: str, levels: Sequence[str]) -> Iterator[Change]:
    given = config.actor_train.max_tokens_per_microbatch_in_train
    for tokens in (2048, 4096):
        if kind == "cpu" or (given and given > tokens):
            yield {TOKENS: tokens}
    for level in levels:
        yield {RECOMPUTE: level}
    if kind == "cpu":
        return
    if config.reference.offload != "on":
        yield {"reference.offload": "on"}
        yield {"reference.offload": "on", RECOMPUTE: "full"}
    if config.precision != "lean":
        yield {"precision": "lean"}
        yield {"precision": "lean", RECOMPUTE: "full"}


def _on_many(
    config: DPOConfig, sizes: Sizes, devices: int, levels: Sequence[str]
) -> Iterator[Change]:
    given = config.actor_train.max_tokens_per_microbatch_in_train
    yield from ({TOKENS: tokens} for tokens in (4096, 8192, 16384) if not given or given > tokens)
    degrees = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if devices % (tp * pp) == 0]
    for tp, pp in degrees:
        if sizes.heads % tp or sizes.key_heads % tp or sizes.layers < pp:
            continue
        sized = {
            f"{STRATEGY}.{axis}_size": size for axis, size in (("tp", tp), ("pp", pp)) if size > 1
        }
        for name in ("zero1", "zero2", "zero3") if devices > tp * pp else ("ddp",):
            yield {f"{STRATEGY}.strategy_name": name, **sized}
            for level in levels[:1]:
                yield {f"{STRATEGY}.strategy_name": name, **sized, RECOMPUTE: level}


def best(options: Sequence[Alternative], count: int = 6) -> list[Alternative]:
    """Return those that fit, fastest first; if none fits, those that need least memory."""
    fitting = [option for option in options if option.forecast.fits]
    if not fitting:
        return sorted(options, key=lambda option: option.forecast.parts.total)[:count]
    return sorted(fitting, key=_seconds_per_pair)[:count]


def _seconds_per_pair(option: Alternative) -> tuple[float, float]:
    """Return the sort key; of equally fast ones, the one that needs least memory is first."""
    found = option.forecast
    seconds = found.seconds.total / found.config.global_batch() if found.seconds else 0.0
    return float(f"{seconds:.2g}"), found.parts.total


def enough_devices(config: DPOConfig, judge: Judge) -> Alternative | None:
    """Return the fewest devices that hold the run if everything is divided among them."""
    for count in (2, 4, 8, 16, 32, 64):
        change = {f"{STRATEGY}.strategy_name": "zero3", RECOMPUTE: "full"}
        try:
            found = judge(on_devices(changed(config, change), count))
        except ConfigError:
            continue
        if found.fits:
            return Alternative({"actor_train.device_mapping": f"0-{count - 1}", **change}, found)
    return None


def alternatives(config: DPOConfig, sizes: Sizes, kind: str, judge: Judge) -> Iterator[Alternative]:
    """Yield the alternatives that the checks of the config accept."""
    for change in candidates(config, sizes, kind):
        try:
            yield Alternative(change, judge(changed(config, change)))
        except ConfigError:
            continue
