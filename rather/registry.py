"""What the core calls in rooms above it, by name. It is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TOOLS = {
    "board": "rather.tools.commands:board_command",
    "demo": "rather.tools.commands:demo_command",
    "gguf": "rather.tools.gguf_file:write_gguf",
    "init": "rather.tools.init:init_command",
    "megatron": "rather.tools.megatron_file:write_megatron",
    "migrate": "rather.tools.commands:migrate_command",
    "pairs": "rather.tools.pairs:pairs_command",
    "push": "rather.tools.push:push_command",
    "report": "rather.tools.commands:report_command",
    "rounds": "rather.tools.commands:rounds_command",
    "sweep": "rather.tools.commands:sweep_command",
    "tune": "rather.tools.commands:tune_command",
    "upload": "rather.tools.push:upload",
    "upload_card": "rather.tools.push:card",
    "upload_files": "rather.tools.push:files_in",
    "last_report": "rather.tools.report.write:write_last_report",
    "data_page": "rather.tools.report.sections:data_page",
}


def tool(name: str) -> Any:
    """Import a tool and return the function or class that the core calls."""
    module, _, attribute = TOOLS[name].partition(":")
    return getattr(import_module(module), attribute)
