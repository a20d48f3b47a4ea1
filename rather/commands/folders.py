"""Commands on the folder of a run: `verify`, `stop` and `save-now`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rather.commands.terminal import Overrides, guarded

Run = Annotated[
    Path, typer.Argument(help="The folder of a run, or its YAML file.", show_default=False)
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait until it has happened.", min=0)]


def verify_command(
    path: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a run folder or a reference cache.", show_default=False),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Of tensors compare only the size of their files.")
    ] = False,
) -> None:
    """Compare every file with what was written: a table of good and damaged ones, exit code 4 if any is damaged."""

    def work() -> int:
        from rather.commands.verify import findings
        from rather.errors import CheckpointError

        found = findings(path, full=not quick)
        table = Table("file", "state", box=None, pad_edge=False)
        for each in found:
            state = (
                f"[bold red]damaged[/]: {escape(each.damage)}" if each.damage else "[green]good[/]"
            )
            table.add_row(escape(str(each.path)), state)
        Console().print(table)
        damaged = [each for each in found if each.damage]
        how = "names and sizes only, and the state" if quick else "every byte"
        Console().print(f"{len(found)} files, {len(damaged)} damaged ({how})", highlight=False)
        return CheckpointError.exit_code if damaged else 0

    raise typer.Exit(guarded(work))


def stop_command(run: Run, overrides: Overrides = None, timeout: Timeout = 600.0) -> None:
    """Ask a run that is going on to save and end, and wait until it has. The same command goes on from there."""
    raise typer.Exit(guarded(partial(_ask, run, overrides or [], "stop", timeout)))


def save_now_command(run: Run, overrides: Overrides = None, timeout: Timeout = 600.0) -> None:
    """Ask a run that is going on for a checkpoint after its step, and wait until it is there."""
    raise typer.Exit(guarded(partial(_ask, run, overrides or [], "save", timeout)))


def _ask(run: Path, overrides: list[str], word: str, timeout: float) -> int:
    from rather.config.load import load
    from rather.run_folder.control import ask

    folder = load(run, overrides).config.run_dir if run.is_file() else run
    ask(folder, word, timeout=timeout, report=partial(typer.echo, err=True))
    return 0
