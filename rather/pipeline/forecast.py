"""The forecast of a run, made before its models are loaded, and what was measured beside it: plan.json."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import torch

from rather.cluster.launch import Roles
from rather.cluster.preflight import free_memory
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.model.sizes import sizes_of
from rather.pipeline.steps import PreparedSteps
from rather.plan.forecast import SAMPLE, Forecast, PairSample, compiles, forecast
from rather.plan.memory import Device
from rather.plan.speed import GPUS, listed_speed


def forecast_of(
    config: DPOConfig, source: PreparedSteps, roles: Roles, *, reference: bool
) -> Forecast | None:
    """None where the model's config tells no sizes: loading it says why. `reference`: whether its model is loaded."""
    args = config.actor_train.model_args
    try:
        sizes = sizes_of(config.actor_train.model_path, args)
    except ConfigError:
        return None
    pairs, device = pairs_of(source), _device_of(config, roles)
    name, speed = gpu_here(device.kind), None
    if name:
        speed = listed_speed(
            name, sizes.weights, compiled=compiles(config, sizes, device, pairs.steps)
        )
    return forecast(config, sizes, device, pairs, speed, reference=reference)


def pairs_of(source: PreparedSteps) -> PairSample:
    """Those of the first steps stand for all."""
    train, evals = source.data.train, source.data.evals
    files = {dataset.file.path for dataset in (train, *evals.values())}
    steps = range(min(SAMPLE, source.total_steps))
    return PairSample(
        count=len(train),
        held_out=sum(map(len, evals.values())),
        steps=source.total_steps,
        epochs=source.epoch_at(source.total_steps),
        sample=[source.pairs_after(step) for step in steps],
        largest=int(train.tokens.max()),
        data_bytes=sum(path.stat().st_size for path in files),
    )


def _device_of(config: DPOConfig, roles: Roles) -> Device:
    if roles.here or roles.kind == "cpu":
        return device_here(config, roles.kind)
    return Device(roles.kind, roles.gpu_memory)


def device_here(config: DPOConfig, kind: str) -> Device:
    """Of this machine: a GPU, or each rank's share of the host's free memory."""
    if kind == "cuda":
        return Device("cuda", torch.cuda.get_device_properties(0).total_memory)
    return Device("cpu", free_memory() / layout(config.actor_train).devices)


def gpu_here(kind: str) -> str | None:
    """The name under which data sheets are listed, where it is one of those."""
    if kind == "cpu" or not torch.cuda.is_available():
        return None
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(0).lower())
    told = {
        *words,
        *(one + other for one, other in pairwise(words)),
    }  # NVIDIA H200, GeForce RTX 4090
    return next((name for name in GPUS if name in told), None)


def compared(plan: Forecast, peak: int, pairs_per_second: float) -> dict[str, Any]:
    """The forecast with what was measured, and how far it was off."""
    whole = plan.as_json()
    seconds = plan.config.global_batch() / pairs_per_second if pairs_per_second else None
    measured: dict[str, Any] = {"memory_bytes": peak, "seconds_per_step": seconds}
    off = {"memory": plan.parts.total / peak - 1 if peak else None, "time": None}
    if plan.seconds and seconds:
        off["time"] = plan.seconds.total / seconds - 1
    return {**whole, "measured": measured, "error": off}
