"""The command `rather plan`: will it fit, how long will it take, and what else would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import ConfigPath, Imports, Overrides, guarded, print_json

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig
    from rather.plan.forecast import Forecast, Pairs
    from rather.plan.memory import Device
    from rather.plan.others import Way
    from rather.plan.speed import Speed

GIB = 1 << 30


def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs that both roles share; else the config's.", min=1)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Kind of GPU, such as h100 or l4; else this machine's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    imports: Imports = None,
) -> None:
    """Forecast memory by part, time and disk of a run, for its layout and for others, before anything starts.

    Of the model only its config.json is read. The pairs are tokenised, as training would, where their files are here.
    """
    raise typer.Exit(guarded(partial(_plan, config, overrides or [], gpus, gpu, as_json)))


def _plan(
    path: Path, overrides: list[str], gpus: int | None, gpu: str | None, as_json: bool
) -> int:
    from rather.config.load import load
    from rather.config.plugins import load_requested
    from rather.model.sizes import sizes_of
    from rather.plan.forecast import forecast
    from rather.plan.others import best, enough_devices, ways_of

    shared = (
        [f"{role}.device_mapping=0-{gpus - 1}" for role in ("actor_train", "reference")]
        if gpus
        else []
    )
    settings = load(path, [*overrides, *shared]).config
    load_requested()
    device = _device(settings, gpu, gpus)
    sizes = sizes_of(settings.actor_train.model_path, settings.actor_train.model_args)
    pairs = _pairs(settings)
    speed = _speed(settings, sizes, device, gpu, pairs)

    def judge(other: DPOConfig) -> Forecast:
        return forecast(other, sizes, device, _for_batch(pairs, other), speed)

    own = judge(settings)
    ways = best(list(ways_of(settings, sizes, device.kind, judge)))
    more = (
        enough_devices(settings, judge) if device.kind == "cuda" and not _fit(own, ways) else None
    )
    said = verdict(own, ways, more)
    if as_json:
        others = [{"settings": dict(way.change), **way.forecast.as_json()} for way in ways]
        print_json({**own.as_json(), "verdict": said, "others": others})
    else:
        show(own, ways, said, Console())
    return 0


def _fit(own: Forecast, ways: Sequence[Way]) -> bool:
    return own.fits or any(way.forecast.fits for way in ways)


# --- what is asked ---


def _device(config: DPOConfig, gpu: str | None, gpus: int | None) -> Device:
    from rather.cluster.local import device_kind
    from rather.config.plugins import did_you_mean
    from rather.errors import ConfigError
    from rather.pipeline.forecast import device_here
    from rather.plan.memory import Device
    from rather.plan.speed import GPUS

    if gpu is not None:
        if gpu.lower() not in GPUS:
            raise ConfigError(f"--gpu {gpu}: is not listed{did_you_mean(gpu.lower(), tuple(GPUS))}")
        return Device("cuda", GPUS[gpu.lower()].gib * GIB)
    kind = device_kind(config.platform)
    if gpus and kind == "cpu":
        raise ConfigError(
            "--gpus: this machine has no GPU that PyTorch can use; name a kind with --gpu, such as h100."
        )
    return device_here(config, kind)


def _pairs(config: DPOConfig) -> Pairs:
    """The run's own, where they can be tokenised here; else as long as they may be."""
    from rather.config.paths import check_paths
    from rather.data.prepare import prepare
    from rather.errors import RatherError
    from rather.pipeline.forecast import pairs_of
    from rather.pipeline.steps import PreparedSteps
    from rather.plan.forecast import assumed_pairs

    try:
        check_paths(config)
        return pairs_of(PreparedSteps.of(config, prepare(config)))
    except RatherError as error:
        return assumed_pairs(config, str(error).splitlines()[0])


def _for_batch(pairs: Pairs, config: DPOConfig) -> Pairs:
    """The same pairs in steps of another size, where a layout changes it; of what comes twice nothing is shared."""
    wanted, step = config.global_batch(), pairs.sample[0]
    if wanted == len(step):
        return pairs
    copies = range(-(-wanted // len(step)))
    repeated = [replace(pair, prompt=pair.prompt + copy) for copy in copies for pair in step][
        :wanted
    ]
    return replace(pairs, sample=[repeated], steps=max(1, round(pairs.steps * len(step) / wanted)))


def _speed(config: DPOConfig, sizes: Any, device: Device, gpu: str | None, pairs: Pairs) -> Speed:
    """Of a device that is here, measured now; of one that is not, or of compiled layers, by its data sheet."""
    from rather.pipeline.forecast import gpu_here
    from rather.plan.calibrate import measured_speed
    from rather.plan.forecast import compiles, forecast
    from rather.plan.speed import listed_speed

    compiled = compiles(config, sizes, device, pairs.steps)
    name = gpu.lower() if gpu else gpu_here(device.kind)
    if gpu or (compiled and name):
        assert name is not None
        return listed_speed(name, sizes.weights, compiled=compiled)
    actor, chosen = config.actor_train, forecast(config, sizes, device, pairs, None).chosen
    sample = pairs.sample[0]
    return measured_speed(
        actor.model_path,
        actor.model_args,
        sizes,
        sample,
        chosen.tokens,
        device.kind,
        chosen.recompute,
    )


# --- what is told ---


def verdict(own: Forecast, ways: Sequence[Way], more: Way | None) -> str:
    """One sentence; where it does not fit, with the settings to type."""
    there, needed = size(own.device.memory), size(own.parts.total)
    if own.fits:
        return f"fits: {needed} of {there} on each device."
    told = f"does not fit: {needed} are needed and a device has {there}"
    fitting = [way for way in ways if way.forecast.fits]
    if fitting:
        return f"{told}; try {fitting[0].typed}"
    if more:
        return f"{told}; no setting alone helps, try more devices: {more.typed}"
    return f"{told}; nothing that was tried fits: use a smaller model, sequence_length or per-device batch."


def show(own: Forecast, ways: Sequence[Way], said: str, console: Console) -> None:
    table = Table(title="memory of each device", title_justify="left", header_style="bold")
    table.add_column("part")
    table.add_column("size", justify="right")
    for name, number in asdict(own.parts).items():
        table.add_row(name, size(number))
    table.add_section()
    table.add_row("together", size(own.parts.total))
    table.add_row("there", size(own.device.memory))
    console.print(table)
    for line in facts(own):
        console.print(Text(line), soft_wrap=True)
    if ways:
        console.print(_others(ways))
    console.print(Text(said, style="bold green" if own.fits else "bold red"), soft_wrap=True)


def facts(own: Forecast) -> list[str]:
    """Everything but memory, line by line."""
    chosen, work, pairs, disk = own.chosen, own.work, own.pairs, own.disk
    host = ", reference on the host between its turns" if chosen.parked else ""
    narrow = ", gradients added up in bfloat16" if chosen.narrow else ""
    lines = [
        f"layout: {own.layout}; {'compiled' if own.compiled else 'not compiled'}; micro-batches of up to "
        f"{chosen.tokens} tokens, recompute {chosen.recompute}{host}{narrow}",
        f"batch: {own.batch}; {own.step_tokens} tokens in {work.batches} micro-batches a rank, the largest of "
        f"{work.tokens} tokens, {work.rows} of them scored",
    ]
    if pairs.assumed:
        lines.append(
            f"assumed: all pairs are as long as sequence_length allows. Why: {pairs.assumed}"
        )
    else:
        lines.append(f"run: {pairs.count} pairs x {pairs.epochs:g} epochs = {pairs.steps} steps")
    if own.seconds:
        run = f", {_duration(own.run_seconds or 0)} the run" if pairs.steps else ""
        lines.append(f"time: {own.seconds.total:.3g} s a step{run} ({own.speed})")
    if own.reference_device:
        lines.append(
            f"reference: {size(own.reference_device)} of weights on each of its own devices"
        )
    parts = ", ".join(f"{name} {size(number)}" for name, number in asdict(disk).items())
    short = "; that is NOT ENOUGH, choose another output_dir or a smaller max_ckpt_to_keep"
    enough = "" if disk.total <= own.disk_free else short
    lines.append(f"disk: {size(disk.total)} ({parts}) of {size(own.disk_free)} free{enough}")
    return lines


def _others(ways: Sequence[Way]) -> Table:
    table = Table(title="other settings", title_justify="left", header_style="bold")
    table.add_column("settings", overflow="fold")
    for name in ("memory", "s a step", "pairs/s", ""):
        table.add_column(name, justify="right")
    for way in ways:
        found = way.forecast
        seconds = found.seconds.total if found.seconds else float("nan")
        speed = found.config.global_batch() / seconds
        fits = "fits" if found.fits else "does not fit"
        table.add_row(
            Text(way.typed), size(found.parts.total), f"{seconds:.3g}", f"{speed:.3g}", fits
        )
    return table


def size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / (1 << 20):.1f} MiB"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
