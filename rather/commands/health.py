"""`rather health`: problems that were detected in a run, the worst first."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import AsJson, RunFolder, command, print_json

STYLES = {"serious": "bold red", "warning": "yellow", "info": "dim"}


@command
def health_command(run: RunFolder, as_json: AsJson = False) -> None:
    """Show problems detected during training, with the metric behind each and what to do."""
    from rather.errors import ConfigError
    from rather.tracking.health import SEVERITIES, read_findings

    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run}: not a run folder, metrics.jsonl is missing; pass <output_dir>/<exp_name>."
        )
    found = sorted(read_findings(run), key=lambda one: SEVERITIES.index(one.severity))
    table = Table("step", "problem", "value", "what happened, and what to do", show_lines=True)
    for one in found:
        text = Text.assemble(one.text, "\n", (one.advice, "dim"))
        name = Text(one.name, STYLES[one.severity])
        table.add_row(str(one.step), name, f"{one.number:.4g}", text)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        Console().print(table if found else "No problems found.")
