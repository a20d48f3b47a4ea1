"""The command `rather health`: what was found in a run, the worst first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import guarded, print_json

if TYPE_CHECKING:
    from rather.tracking.health import HealthFinding

STYLES = {"serious": "bold red", "warning": "yellow", "info": "dim"}


def health_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as a JSON list.")
    ] = False,
) -> None:
    """Tell what was found in a run while it trained: each finding with its number, and advice."""

    def work() -> int:
        from rather.errors import ConfigError
        from rather.tracking.health import SEVERITIES, read_findings

        if not (run / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{run}: holds no run (it has no metrics.jsonl); name <output_dir>/<exp_name>."
            )
        found = sorted(read_findings(run), key=lambda one: SEVERITIES.index(one.severity))
        if as_json:
            print_json([asdict(one) for one in found])
        else:
            print_findings(found, Console())
        return 0

    raise typer.Exit(guarded(work))


def print_findings(found: list[HealthFinding], console: Console) -> None:
    if not found:
        console.print("nothing was found: the metrics look healthy")
        return
    table = Table("step", "finding", "number", "what was seen, and what to do", show_lines=True)
    for one in found:
        told = Text.assemble(one.text, "\n", (one.advice, "dim"))
        table.add_row(
            str(one.step), Text(one.name, STYLES[one.severity]), f"{one.number:.4g}", told
        )
    console.print(table)
