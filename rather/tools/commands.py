"""The commands of the tools. Each imports what it needs when it is called: --help stays fast."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rather.commands.terminal import (
    AsJson,
    ConfigPath,
    Force,
    Imports,
    MaybeFile,
    OutFile,
    Overrides,
    RunFolder,
    TrustPaths,
    command,
    count,
    echo,
    heavy_imports,
    print_json,
    writable,
)
from rather.config import plugins
from rather.errors import ConfigError
from rather.tools.migrate import NAMES


@command
def sweep_command(
    config: ConfigPath,
    values: list[str],
    by: str | None = None,
    overwrite: bool = False,
    as_json: AsJson = False,
    imports: Imports = None,
) -> int:
    """Train every combination of some values. Run the same command again to resume.

    Runs share one pass of the reference. With more GPUs than one run needs, several runs train
    side by side. A run that fails does not stop the others; the sweep exits with its code.

    values: Keys with several values, such as beta=0.01,0.05; or with one.
    by: Held-out metric that decides; default: eval/rewards/accuracies, or eval/loss.
    overwrite: Start an existing sweep from scratch.
    """
    from rather.tools.sweep import choose_metric, plan_sweep, print_results, results

    planned = plan_sweep(config, values, overwrite=overwrite)
    metric = choose_metric(planned.base, by)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what the runs print
        planned.run()
    comparison = results(planned, metric)
    print_json(comparison) if as_json else print_results(planned, comparison)
    return planned.exit_code


@command
def tune_command(
    config: ConfigPath,
    overrides: Overrides = None,
    budget: str = "20m",
    losses: str | None = None,
    out: Annotated[Path, typer.Option(callback=writable)] = Path("tuned.yaml"),
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Choose learning rate and beta on held-out pairs within a time budget.

    A learning-rate range test and successive halving propose settings. Some train to the end and
    are compared on held-out pairs that did not propose them; one beyond drift_limit or
    forgetting_limit cannot win. Run the same command again to resume.

    budget: Time to use, such as 90s, 20m or 1.5h; two full runs must fit.
    losses: Also compare these losses: sigmoid,ipo.
    out: Write the YAML of the best setting here.
    """
    from rather.tools import tune as tuning

    seconds = tuning.seconds_of(budget)
    with redirect_stdout(sys.stderr):  # what the runs print
        done = tuning.tune(config, overrides or [], seconds, losses.split(",") if losses else [])
    tuned = done.result()
    best = tuned["best"]
    if best != tuning.NOTHING:
        tuning.write_best(done, tuned, out)
    if as_json:
        print_json(tuned)
        return
    tuning.print_result(tuned)
    tuning.print_answers(done, best)
    if best == tuning.NOTHING:
        echo(f"Best: do not train ({tuned['reason']}). {out} was not written.")
    else:
        echo(f"Best: {best} ({tuned['reason']}); written to {out}")


@command
def rounds_command(
    config: Annotated[Path, typer.Argument(help="The YAML with the key rounds, or `status`.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Generate answers, judge them, train on the pairs, and repeat; keep the best round.

    Run the same command again to continue. `rather rounds status rounds.yaml` prints what is done.
    """
    from rather.tools.rounds.settings import load_plan
    from rather.tools.rounds.status import print_rounds, status_of

    changes = list(overrides or [])
    if str(config) == "status":
        if not changes:
            raise ConfigError("status: name the YAML, as in `rather rounds status rounds.yaml`.")
        status = status_of(load_plan(Path(changes.pop(0)), changes))
        print_json(status) if as_json else print_rounds(status)
        return
    plan = load_plan(config, changes)
    plugins.load_requested()
    with heavy_imports():
        from rather.tools.rounds.run import run_rounds

    with redirect_stdout(sys.stderr):  # what the trainings print
        reached = run_rounds(plan)
    print_json(reached) if as_json else print_rounds(reached)


@command
def demo_command(
    out: Path = Path("rather-demo"),
) -> int:
    """Build a tiny model, train it, and show its answers before and after. Needs no network.

    out: Folder for everything the demo writes.
    """
    from rather.tools.demo import run_demo

    return run_demo(out)


@command
def migrate_command(
    source: MaybeFile = None,
    peer: Annotated[
        str | None, typer.Option("--from", help=f"The tool: {' | '.join(NAMES)}.")
    ] = None,
    out: Path = Path("dpo.yaml"),
    trainer: str | None = None,
    devices: Annotated[int | None, typer.Option(min=1)] = None,
    force: Force = False,
    verbose: Annotated[bool, typer.Option(help="List every key, not only differences.")] = False,
    as_json: AsJson = False,
    line: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> int | None:
    """Convert a YAML or JSON config of TRL, LLaMA-Factory, Axolotl or ROLL, and list what differs.

    A conversion that is not complete is written as `*.incomplete.yaml`, with exit code 2.

    out: The YAML to write.
    source: YAML or JSON file.
    trainer: TRL's trainer that reads the file, such as dpo, kto or orpo.
    devices: Number of devices; the file seldom says it.
    """
    from rather.files import write_new
    from rather.tools.migrate import removed
    from rather.tools.migrate.engine import guess, migrate
    from rather.tools.migrate.peers import PEERS
    from rather.tools.migrate.source import read_file

    if line is not None:
        raise ConfigError(f"--line: {removed.LINE}")
    if source is None:
        raise ConfigError("Pass the YAML or JSON file to convert.")
    if peer in removed.MARKS:
        raise ConfigError(f"--from {peer}: a file of this tool {removed.TOOL}")
    if peer is not None and peer not in NAMES:
        raise ConfigError(f"--from {peer}: unknown; choose one of {', '.join(NAMES)}.")
    source = source.expanduser()
    values = read_file(source)
    tool = PEERS[peer] if peer else guess(source, values, PEERS)
    if tool.reader:
        values = tool.reader(source)
    migrated = migrate(source, values, tool, devices, trainer)
    if not migrated.is_complete:
        out = out.with_suffix(f".incomplete{out.suffix}")
    write_new(out, migrated.yaml(), force=force)
    if as_json:
        print_json(migrated.summary() | {"file": str(out)})
        return None if migrated.is_complete else 2
    echo(migrated.report(verbose=verbose))
    if not migrated.is_complete:
        echo(f"Written: {out}. It is incomplete: first settle the lines at the top.")
        return 2
    echo(
        f"Written: {out}. Check the pairs with `rather data {out} --show 3`, then run "
        f"`rather train {out}`."
    )
    return None


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
    from rather.config.found import Trust
    from rather.tools.board.inspector import Inspector
    from rather.tools.board.serve import Board

    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: not a folder; give the one that contains the runs, such as output."
        )
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
def report_command(
    run: RunFolder,
    out: OutFile = None,
) -> None:
    """Write the report of a run: one self-contained HTML file, made from the run folder.

    out: Output file; default: report.html in the run folder.
    """
    from rather.run_folder import control
    from rather.tools.report.write import write_report

    state = control.activity(run) or "not finished"
    echo(f"the report is in {write_report(run, out, state=state)}")
