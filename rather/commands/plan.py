"""`rather plan`: does a run fit, how long will it take, and which settings are better?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rather.commands.terminal import (
    AsJson,
    ConfigPath,
    Imports,
    Overrides,
    command,
    make_table,
    print_json,
)

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig
    from rather.plan.forecast import Forecast, PairSample
    from rather.plan.memory import Device
    from rather.plan.others import Alternative
    from rather.plan.speed import Speed

GIB = 1 << 30


@command
def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs for both roles; default: the config.", min=1)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU model, such as h100 or l4; default: this machine.")
    ] = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Forecast memory, time and disk of a run, and of other settings, before anything starts.

    Only config.json of the model is read. If the files of the pairs are here, they are tokenised as
    for training.
    """
    from rather.config.load import load
    from rather.config.plugins import load_requested
    from rather.model.sizes import sizes_of
    from rather.plan.forecast import forecast
    from rather.plan.others import alternatives, best, enough_devices

    roles = ("actor_train", "reference") if gpus else ()
    shared = [f"{role}.device_mapping=0-{(gpus or 1) - 1}" for role in roles]
    settings = load(config, [*(overrides or []), *shared]).config
    load_requested()
    device = _device(settings, gpu, gpus)
    sizes = sizes_of(settings.actor_train.model_path, settings.actor_train.model_args)
    pairs = _pairs(settings)
    speed = _speed(settings, sizes, device, gpu, pairs)

    def judge(other: DPOConfig) -> Forecast:
        return forecast(other, sizes, device, _for_batch(pairs, other), speed)

    own = judge(settings)
    ways = best(list(alternatives(settings, sizes, device.kind, judge)))
    fits = own.fits or any(way.forecast.fits for way in ways)
    more = enough_devices(settings, judge) if device.kind == "cuda" and not fits else None
    said = verdict(own, ways, more)
    if as_json:
        others = [{"settings": dict(way.change), **way.forecast.as_json()} for way in ways]
        print_json({**own.as_json(), "verdict": said, "others": others})
    else:
        show(own, ways, said, Console())


def _device(config: DPOConfig, gpu: str | None, gpus: int | None) -> Device:
    from rather.cluster.local import device_kind
    from rather.config.plugins import did_you_mean
    from rather.errors import ConfigError
    from rather.pipeline.run_summary import device_here
    from rather.plan.memory import Device
    from rather.plan.speed import GPUS

    if gpu is not None:
        if gpu.lower() not in GPUS:
            raise ConfigError(f"--gpu {gpu}: unknown{did_you_mean(gpu.lower(), tuple(GPUS))}")
        return Device("cuda", GPUS[gpu.lower()].gib * GIB)
    kind = device_kind(config.platform)
    if gpus and kind == "cpu":
        raise ConfigError(
            "--gpus: PyTorch finds no GPU here; choose a model with --gpu, such as --gpu h100."
        )
    return device_here(config, kind)


def _pairs(config: DPOConfig) -> PairSample:
    """Return the pairs of the run if they can be tokenised here, else the longest possible ones."""
    from rather.config.paths import check_paths
    from rather.data.prepare import prepare
    from rather.errors import RatherError
    from rather.pipeline.run_summary import pairs_of
    from rather.pipeline.steps import PreparedSteps
    from rather.plan.forecast import assumed_pairs

    try:
        check_paths(config)
        return pairs_of(PreparedSteps.of(config, prepare(config)))
    except RatherError as error:
        return assumed_pairs(config, str(error).splitlines()[0])


def _for_batch(pairs: PairSample, config: DPOConfig) -> PairSample:
    """Return the same pairs in steps of another size; repeated pairs share no prompt."""
    wanted, step = config.global_batch(), pairs.sample[0]
    if wanted == len(step):
        return pairs
    copies = range(-(-wanted // len(step)))
    repeated = [replace(pair, prompt=pair.prompt + copy) for copy in copies for pair in step]
    steps = max(1, round(pairs.steps * len(step) / wanted))
    return replace(pairs, sample=[repeated[:wanted]], steps=steps)


def _speed(
    config: DPOConfig, sizes: Any, device: Device, gpu: str | None, pairs: PairSample
) -> Speed:
    """Measure the speed of a device that is here; otherwise, or if compiled, use its data sheet."""
    from rather.pipeline.run_summary import gpu_here
    from rather.plan.calibrate import measured_speed
    from rather.plan.forecast import compiles, forecast
    from rather.plan.speed import listed_speed

    compiled = compiles(config, sizes, device, pairs.steps)
    name = gpu.lower() if gpu else gpu_here(device.kind)
    if gpu or (compiled and name):
        assert name is not None
        return listed_speed(name, sizes.weights, compiled=compiled)
    actor, chosen = config.actor_train, forecast(config, sizes, device, pairs, None).chosen
    model, step = (actor.model_path, actor.model_args, sizes), pairs.sample[0]
    return measured_speed(*model, step, chosen.tokens, device.kind, chosen.recompute)


def verdict(own: Forecast, ways: Sequence[Alternative], more: Alternative | None) -> str:
    """Return one sentence; if the run does not fit, with the settings to type."""
    available, needed = size(own.device.memory), size(own.parts.total)
    if own.fits:
        return f"fits: {needed} of {available} on each device."
    text = f"does not fit: needs {needed} per device, available {available}"
    if fitting := [way for way in ways if way.forecast.fits]:
        return f"{text}; try {fitting[0].overrides}"
    if more:
        return f"{text}; no other setting helps, try more devices: {more.overrides}"
    return f"{text}; try a smaller model, sequence_length or per-device batch."


def show(own: Forecast, ways: Sequence[Alternative], said: str, console: Console) -> None:
    table = make_table("memory of each device", "part", "size")
    for name, number in asdict(own.parts).items():
        table.add_row(name, size(number))
    table.add_section()
    table.add_row("total", size(own.parts.total))
    table.add_row("available", size(own.device.memory))
    console.print(table)
    console.print(Text("\n".join(facts(own))), soft_wrap=True)
    others = make_table("other settings", "settings", "memory", "s per step", "pairs/s", "")
    for way in ways:
        found = way.forecast
        seconds = found.seconds.total if found.seconds else float("nan")
        speed = found.config.global_batch() / seconds
        fits = "fits" if found.fits else "does not fit"
        numbers = size(found.parts.total), f"{seconds:.3g}", f"{speed:.3g}"
        others.add_row(Text(way.overrides), *numbers, fits)
    if ways:
        console.print(others)
    console.print(Text(said, style="bold green" if own.fits else "bold red"), soft_wrap=True)


def facts(own: Forecast) -> list[str]:
    """Return everything but memory, line by line."""
    chosen, work, pairs, disk = own.chosen, own.work, own.pairs, own.disk
    host = ", reference offloaded to the host between its turns" if chosen.parked else ""
    narrow = ", gradients summed in bfloat16" if chosen.narrow else ""
    lines = [
        f"layout: {own.layout}; {'compiled' if own.compiled else 'not compiled'}; micro-batches of "
        f"up to {chosen.tokens} tokens, recompute {chosen.recompute}{host}{narrow}",
        f"batch: {own.batch}; {own.step_tokens} tokens in {work.batches} micro-batches per rank; the "
        f"largest has {work.tokens} tokens, {work.rows} of them scored",
    ]
    if pairs.assumed:
        lines.append(
            "assumed: all pairs are as long as sequence_length allows, because " + pairs.assumed
        )
    else:
        lines.append(f"run: {pairs.count} pairs x {pairs.epochs:g} epochs = {pairs.steps} steps")
    if own.seconds:
        minutes, seconds = divmod(round(own.run_seconds or 0), 60)
        hours, minutes = divmod(minutes, 60)
        whole = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        run = f", {whole} for the run" if pairs.steps else ""
        lines.append(f"time: {own.seconds.total:.3g} s per step{run} ({own.speed})")
    if own.reference_device:
        lines.append(
            f"reference: {size(own.reference_device)} of weights on each of its own devices"
        )
    parts = ", ".join(f"{name} {size(number)}" for name, number in asdict(disk).items())
    short = "; NOT ENOUGH, choose another output_dir or a smaller max_ckpt_to_keep"
    enough = "" if disk.total <= own.disk_free else short
    lines.append(f"disk: {size(disk.total)} ({parts}) of {size(own.disk_free)} free{enough}")
    return lines


def size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / (1 << 20):.1f} MiB"
