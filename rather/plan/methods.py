"""What fits one GPU: ways to train a model, by the length of its pairs, from config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rather.config.load import config_from_dict
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.check import check_length
from rather.model.sizes import config_of, sizes_of
from rather.plan.forecast import Forecast, assumed_pairs
from rather.plan.memory import Device
from rather.plan.speed import Speed, listed_speed

LENGTHS = (2048, 8192, 32_768, 131_072)  # tokens of a prompt with one answer
STEP_TOKENS = 65_536  # a step has as many pairs of a length as make so many tokens, at least one
ADAPTER = {"actor_train.model_args": {"lora_rank": 16}}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full, state on the host": {"actor_train.strategy_args": {"strategy_name": "zero2_cpu"}},
    "full, lean": {"precision": "lean"},
    "LoRA": ADAPTER,
    "LoRA on 4-bit weights": {
        "actor_train.model_args": {**ADAPTER["actor_train.model_args"], "quantization": "4bit"}
    },
}


@dataclass(frozen=True)
class Method:
    """One way to train pairs of one length, and its forecast."""

    name: str
    settings: Mapping[str, Any]
    length: int
    forecast: Forecast

    @property
    def pairs_per_second(self) -> float | None:
        seconds = self.forecast.seconds
        return self.forecast.config.global_batch() / seconds.total if seconds else None


def methods_of(model: str, device: Device, gpu: str | None) -> Iterator[Method]:
    """Yield the methods at all lengths that the model can be trained on."""
    sizes = sizes_of(model, ModelArgs())
    speed: Speed | None = listed_speed(gpu, sizes.active, compiled=False) if gpu else None
    lengths = [length for length in LENGTHS if _is_possible(model, length)]
    if not lengths:
        raise ConfigError(f"{model}: it cannot be trained on {LENGTHS[0]} tokens")
    for name, settings in METHODS.items():
        for length in lengths:
            config = config_from_dict(_values(model, length, settings))
            pairs = assumed_pairs(length, config.global_batch(), None, "no file was given")
            yield Method(name, settings, length, Forecast(config, sizes, device, pairs, speed))


def _is_possible(model: str, length: int) -> bool:
    with suppress(ConfigError):
        check_length(config_of(model, ModelArgs()), length)
        return True
    return False


def _values(model: str, length: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "exp_name": "plan",
        "pretrain": model,
        "sequence_length": length,
        "compile": "off",
        "actor_train": {
            "data_args": {"file_name": "pairs.jsonl"},
            "training_args": {"per_device_train_batch_size": max(1, STEP_TOKENS // length)},
        },
    }
    for key, value in settings.items():
        role, _, section = key.partition(".")
        if section:
            values[role][section] = value
        else:
            values[role] = value
    return values
