"""`rather stop` and `rather save-now`: ask a running job for something, and wait for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rather.commands.terminal import Overrides, command

Run = Annotated[Path, typer.Argument(help="The run folder, or the YAML file of the run.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the run.", min=0)]


@command
def stop_command(run: Run, overrides: Overrides = None, timeout: Timeout = 600.0) -> None:
    """Stop a running job after saving a checkpoint. Train with the same command to resume."""
    _ask(run, overrides, "stop", timeout)


@command
def save_now_command(run: Run, overrides: Overrides = None, timeout: Timeout = 600.0) -> None:
    """Save a checkpoint of a running job after its current step, and wait until it is written."""
    _ask(run, overrides, "save", timeout)


def _ask(run: Path, overrides: list[str] | None, word: str, timeout: float) -> None:
    from rather.config.load import load
    from rather.run_folder.control import ask

    folder = load(run, overrides or []).config.run_dir if run.is_file() else run
    ask(folder, word, timeout=timeout, report=partial(typer.echo, err=True))
