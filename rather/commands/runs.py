"""Commands on run folders: `board`, `health`, `report`, `compare`, `stop`, `save-now`, `verify`."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rather.commands.terminal import (
    AsJson,
    OutFile,
    Overrides,
    RunFolder,
    TrustPaths,
    command,
    count,
    echo,
    print_json,
    print_table,
)
from rather.errors import CheckpointError, ConfigError

Run = Annotated[Path, typer.Argument(help="The run folder, or the YAML file of the run.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the run.", min=0)]


@command
def board_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]")] = Path(
        "output"
    ),  # the default of output_dir
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    trust_paths: TrustPaths = False,
) -> None:
    """Show all runs of a folder on a local page: live curves, comparisons, findings, and pairs
    token by token.

    folder: The folder of the runs, or one run.
    port: Port on 127.0.0.1; 0 picks a free one.
    """
    from rather.board.inspector import Inspector
    from rather.board.serve import Board
    from rather.config.found import Trust
    from rather.report.page import plotly_bundle

    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: not a folder; give the one that contains the runs, such as output."
        )
    plotly_bundle()  # say now if the extra is missing
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only models and tokenizers of this machine
    inspector = Inspector(Trust(paths=trust_paths))
    with Board(folder.absolute(), port, inspector) as board:
        runs = count(len(board.runs.rows()), "run")
        echo(f"{folder}: {runs} at {board.address} (stop with Ctrl-C)")
        opening = private_page(board.address) if browser and has_display() else nullcontext()
        with opening as page, suppress(KeyboardInterrupt):
            if page:
                webbrowser.open(page)
            board.serve_forever()


@contextmanager
def private_page(address: str) -> Iterator[str]:
    """Provide the address of a page, readable by this user only, that redirects to the board.

    Every user of the machine can read the arguments of a browser process, and the board's address
    has the token.
    """
    with TemporaryDirectory(prefix="rather-board-") as folder:
        page = Path(folder) / "board.html"
        page.touch(mode=0o600)
        page.write_text(
            '<!doctype html><meta name="referrer" content="no-referrer"><title>rather</title>'
            f'<meta http-equiv="refresh" content="0; url={escape(address)}">\n'
        )
        yield page.as_uri()


def has_display() -> bool:
    """Return whether a browser can open a window; without one it would open in this terminal."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


@command
def health_command(run: RunFolder, as_json: AsJson = False) -> None:
    """Show problems detected during training, with the metric behind each and what to do."""
    from rather.report.folder import refuse_other_folder
    from rather.tracking.health import read_findings, urgency
    from rather.tracking.json_lines import read_object
    from rather.tracking.outcome import outcome_text

    refuse_other_folder(run)
    found = sorted(read_findings(run), key=lambda one: urgency(one.name, one.severity))
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if outcome := outcome_text(read_object(run / "report.json")):
        echo(f"Outcome: {outcome}.")
    if found:
        rows = [
            (one.step, one.severity, one.name, f"{one.number:.4g}", f"{one.text} {one.advice}")
            for one in found
        ]
        print_table(("step", "", "problem", "value", "what happened, and what to do"), rows)
    else:
        echo("No problems found.")


@command
def report_command(
    run: RunFolder,
    out: OutFile = None,
) -> None:
    """Write the report of a run: one self-contained HTML file, made from the run folder.

    out: Output file; default: report.html in the run folder.
    """
    from rather.report.write import write_report
    from rather.run_folder import control

    state = control.activity(run) or "not finished"
    echo(f"the report is in {write_report(run, out, state=state)}")


@command
def compare_command(run_a: RunFolder, run_b: RunFolder, as_json: AsJson = False) -> None:
    """Compare two runs: settings, environment, metrics, weights, and the first differing step."""
    from rather.commands.compare import compare, print_comparison

    found = compare(run_a, run_b)
    print_json(found) if as_json else print_comparison(found)


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
