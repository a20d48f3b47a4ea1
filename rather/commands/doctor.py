"""The command `rather doctor`: is this machine fit to train, and what would make it so?"""

from __future__ import annotations

import locale
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import Overrides, guarded

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

GIB = 1 << 30
PYTHON = (3, 11)
LITTLE_DISK, LITTLE_MEMORY = 10 * GIB, 4 * GIB
SHARED_MEMORY = 256 << 20  # a local Ray needs it
OPEN_FILES = 4096
FIRST_YEAR = 2025  # a clock before it was never set: certificates and resumed runs suffer
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class Finding(NamedTuple):
    """One line of the table; an ok one needs no fix."""

    name: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""


def doctor_command(
    config: Annotated[
        Path | None, typer.Argument(help="Also check what this YAML needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine, and with a YAML what its run needs: ok, warning or problem, each with its fix."""
    raise typer.Exit(guarded(partial(_doctor, config, overrides or [])))


def _doctor(path: Path | None, overrides: list[str]) -> int:
    console = Console()
    found = list(findings(path, overrides))
    table = Table(header_style="bold")
    for name in ("check", "state", "found", "fix"):
        table.add_column(name, overflow="fold")
    for each in found:
        table.add_row(
            each.name, Text(each.state, style=STYLES[each.state]), Text(each.text), Text(each.fix)
        )
    console.print(table)
    problems = [each.name for each in found if each.state == "problem"]
    console.print(f"{len(found)} checks, {len(problems)} problems", highlight=False)
    return 1 if problems else 0


def findings(path: Path | None = None, overrides: list[str] | None = None) -> Iterator[Finding]:
    """Of the machine; then of a config, whose folders are looked at too."""
    settings, refused = _settings(path, overrides or []) if path else (None, None)
    folders = {Path.cwd(), Path(tempfile.gettempdir())}
    if settings:
        folders = {
            settings.run_dir,
            settings.data_cache_dir(settings.actor_train.data_args),
            settings.log_dir,
        }
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python, _torch, _gpus, _attention, _ray, _memory, _shared_memory, _open_files, _loopback, _encoding, _clock,
        partial(_disks, sorted(folders)),
    ]  # fmt: skip
    for check in checks:
        yield from check()
    if refused:
        yield refused
    if settings:
        yield from _run(settings)


# --- the machine ---


def _python() -> Iterator[Finding]:
    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= PYTHON
    yield Finding(
        "Python", "ok" if good else "problem", told, "" if good else "install Python 3.11 or newer"
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("PyTorch", "problem", str(error), "pip install torch")
        return
    built = torch.version.cuda or "no CUDA"
    yield Finding(
        "PyTorch",
        "ok",
        f"{torch.__version__}, built with {built}, {torch.get_num_threads()} threads",
    )


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        if driver:
            fix = "install a PyTorch that is built for this driver's CUDA (nvidia-smi names it)"
            yield Finding("GPUs", "warning", "a driver is here, and PyTorch cannot use it", fix)
        else:
            yield Finding("GPUs", "ok", "none: runs use the CPU")
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        told = (
            f"{torch.cuda.get_device_name(number)}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        )
        if free < 0.9 * total:
            yield Finding(
                f"GPU {number}", "warning", told, "another process uses it: nvidia-smi names it"
            )
        else:
            yield Finding(f"GPU {number}", "ok", told)


def _attention() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("attention", "ok", "segments one by one on the CPU")
        return
    major, _ = torch.cuda.get_device_capability()
    flash = (
        hasattr(torch.ops.aten, "_flash_attention_forward")
        and torch.backends.cuda.is_flash_attention_available()
    )
    if flash and major >= 8:
        flex = (
            ", flex attention is here too" if find_spec("torch.nn.attention.flex_attention") else ""
        )
        yield Finding("attention", "ok", f"flash kernel for segments of any length{flex}")
    else:
        why = (
            "GPUs before Ampere have no flash kernel"
            if major < 8
            else "this PyTorch was built without it"
        )
        fix = "use a newer GPU, or PyTorch's own wheel"
        yield Finding(
            "attention", "warning", f"no flash kernel ({why}): segments run one by one", fix
        )
    if version := _installed("triton"):
        yield Finding("Triton", "ok", version)
    else:
        yield Finding(
            "Triton",
            "problem",
            "not here: head, optimizer and compiler need it",
            "pip install triton",
        )


def _ray() -> Iterator[Finding]:
    if version := _installed("ray"):
        yield Finding("Ray", "ok", f"{version} can be imported")
    else:
        fix = "pip install ray, or start several devices with torchrun"
        yield Finding("Ray", "warning", "not here: one device, or torchrun", fix)


def _installed(package: str) -> str | None:
    """Its version, where it can be imported; a folder of that name looks like a package, too."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    try:
        return version_of(package)
    except PackageNotFoundError:  # installed under another name, as PyTorch's nightly Triton is
        return "some version"


def _memory() -> Iterator[Finding]:
    from rather.cluster.preflight import free_memory

    free = free_memory()
    fix = "" if free > LITTLE_MEMORY else "end other programs, or raise the container's limit"
    yield Finding("memory", "warning" if fix else "ok", f"{free / GIB:.1f} GiB free", fix)


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")  # of the system  # nosec B108
    free = shutil.disk_usage(place).free if place.exists() else 0
    fix = (
        ""
        if free > SHARED_MEMORY
        else "start the container with --shm-size=1g; without it Ray has no store"
    )
    yield Finding(
        "shared memory", "warning" if fix else "ok", f"{free / GIB:.2f} GiB free in {place}", fix
    )


def _open_files() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    fix = f"ulimit -n {OPEN_FILES}" if few else ""
    yield Finding("open files", "warning" if few else "ok", f"limit {soft} (at most {hard})", fix)


def _loopback() -> Iterator[Finding]:
    """Ranks of one machine and the board meet there."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5),
        ):
            yield Finding("loopback", "ok", "a port on 127.0.0.1 can be opened and reached")
    except OSError as error:
        fix = "allow connections to 127.0.0.1 (firewall, container network)"
        yield Finding("loopback", "problem", f"127.0.0.1: {error.strerror}", fix)


def _encoding() -> Iterator[Finding]:
    found = locale.getpreferredencoding(False)
    good = found.lower().replace("-", "") in ("utf8", "cp65001")
    fix = "" if good else "export LC_ALL=C.UTF-8"
    yield Finding("encoding", "ok" if good else "warning", found, fix)


def _clock() -> Iterator[Finding]:
    now = time.gmtime()
    good = now.tm_year >= FIRST_YEAR
    told = time.strftime("%Y-%m-%d %H:%M UTC", now)
    fix = "" if good else "set the clock (timedatectl set-ntp true)"
    yield Finding("clock", "problem" if fix else "ok", told, fix)


def _disks(folders: list[Path]) -> Iterator[Finding]:
    from rather.plan.disk import free_disk

    for folder in folders:
        name, here = f"disk {folder}", folder.expanduser().absolute()
        while not here.exists():
            here = here.parent
        if not os.access(here, os.W_OK | os.X_OK):
            yield Finding(
                name,
                "problem",
                f"{here} cannot be written",
                "choose another folder, or change its rights",
            )
            continue
        free = free_disk(folder)
        fix = "" if free > LITTLE_DISK else "make room, or choose another folder"
        yield Finding(name, "warning" if fix else "ok", f"{free / GIB:.1f} GiB free, writable", fix)


# --- a config ---


def _settings(path: Path, overrides: list[str]) -> tuple[DPOConfig | None, Finding | None]:
    from rather.commands.terminal import settings
    from rather.errors import RatherError

    try:
        return settings(path, overrides), None
    except RatherError as error:
        return None, Finding("config", "problem", str(error), "see the line that it names")


def _run(config: DPOConfig) -> Iterator[Finding]:
    """What this run needs of this machine."""
    import torch

    from rather.config.checks import device_problems
    from rather.errors import RatherError

    yield Finding("config", "ok", f"{config.exp_name}: every key is known, every file is there")
    kind = "cuda" if config.platform != "cpu" and torch.cuda.is_available() else "cpu"
    if config.platform == "cuda" and kind == "cpu":
        fix = "set platform: auto, or see the line about GPUs"
        yield Finding(
            "devices",
            "problem",
            "platform: cuda, and this machine has no GPU that PyTorch can use",
            fix,
        )
    for problem in device_problems(config, kind):
        yield Finding("devices", "problem", problem, "see the key that it names")
    try:
        yield from _needs(config, kind)
    except RatherError as error:
        yield Finding(
            "model", "problem", str(error), "name a folder with a config.json, or download it"
        )


def _needs(config: DPOConfig, kind: str) -> Iterator[Finding]:
    """State and disk alone; `rather plan` tells the rest."""
    from rather.model.sizes import sizes_of
    from rather.pipeline.forecast import device_here
    from rather.plan.disk import disk_of, free_disk
    from rather.plan.state import state_of

    actor = config.actor_train
    sizes, there = sizes_of(actor.model_path, actor.model_args), device_here(config, kind).memory
    state = state_of(config, actor, kind, sizes.shapes, actor.model_args, narrow=True)
    needed = state.own + state.gathered
    told = f"weights and optimizer {needed / GIB:.2f} of {there / GIB:.1f} GiB"
    short = needed > there
    yield Finding(
        "model",
        "problem" if short else "ok",
        told,
        "rather plan names settings that fit" if short else "",
    )
    room, free = (
        disk_of(config, sizes, steps=1, pairs=0, data=0, reference=True).total,
        free_disk(config.run_dir),
    )
    told = f"a checkpoint and the model take {room / GIB:.2f} of {free / GIB:.1f} GiB"
    yield Finding(
        "room",
        "problem" if room > free else "ok",
        told,
        "choose another output_dir" if room > free else "",
    )
