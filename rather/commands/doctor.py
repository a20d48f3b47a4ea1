"""`rather doctor`: is this machine ready to train, and if not, what to do?"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import NamedTuple

from rather.commands.terminal import (
    MaybeFile,
    Overrides,
    command,
    count,
    echo,
    print_table,
    settings,
)
from rather.errors import ConfigError, RatherError
from rather.tracking.trackers import is_installed

GIB = 1 << 30
LITTLE_DISK, LITTLE_MEMORY = 10 * GIB, 4 * GIB
SHARED_MEMORY = GIB // 4  # a local Ray needs it
OPEN_FILES = 4096


class Diagnosis(NamedTuple):
    """One line of the table: the fix is empty if the state is ok."""

    name: str
    state: str
    text: str
    fix: str


def check(name: str, good: bool, text: str, fix: str = "", state: str = "problem") -> Diagnosis:
    return Diagnosis(name, "ok" if good else state, text, "" if good else fix)


@command
def doctor_command(
    config: MaybeFile = None,
    overrides: Overrides = None,
) -> int:
    """Check this machine, and with a YAML what its run needs. Every problem comes with a fix.

    config: Also check what the run of this YAML needs.
    """
    diagnoses = list(diagnose(config, overrides))
    print_table(("check", "state", "found", "fix"), diagnoses)
    problems = sum(diagnosis.state == "problem" for diagnosis in diagnoses)
    echo(f"{count(len(diagnoses), 'check')}, {count(problems, 'problem')}")
    return 1 if problems else 0


def diagnose(path: Path | None = None, overrides: list[str] | None = None) -> Iterator[Diagnosis]:
    """Check a config, the machine and the folders of the run; see `rather plan` for its needs."""
    folders = {Path.cwd(), Path(tempfile.gettempdir())}
    try:
        if path:
            config = settings(path, overrides)
            cache = config.data_cache_dir(config.actor_train.data_args)
            folders = {config.run_dir, cache, config.log_dir}
            from rather.cluster.group import device_kind
            from rather.config.checks import device_problems

            if problems := device_problems(config, device_kind(config.platform)):
                raise ConfigError(problems)
            yield check("config", True, "keys are known, files and devices exist")
    except RatherError as error:
        yield check("config", False, str(error), "see the line that it names")
    yield from _machine()
    yield from map(_disk, sorted(folders))


def _machine() -> Iterator[Diagnosis]:
    import torch

    from rather.cluster.memory import free_memory
    from rather.model.attention import flash_attention_4

    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield check("Python", True, system)
    ray = installed("ray")
    text = ray or "not installed: one device, or several with torchrun"
    fix = "pip install 'rather[ray]', or start several devices with torchrun"
    yield check("Ray", bool(ray), text, fix, "warning")
    free = free_memory()
    fix = "stop other programs, or raise the memory limit of the container"
    yield check("memory", free > LITTLE_MEMORY, f"{free / GIB:.1f} GiB free", fix, "warning")
    shm = Path("/dev/shm")  # of the system  # nosec B108
    free = shutil.disk_usage(shm).free if shm.exists() else 0
    text, fix = f"{free / GIB:.2f} GiB free in {shm}", "start the container with --shm-size=1g"
    yield check("shared memory", free > SHARED_MEMORY, text, fix, "warning")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    fix = f"ulimit -n {OPEN_FILES}"
    yield check("open files", enough, f"limit {soft} (at most {hard})", fix, "warning")
    built = f"{torch.__version__}, built with {torch.version.cuda or 'no CUDA'}"
    yield check("PyTorch", True, f"{built}, threads: {torch.get_num_threads()}")
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
    flash = hasattr(torch.ops.aten, "_flash_attention_forward")
    good = flash and torch.backends.cuda.is_flash_attention_available()
    good = good and torch.cuda.get_device_capability()[0] >= 8
    text = "torch's flash kernel" if good else "no flash kernel: segments run one by one"
    if good and flash_attention_4(torch.device("cuda"), 128):
        text = "FlashAttention 4"
    fix = "use a GPU since Ampere with PyTorch's own wheel"
    yield check("attention", good, text, fix, "warning")
    triton = installed("triton")
    text = triton or "not installed: head, optimizer and compiler need it"
    yield check("Triton", bool(triton), text, "pip install triton")


def installed(package: str) -> str | None:
    """Return the version of a package that can be imported."""
    try:
        return version_of(package) if is_installed(package) else None
    except PackageNotFoundError:  # installed under another name, like PyTorch's nightly Triton
        return "unknown version"


def _disk(folder: Path) -> Diagnosis:
    from rather.plan.forecast import free_disk

    name, existing = f"disk {folder}", folder.expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        return check(name, False, f"{existing} cannot be written", "choose another folder")
    free = free_disk(folder)
    text, fix = f"{free / GIB:.1f} GiB free, writable", "free some space, or choose another folder"
    return check(name, free > LITTLE_DISK, text, fix, "warning")
