"""starts.jsonl: how each start of a run began, one line each: command, machine, versions, where settings came from."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rather.cluster.launch import mappings
from rather.config.inherit import value_at
from rather.config.keys import table
from rather.config.masking import public_values
from rather.config.redaction import redact
from rather.config.schema import DPOConfig
from rather.run_folder.layout import STARTS
from rather.tracking.json_lines import append_line

log = logging.getLogger(__name__)

PACKAGES = ("rather", "torch", "transformers", "tokenizers", "peft", "ray", "numpy", "pyarrow")
CPU_NAMES = ("model name", "Model name", "Hardware")


def note_start(config: DPOConfig, kind: str, step: int, total_steps: int) -> None:
    """Appends this start; a run that begins has no earlier ones. Nothing relies on it, so no failure ends the run."""
    file = config.run_dir / STARTS
    try:
        if not step:
            file.unlink(missing_ok=True)
        append_line(file, _record(config, kind, step, total_steps))
    except Exception as error:
        log.warning("%s: this start is not told there (%s: %s)", file, type(error).__name__, error)


def _record(config: DPOConfig, kind: str, step: int, total_steps: int) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "total_steps": total_steps,
        "command": redact(command()),
        "launcher": launcher(),
        "environment": environment(config, kind),
        "settings": settings(config),
    }


def launcher() -> str:
    """How to start the command `rather` again as it was started now."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return f"torchrun --nproc-per-node {ranks} -m rather" if ranks else "rather"


def command() -> str:
    """As it was typed, or the Python program that began the run."""
    name, *arguments = sys.argv
    if Path(name).name in ("rather", "__main__.py"):
        return f"{launcher()} {shlex.join(arguments)}"
    return shlex.join(["python", name, *arguments])


def environment(config: DPOConfig, kind: str) -> dict[str, Any]:
    import torch

    devices = {device for mapping in mappings(config) for device in mapping}
    torchrun = os.environ.get("GROUP_WORLD_SIZE")
    facts = {
        "devices": len(devices),
        "device": _cpu() if kind == "cpu" else _gpu(),
        "hosts": int(torchrun) if torchrun else config.num_nodes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    if kind == "cpu":
        facts["threads"] = torch.get_num_threads()
    elif torch.version.cuda:
        facts["CUDA"] = torch.version.cuda
    return facts | {name: found for name in PACKAGES if (found := _version(name))}


def settings(config: DPOConfig) -> dict[str, dict[str, Any]]:
    """Every key that is not at its default, without secrets, and where its value came from."""
    values, found = public_values(config), {}
    for path, key in table().items():
        value, default = (_plain(each) for each in (value_at(values, path), key.default))
        held = not key.parent or value_at(values, key.parent) is not None
        if held and not key.section and value != default:
            found[path] = {"value": value, "default": default, "from": _source(config, path)}
    return found


def _source(config: DPOConfig, path: str) -> str:
    if path in config.sources:
        return config.sources[path]
    return f"follows {config.followed[path]}" if path in config.followed else "set in Python"


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _gpu() -> str:
    """A driver on Ray may have none itself."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = dict(part.split(":", 1) for part in lines if ":" in part)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return (
        next((named[name] for name in CPU_NAMES if named.get(name)), "")
        or platform.processor()
        or "CPU"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
