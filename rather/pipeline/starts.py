"""starts.jsonl: one line per start of a run: command, machine, versions, source of each setting."""

from __future__ import annotations

import json
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

from rather.cluster.launch import mappings
from rather.config.inherit import value_at
from rather.config.keys import table
from rather.config.redaction import redact
from rather.config.run_config import DPOConfig
from rather.config.show import public_values
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
    try:
        if not step:
            file.unlink(missing_ok=True)
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "total_steps": total_steps,
            "command": redact(command()),
            "launcher": launcher(),
            "environment": environment(config, kind),
            "settings": settings(config),
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


def environment(config: DPOConfig, kind: str) -> JsonObject:
    import torch

    facts: JsonObject = {
        "devices": len({device for mapping in mappings(config) for device in mapping}),
        "device": kind,
        "hosts": int(os.environ.get("GROUP_WORLD_SIZE") or config.num_nodes),
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


def settings(config: DPOConfig) -> JsonObject:
    """Return every key that is not at its default, without secrets, and its source."""
    defaults = {path: key.default for path, key in table().items()}
    # As JSON gives them back, so that a path and its text are equal.
    values, defaults = json.loads(json.dumps([public_values(config), defaults], default=str))
    found = {}
    for path, key in table().items():
        value, default = value_at(values, path), defaults[path]
        has_parent = not key.parent or value_at(values, key.parent) is not None
        if has_parent and not key.section and value != default:
            inherited = config.followed.get(path)
            source = f"follows {inherited}" if inherited else "set in Python"
            source = config.sources.get(path, source)
            found[path] = {"value": value, "default": default, "from": source}
    return found
