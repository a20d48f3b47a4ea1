"""`rather plan`: does a run fit, how long will it take, and which settings are better?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import typer

from rather.cluster.group import device_kind
from rather.commands.terminal import echo, print_json, print_table
from rather.config.load import load
from rather.config.paths import check_paths
from rather.config.plugins import did_you_mean, load_requested
from rather.config.run_config import DPOConfig
from rather.config.strategies import layout
from rather.data.prepare import prepare
from rather.errors import ConfigError, RatherError
from rather.model.sizes import Sizes, sizes_of
from rather.pipeline.run_summary import device_here, gpu_here, pairs_of
from rather.pipeline.steps import PreparedSteps
from rather.plan.forecast import (
    Alternative,
    Forecast,
    OtherSettings,
    PairSample,
    assumed_pairs,
    best,
    compiles,
)
from rather.plan.memory import Device, trains_tower
from rather.plan.methods import Method, methods_of
from rather.plan.speed import GPUS, MORE, Speed, listed_speed, measured_speed

GIB = 1 << 30
ROLES = ("actor_train", "reference")


def plan(
    file: Path, overrides: Sequence[str], gpus: int | None, gpu: str | None, *, as_json: bool
) -> None:
    """Print what a config needs, and other settings for the same run."""
    shared = [f"{role}.device_mapping=0-{gpus - 1}" for role in ROLES] if gpus else []
    config = load(file, [*overrides, *shared])
    load_requested()
    name = gpu.lower() if gpu else None
    if gpus and not name and device_kind(config.platform) == "cpu":
        raise ConfigError(
            "--gpus: PyTorch finds no GPU here; choose a model with --gpu, such as --gpu h100."
        )
    devices, of_machine = layout(config.actor_train).devices, config.num_gpus_per_node
    kind = device_kind(config.platform)
    device = _named(name) if name else device_here(kind, devices, of_machine)
    sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
    try:
        check_paths(config)
        pairs = pairs_of(PreparedSteps.of(config, prepare(config)))
    except RatherError as error:  # without the pairs, the longest possible ones
        pairs = assumed_pairs(
            config.sequence_length,
            config.global_batch(),
            config.max_steps,
            str(error).splitlines()[0],
        )
    speed = _speed(config, sizes, device, name, pairs)

    def judge(other: DPOConfig) -> Forecast:
        return Forecast(other, sizes, device, _for_batch(pairs, other), speed)

    forecast = judge(config)
    others = OtherSettings(config, sizes, device.kind, judge)
    ways = best(list(others.alternatives()))
    fits = forecast.fits or any(way.forecast.fits for way in ways)
    more_devices = others.enough_devices() if device.kind == "cuda" and not fits else None
    sentence = verdict(forecast, ways, more_devices)
    if as_json:
        other_settings = [{"settings": dict(way.change), **way.forecast.as_json()} for way in ways]
        return print_json({**forecast.as_json(), "verdict": sentence, "others": other_settings})
    memory_parts = {
        **asdict(forecast.parts),
        "total": forecast.parts.total,
        "available": forecast.device.memory,
    }
    sizes_of_parts = [
        (name_of_part, _size(number)) for name_of_part, number in memory_parts.items()
    ]
    print_table(("part", "size"), sizes_of_parts, "memory of each device")
    echo("\n".join(_facts(forecast)))
    if ways:
        names = ("other settings", "memory", "s per step", f"{config.unit}/s", "fits")
        print_table(names, [_row(way) for way in ways])
    typer.secho(sentence, fg="green" if forecast.fits else "red")


def print_methods(
    model: str, overrides: Sequence[str], gpus: int | None, gpu: str | None, *, as_json: bool
) -> None:
    """Print which ways to train a model fit one GPU, by the length of its pairs."""
    if overrides or gpus:
        raise ConfigError("--methods: takes a model and --gpu alone; for a YAML leave it out.")
    name, device = _chosen_gpu(gpu)
    methods = list(methods_of(model, device, name))
    if as_json:
        return print_json([_as_json(method) for method in methods])
    lengths = list(dict.fromkeys(method.length for method in methods))
    rows = []
    for way in dict.fromkeys(method.name for method in methods):
        rows.append((way, *(_cell(method) for method in methods if method.name == way)))
    weights = methods[0].forecast.sizes.weights / 1e9
    title = f"{model}: {weights:.3g}B weights on {_size(device.memory)}; a forecast"
    print_table(("method", *(f"{length:,} tokens" for length in lengths)), rows, title)
    echo("memory, and pairs/s of pairs that long, half of it prompt; not compiled")


def _chosen_gpu(gpu: str | None) -> tuple[str | None, Device]:
    """Return the GPU that was named, or the one that is here; without a name if it is unknown."""
    if gpu:
        return gpu.lower(), _named(gpu.lower())
    if device_kind("auto") == "cpu":
        raise ConfigError(
            "--methods: PyTorch finds no GPU here; choose a model with --gpu, such as --gpu h100."
        )
    return gpu_here("cuda"), device_here("cuda")


def _cell(method: Method) -> str:
    size, host = _size(method.forecast.parts.total), method.forecast.host
    if host:
        size += f" + host {_size(host)}"
    if not method.forecast.fits:
        return f"no: {size}"
    rate = method.pairs_per_second
    return f"{size}, {rate:.2g}/s" if rate else size


def _as_json(method: Method) -> dict[str, Any]:
    return {
        "method": method.name,
        "settings": dict(method.settings),
        "sequence_length": method.length,
        "fits": method.forecast.fits,
        "memory_bytes": round(method.forecast.parts.total),
        "host_bytes": round(method.forecast.host),
        "recompute": method.forecast.chosen.recompute,
        "pairs_per_second": method.pairs_per_second,
    }


def _named(gpu: str) -> Device:
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: unknown{did_you_mean(gpu, GPUS)}")
    return Device("cuda", GPUS[gpu].gib * GIB)


def _row(way: Alternative) -> tuple[str, ...]:
    """Return an alternative as a row of the table."""
    forecast = way.forecast
    seconds = forecast.seconds.total if forecast.seconds else float("nan")
    rate = forecast.config.global_batch() / seconds
    memory, fits = _size(forecast.parts.total), "yes" if forecast.fits else "no"
    return way.overrides, memory, f"{seconds:.3g}", f"{rate:.3g}", fits


def _for_batch(pairs: PairSample, config: DPOConfig) -> PairSample:
    """Return the same pairs in steps of another size; repeated pairs share no prompt."""
    pairs_per_step, step = config.global_batch(), pairs.sample[0]
    if pairs_per_step == len(step):
        return pairs
    copies = range(-(-pairs_per_step // len(step)))
    repeated = [replace(pair, prompt=pair.prompt + copy) for copy in copies for pair in step]
    steps = max(1, round(pairs.steps * len(step) / pairs_per_step))
    return replace(pairs, sample=[repeated[:pairs_per_step]], steps=steps)


def _speed(
    config: DPOConfig, sizes: Sizes, device: Device, gpu: str | None, pairs: PairSample
) -> Speed | None:
    """Measure the speed of a device that is here; otherwise, or if compiled, use its data sheet."""
    tokens = pairs.steps * config.tokens_per_step
    compiled = compiles(config.compile, config.actor_train, sizes, device.kind, tokens)
    name = gpu or (gpu_here(device.kind) if compiled else None)
    if name:
        return listed_speed(name, sizes.active, compiled=compiled)
    timed = sizes.in_layers / sizes.layers * MORE + 2 * sizes.of_head
    if 8 * timed > device.memory:  # weights and gradients
        return None
    chosen = Forecast(config, sizes, device, pairs, None).chosen
    return measured_speed(config.actor_train, sizes, pairs.sample[0], chosen, device.kind)


def verdict(own: Forecast, ways: Sequence[Alternative], more: Alternative | None) -> str:
    """Return one sentence; if the run does not fit, with the settings to type."""
    available, needed = _size(own.device.memory), _size(own.parts.total)
    if own.fits:
        return f"fits: {needed} of {available} on each device."
    text = f"does not fit: needs {needed} per device, available {available}"
    if own.host > own.device.host:
        text += f"; needs {_size(own.host)} of host memory per rank, available "
        text += _size(own.device.host)
    if fitting := [way for way in ways if way.forecast.fits]:
        return f"{text}; try {fitting[0].overrides}"
    if more:
        return f"{text}; no other setting helps, try more devices: {more.overrides}"
    return f"{text}; try a smaller model, sequence_length or per-device batch."


def _facts(own: Forecast) -> Iterator[str]:
    """Yield everything but memory, line by line."""
    chosen, work, pairs, disk = own.chosen, own.work, own.pairs, own.disk
    host = ", reference offloaded to the host between its turns" if chosen.parked else ""
    narrow = ", gradients summed in bfloat16" if chosen.narrow else ""
    compiled = "compiled" if own.compiled else "not compiled"
    yield (
        f"layout: {own.layout.describe()}; {compiled}; micro-batches of up to {chosen.tokens} "
        f"tokens, recompute {chosen.recompute}{host}{narrow}"
    )
    active = f", {own.sizes.active / 1e9:.3g}B used by a token" if own.sizes.experts else ""
    yield f"model: {own.sizes.weights / 1e9:.3g}B weights{active}"
    if pairs.images:
        tower = sum(map(prod, own.sizes.tower.values())) / 1e9
        state = "trained" if trains_tower(own.config.actor_train.model_args) else "frozen"
        yield (
            f"images: {pairs.images} different ones, {pairs.image_tokens / pairs.images:.4g} "
            f"tokens each; vision and projector {tower:.3g}B weights, {state}"
        )
    yield f"batch: {own.batch}; {own.step_tokens} tokens in {work.batches} micro-batches per rank"
    if pairs.assumed:
        long = f"all {own.config.unit} are as long as sequence_length allows"
        yield f"assumed: {long}, because {pairs.assumed}"
    else:
        rows = f"{pairs.count} {own.config.unit}"
        yield f"run: {rows} x {pairs.epochs:g} epochs = {pairs.steps} steps"
    if own.seconds:
        run = f", {(own.run_seconds or 0) / 60:.3g} minutes for the run" if pairs.steps else ""
        yield f"time: {own.seconds.total:.3g} s per step{run} ({own.speed})"
    else:
        yield f"time: unknown; {MORE} layers of the model do not fit here and cannot be timed"
    if own.host:
        yield f"host: {_size(own.host)} of optimizer state and gradients in host memory per rank"
    if own.reference_device:
        size = _size(own.reference_device)
        yield f"reference: {size} of weights on each of its own devices"
    sizes_of_files = ", ".join(f"{name} {_size(number)}" for name, number in disk.items())
    total = sum(disk.values())
    short = "; NOT ENOUGH, choose another output_dir or a smaller max_ckpt_to_keep"
    enough = "" if total <= own.disk_free else short
    yield f"disk: {_size(total)} ({sizes_of_files}) of {_size(own.disk_free)} free{enough}"


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / (1 << 20):.1f} MiB"
