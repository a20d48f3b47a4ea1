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
    findings = sorted(read_findings(run), key=lambda each: urgency(each.name, each.severity))
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    report = read_object(run / "report.json")
    if outcome := outcome_text(report):
        echo(f"Outcome: {outcome}.")
    for line in result_of(report):
        echo(line)
    if findings:
        rows = []
        for finding in findings:
            text = f"{finding.text} {finding.advice}"
            number = f"{finding.number:.4g}"
            rows.append((finding.step, finding.severity, finding.name, number, text))
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

    problems = dict(check_files(path, full=not quick))
    rows = ((file, f"damaged: {damage}" if damage else "good") for file, damage in problems.items())
    print_table(("file", "state"), rows)
    damaged = sum(map(bool, problems.values()))
    how = "names, sizes and the state" if quick else "every byte"
    echo(f"{count(len(problems), 'file')}, {damaged} damaged (checked {how})")
    return CheckpointError.exit_code if damaged else 0
