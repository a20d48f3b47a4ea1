"""`rather plan`: does a run fit, how long will it take, and which settings are better?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer

from rather.arithmetic import ceil_div
from rather.cluster.group import device_kind
from rather.commands.terminal import echo, print_json, print_table
from rather.config.load import changed, load
from rather.config.paths import check_paths
from rather.config.plugins import did_you_mean, load_requested
from rather.config.run_config import DPOConfig
from rather.config.strategies import layout
from rather.data.prepare import prepare
from rather.errors import ConfigError, RatherError
from rather.model.sizes import Sizes, sizes_of
from rather.pipeline.run_summary import device_here, gpu_here, pairs_of
from rather.pipeline.steps import PreparedSteps
from rather.plan.forecast import Forecast, PairSample, assumed_pairs, compiles
from rather.plan.memory import Device
from rather.plan.others import Alternative, Change, alternatives, methods_of
from rather.plan.speed import GIB, GPUS, MORE, Speed, listed_speed, measured_speed

ROLES = ("actor_train", "reference")


def plan(
    file: Path, overrides: Sequence[str], gpus: int | None, gpu: str | None, *, as_json: bool
) -> None:
    """Print what a config needs, and other settings for the same run."""
    shared = [f"{role}.device_mapping=0-{gpus - 1}" for role in ROLES] if gpus else []
    config = load(file, [*overrides, *shared])
    load_requested()
    kind = device_kind(config.platform)
    if gpus and not gpu:
        _require_gpu("--gpus", kind)
    device = _listed_device(gpu) or device_here(
        kind, layout(config.actor_train).devices, config.num_gpus_per_node
    )
    sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
    pairs = _pairs(config)
    speed = _speed(config, sizes, device, gpu, pairs)

    def judge(change: Change) -> Forecast:
        other = changed(config, change) if change else config
        return Forecast(other, sizes, device, _for_batch(pairs, other), speed)

    forecast = judge({})
    others = alternatives(forecast, judge)
    sentence = verdict(forecast, others)
    if as_json:
        facts = {"verdict": sentence, "others": [other.as_json() for other in others]}
        return print_json({**forecast.as_json(), **facts})
    weights = f"{sizes.weights / 1e9:.3g}B weights"
    if sizes.experts:
        weights += f", {sizes.active / 1e9:.3g}B used by a token"
    print_table(("part", "size"), _sizes_of_parts(forecast), f"memory of each device; {weights}")
    echo("\n".join(_facts(forecast)))
    if others:
        fit = "fit" if others[0].forecast.fits else "do not fit either"
        names = ("other settings", "memory", "s per step", f"{config.unit}/s")
        print_table(names, map(_row, others), f"These {fit}:")
    typer.secho(sentence, fg="green" if forecast.fits else "red")


def print_methods(
    model: str, overrides: Sequence[str], gpus: int | None, gpu: str | None, *, as_json: bool
) -> None:
    """Print which ways to train a model fit one GPU, by the length of its pairs."""
    if overrides or gpus:
        raise ConfigError("--methods: takes a model and --gpu alone; for a YAML leave it out.")
    if not gpu:
        _require_gpu("--methods", device_kind("auto"))
    device = _listed_device(gpu) or device_here("cuda")
    methods = methods_of(model, device, gpu or gpu_here("cuda"))
    if as_json:
        entries = []
        for name, by_length in methods.items():
            for method in by_length:
                facts = {
                    "method": name,
                    "sequence_length": method.forecast.config.sequence_length,
                    "pairs_per_second": method.pairs_per_second,
                }
                entries.append({**facts, **method.as_json()})
        return print_json(entries)
    forecasts = [method.forecast for method in methods["full"]]
    headings = [f"{forecast.config.sequence_length:,} tokens" for forecast in forecasts]
    weights = forecasts[0].sizes.weights / 1e9
    title = f"{model}: {weights:.3g}B weights on {_size(device.memory)}; a forecast"
    rows = ([name, *map(_cell, by_length)] for name, by_length in methods.items())
    print_table(("method", *headings), rows, title)
    echo("memory, and pairs/s of pairs that long, half of it prompt; not compiled")


def verdict(own: Forecast, others: Sequence[Alternative]) -> str:
    """Return one sentence; if the run does not fit, with the settings to type."""
    available, needed = _size(own.device.memory), _size(own.parts.total)
    if own.fits:
        return f"fits: {needed} of {available} on each device."
    text = f"does not fit: needs {needed} per device, available {available}"
    if own.host > own.device.host:
        text += f"; needs {_size(own.host)} of host memory per rank, available "
        text += _size(own.device.host)
    if others and others[0].forecast.fits:
        return f"{text}; try {others[0].overrides}"
    return f"{text}; try more devices (--gpus), or a smaller model, sequence_length or batch."


def _require_gpu(option: str, kind: str) -> None:
    if kind == "cpu":
        raise ConfigError(
            f"{option}: PyTorch finds no GPU here; choose a model with --gpu, such as --gpu h100."
        )


def _listed_device(gpu: str | None) -> Device | None:
    if gpu is None:
        return None
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: unknown{did_you_mean(gpu, GPUS)}")
    return Device("cuda", GPUS[gpu].gib * GIB)


def _pairs(config: DPOConfig) -> PairSample:
    """Return the pairs as they are trained on; without them, the longest possible ones."""
    try:
        check_paths(config)
        return pairs_of(PreparedSteps.of(config, prepare(config)))
    except RatherError as error:
        why = str(error).splitlines()[0]
        return assumed_pairs(config.sequence_length, config.global_batch(), config.max_steps, why)


def _for_batch(pairs: PairSample, config: DPOConfig) -> PairSample:
    """Return the same pairs in steps of another size; repeated pairs share no prompt."""
    pairs_per_step, step = config.global_batch(), pairs.sample[0]
    if pairs_per_step == len(step):
        return pairs
    copies = range(ceil_div(pairs_per_step, len(step)))
    repeated = [replace(pair, prompt=pair.prompt + copy) for copy in copies for pair in step]
    steps = max(1, round(pairs.steps * len(step) / pairs_per_step))
    return replace(pairs, sample=[repeated[:pairs_per_step]], steps=steps)


def _speed(
    config: DPOConfig, sizes: Sizes, device: Device, gpu: str | None, pairs: PairSample
) -> Speed | None:
    """Measure the speed of a device that is here; otherwise, or if compiled, use its data sheet."""
    compiled = compiles(config, sizes, device.kind, pairs.steps)
    name = gpu or (gpu_here(device.kind) if compiled else None)
    if name:
        return listed_speed(name, sizes.active, compiled=compiled)
    timed = sizes.in_layers / sizes.layers * MORE + 2 * sizes.of_head
    if 8 * timed > device.memory:  # weights and gradients
        return None
    chosen = Forecast(config, sizes, device, pairs, None).chosen
    return measured_speed(config.actor_train, sizes, pairs.sample[0], chosen, device.kind)


def _sizes_of_parts(own: Forecast) -> list[tuple[str, str]]:
    sizes = {**asdict(own.parts), "total": own.parts.total, "available": own.device.memory}
    elsewhere = {
        "host memory of each rank": own.host,
        "reference on its own devices": own.reference_device,
    }
    sizes |= {name: size for name, size in elsewhere.items() if size}
    return [(name, _size(size)) for name, size in sizes.items()]


def _facts(own: Forecast) -> Iterator[str]:
    """Yield everything but memory, line by line."""
    chosen, pairs = own.chosen, own.pairs
    yield f"layout: {own.layout.describe()}; {'' if own.compiled else 'not '}compiled"
    micro_batches = (
        f"micro-batches: {own.work.batches} per step and rank of up to {chosen.tokens} tokens, "
        f"recompute {chosen.recompute}"
    )
    if chosen.parked:
        micro_batches += ", reference offloaded to the host between its turns"
    if chosen.narrow:
        micro_batches += ", gradients summed in bfloat16"
    yield micro_batches
    yield f"batch: {own.batch}, {own.step_tokens} tokens"
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
    files = ", ".join(f"{name} {_size(size)}" for name, size in own.disk.items())
    total = sum(own.disk.values())
    short = "; NOT ENOUGH, choose another output_dir or a smaller max_ckpt_to_keep"
    enough = "" if total <= own.disk_free else short
    yield f"disk: {_size(total)} ({files}) of {_size(own.disk_free)} free{enough}"


def _row(other: Alternative) -> tuple[str, ...]:
    seconds = other.forecast.seconds
    size = _size(other.forecast.parts.total)
    if not seconds:
        return other.overrides, size, "", ""
    return other.overrides, size, f"{seconds.total:.3g}", f"{other.pairs_per_second:.3g}"


def _cell(method: Alternative) -> str:
    size, host = _size(method.forecast.parts.total), method.forecast.host
    if host:
        size += f" + host {_size(host)}"
    if not method.forecast.fits:
        return f"no: {size}"
    rate = method.pairs_per_second
    return f"{size}, {rate:.2g}/s" if rate else size


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / (1 << 20):.1f} MiB"
