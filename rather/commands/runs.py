"""Commands on run folders: `health`, `stop`, `save-now`, `verify`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rather.commands.terminal import (
    AsJson,
    Overrides,
    RunFolder,
    command,
    count,
    echo,
    print_json,
    print_table,
)
from rather.errors import CheckpointError

Run = Annotated[Path, typer.Argument(help="The run folder, or the YAML file of the run.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the run.", min=0)]


@command
def health_command(run: RunFolder, as_json: AsJson = False) -> None:
    """Show problems detected during training, with the metric behind each and what to do."""
    from rather.run_folder.names import refuse_other_folder
    from rather.tracking.health import read_findings, urgency
    from rather.tracking.json_lines import read_object
    from rather.tracking.outcome import outcome_text, result_of

    refuse_other_folder(run)
    found = sorted(read_findings(run), key=lambda one: urgency(one.name, one.severity))
    if as_json:
        print_json([asdict(one) for one in found])
        return
    report = read_object(run / "report.json")
    if outcome := outcome_text(report):
        echo(f"Outcome: {outcome}.")
    for line in result_of(report):
        echo(line)
    if found:
        rows = [
            (one.step, one.severity, one.name, f"{one.number:.4g}", f"{one.text} {one.advice}")
            for one in found
        ]
        print_table(("step", "", "problem", "value", "what happened, and what to do"), rows)
    else:
        echo("No problems found.")


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

    folder = load(run, overrides or []).run_dir if run.is_file() else run
    ask(folder, word, timeout=timeout, report=partial(echo, err=True))


@command
def verify_command(
    path: Path,
    quick: bool = False,
) -> int:
    """Check every file against what was written. Exit code 4 if a file is damaged.

    path: A checkpoint, a run folder or a reference cache.
    quick: Compare only the file sizes of tensors.
    """
    from rather.commands.verify import check_files

    found = dict(check_files(path, full=not quick))
    rows = ((file, f"damaged: {damage}" if damage else "good") for file, damage in found.items())
    print_table(("file", "state"), rows)
    damaged = sum(map(bool, found.values()))
    how = "names, sizes and the state" if quick else "every byte"
    echo(f"{count(len(found), 'file')}, {damaged} damaged (checked {how})")
    return CheckpointError.exit_code if damaged else 0
