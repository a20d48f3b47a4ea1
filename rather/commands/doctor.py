"""`rather doctor`: is this machine ready to train, and if not, what to do?"""

from __future__ import annotations

import locale
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import Overrides, command, count, settings

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

GIB = 1 << 30
LITTLE_DISK, LITTLE_MEMORY = 10 * GIB, 4 * GIB
SHARED_MEMORY = 256 << 20  # a local Ray needs it
OPEN_FILES = 4096
FIRST_YEAR = 2025  # an earlier clock was never set; certificates and resumed runs would fail
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class Diagnosis(NamedTuple):
    """One line of the table: the fix is empty if the state is ok."""

    name: str
    state: str
    text: str
    fix: str


def check(name: str, good: bool, text: str, fix: str, state: str = "problem") -> Diagnosis:
    return Diagnosis(name, "ok" if good else state, text, "" if good else fix)


@command
def doctor_command(
    config: Annotated[
        Path | None, typer.Argument(help="Also check what the run of this YAML needs.")
    ] = None,
    overrides: Overrides = None,
) -> int:
    """Check this machine, and with a YAML what its run needs. Every problem comes with a fix."""
    found = list(diagnose(config, overrides))
    table = Table("check", "state", "found", "fix", header_style="bold")
    for each in found:
        state = Text(each.state, style=STYLES[each.state])
        table.add_row(each.name, state, Text(each.text), Text(each.fix))
    problems = sum(each.state == "problem" for each in found)
    console = Console(highlight=False)
    console.print(table, f"{count(len(found), 'check')}, {count(problems, 'problem')}", sep="\n")
    return 1 if problems else 0


def diagnose(path: Path | None = None, overrides: list[str] | None = None) -> Iterator[Diagnosis]:
    """Check the machine, then a config and its folders."""
    from rather.errors import RatherError

    config, folders = None, {Path.cwd(), Path(tempfile.gettempdir())}
    failure = ""
    if path:
        try:
            config = settings(path, overrides)
            cache = config.data_cache_dir(config.actor_train.data_args)
            folders = {config.run_dir, cache, config.log_dir}
        except RatherError as error:
            failure = str(error)
    yield from _machine()
    yield from _devices()
    for folder in sorted(folders):
        yield _disk(folder)
    if failure:
        yield check("config", False, failure, "see the line that it names")
    elif config:
        yield from _run(config)


def _machine() -> Iterator[Diagnosis]:
    import resource

    from rather.cluster.preflight import free_memory

    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield check("Python", sys.version_info >= (3, 11), system, "install Python 3.11 or newer")
    yield check_ray()
    free = free_memory()
    fix = "stop other programs, or raise the memory limit of the container"
    yield check("memory", free > LITTLE_MEMORY, f"{free / GIB:.1f} GiB free", fix, "warning")
    shm = Path("/dev/shm")  # of the system  # nosec B108
    free = shutil.disk_usage(shm).free if shm.exists() else 0
    text = f"{free / GIB:.2f} GiB free in {shm}"
    fix = "start the container with --shm-size=1g; Ray needs it"
    yield check("shared memory", free > SHARED_MEMORY, text, fix, "warning")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    fix = f"ulimit -n {OPEN_FILES}"
    yield check("open files", many, f"limit {soft} (at most {hard})", fix, "warning")
    failure = _loopback_failure()
    text = failure or "a port on 127.0.0.1 can be opened and reached"
    fix = "allow connections to 127.0.0.1 (firewall, container network)"
    yield check("loopback", not failure, text, fix)
    encoding = locale.getpreferredencoding(False)
    utf8 = encoding.lower().replace("-", "") in ("utf8", "cp65001")
    yield check("encoding", utf8, encoding, "export LC_ALL=C.UTF-8", "warning")
    now = time.gmtime()
    text, fix = time.strftime("%Y-%m-%d %H:%M UTC", now), "set the clock (timedatectl set-ntp true)"
    yield check("clock", now.tm_year >= FIRST_YEAR, text, fix)


def check_ray() -> Diagnosis:
    version = _installed("ray")
    text = version or "not installed: one device, or several with torchrun"
    fix = "pip install 'rather[ray]', or start several devices with torchrun"
    return check("Ray", bool(version), text, fix, "warning")


def _installed(package: str) -> str | None:
    """Return the version of a package that can be imported; a folder of that name is not one."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    try:
        return version_of(package)
    except PackageNotFoundError:  # installed under another name, like PyTorch's nightly Triton
        return "unknown version"


def _loopback_failure() -> str | None:
    """The board, and the ranks of one machine, connect there."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
        return None
    except OSError as error:
        return f"127.0.0.1: {error.strerror}"


def _devices() -> Iterator[Diagnosis]:
    try:
        import torch
    except ImportError as error:
        yield check("PyTorch", False, str(error), "pip install torch")
        return
    built = f"{torch.__version__}, built with {torch.version.cuda or 'no CUDA'}"
    yield check("PyTorch", True, f"{built}, {torch.get_num_threads()} threads", "")
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        text = "PyTorch cannot use the installed driver" if driver else "none: runs use the CPU"
        fix = "install a PyTorch built for the CUDA version that nvidia-smi shows"
        yield check("GPUs", not driver, text, fix, "warning")
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        text = f"{name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        fix = "another process uses it: nvidia-smi shows which"
        yield check(f"GPU {number}", free >= 0.9 * total, text, fix, "warning")
    old = torch.cuda.get_device_capability()[0] < 8
    flash = hasattr(torch.ops.aten, "_flash_attention_forward")
    good = not old and flash and torch.backends.cuda.is_flash_attention_available()
    why = "GPUs before Ampere have none" if old else "this PyTorch was built without it"
    text = "flash kernel" if good else f"no flash kernel ({why}): segments run one by one"
    yield check("attention", good, text, "use a newer GPU, or PyTorch's own wheel", "warning")
    triton = _installed("triton")
    text = triton or "not installed: head, optimizer and compiler need it"
    yield check("Triton", bool(triton), text, "pip install triton")


def _disk(folder: Path) -> Diagnosis:
    from rather.plan.disk import free_disk

    name, here = f"disk {folder}", folder.expanduser().absolute()
    while not here.exists():
        here = here.parent
    if not os.access(here, os.W_OK | os.X_OK):
        fix = "choose another folder, or change its permissions"
        return check(name, False, f"{here} cannot be written", fix)
    free = free_disk(folder)
    text, fix = f"{free / GIB:.1f} GiB free, writable", "free some space, or choose another folder"
    return check(name, free > LITTLE_DISK, text, fix, "warning")


def _run(config: DPOConfig) -> Iterator[Diagnosis]:
    """Compare what this run needs with this machine; `rather plan` knows more."""
    import torch

    from rather.config.checks import device_problems
    from rather.errors import RatherError
    from rather.model.sizes import sizes_of
    from rather.pipeline.run_summary import device_here
    from rather.plan.disk import disk_of, free_disk
    from rather.plan.state import role_state

    yield check("config", True, f"{config.exp_name}: all keys are known, all files exist", "")
    kind = "cuda" if config.platform != "cpu" and torch.cuda.is_available() else "cpu"
    if config.platform == "cuda" and kind == "cpu":
        text = "platform: cuda, but PyTorch finds no GPU"
        yield check("devices", False, text, "set platform: auto, or see the line about GPUs")
    for problem in device_problems(config, kind):
        yield check("devices", False, problem, "see the key that it names")
    actor = config.actor_train
    try:
        sizes = sizes_of(actor.model_path, actor.model_args)
        memory = device_here(config, kind).memory
    except RatherError as error:
        fix = "pass a folder with a config.json, or download the model"
        yield check("model", False, str(error), fix)
        return
    state = role_state(config, actor, kind, sizes.shapes, actor.model_args, narrow=True)
    needed = state.own + state.gathered
    text = f"weights and optimizer need {needed / GIB:.2f} of {memory / GIB:.1f} GiB"
    yield check("model", needed <= memory, text, "see the settings that `rather plan` suggests")
    room = disk_of(config, sizes, steps=1, pairs=0, data=0, reference=True).total
    free = free_disk(config.run_dir)
    text = f"a checkpoint and the model need {room / GIB:.2f} of {free / GIB:.1f} GiB"
    yield check("room", room <= free, text, "choose another output_dir")
