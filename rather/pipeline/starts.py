"""starts.jsonl: one line per start of a run: command, machine, versions, source of each setting."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rather.config.redaction import redact
from rather.config.run_config import DPOConfig
from rather.config.show import changed_settings
from rather.files import JsonObject
from rather.run_folder.names import STARTS
from rather.tracking.json_lines import append_line

log = logging.getLogger(__name__)

PACKAGES = ("rather", "torch", "transformers", "tokenizers", "peft", "ray", "numpy", "pyarrow")
_version = cache(version)
CPU_NAME = re.compile(r"^(?:model name|Hardware)\s*:\s*(\S.*)$", re.MULTILINE | re.IGNORECASE)


def record_start(config: DPOConfig, kind: str, step: int, total_steps: int) -> None:
    """Append this start; a new run has no earlier ones. A failure never ends the run."""
    file = config.run_dir / STARTS
    devices = len({*config.actor_train.devices, *config.reference.devices})
    try:
        if not step:
            file.unlink(missing_ok=True)
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "total_steps": total_steps,
            "command": redact(command()),
            "launcher": launcher(),
            "environment": environment(kind, devices, config.num_nodes),
            "settings": changed_settings(config),
        }
        append_line(file, record)
    except Exception as error:
        log.warning("%s: this start was not recorded (%s: %s)", file, type(error).__name__, error)


def launcher() -> str:
    """Return how to start `rather` again in the same way."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return f"torchrun --nproc-per-node {ranks} -m rather" if ranks else "rather"


def command() -> str:
    """Return the command as it was typed, or the Python program that started the run."""
    name, *arguments = sys.argv
    if Path(name).name in ("rather", "__main__.py"):
        return f"{launcher()} {shlex.join(arguments)}"
    return shlex.join(["python", name, *arguments])


def environment(kind: str, devices: int, nodes: int) -> JsonObject:
    import torch

    facts: JsonObject = {
        "devices": devices,
        "device": kind,
        "hosts": int(os.environ.get("GROUP_WORLD_SIZE") or nodes),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    if kind == "cpu":
        with suppress(OSError):
            if model := CPU_NAME.search(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
                facts["device"] = model[1].strip()
        facts["threads"] = torch.get_num_threads()
    elif torch.cuda.is_available():  # a driver on Ray may have no GPU itself
        facts |= {"device": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = _version(name)
    return facts
