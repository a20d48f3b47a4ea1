"""`rather sweep`: train every combination of some values, and compare the runs."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rather.commands.terminal import AsJson, ConfigPath, Imports, command, print_json


@command
def sweep_command(
    config: ConfigPath,
    values: Annotated[
        list[str],
        typer.Argument(help="Keys with several values, such as beta=0.01,0.05; or with one."),
    ],
    by: Annotated[
        str | None,
        typer.Option(help="Held-out metric that decides; default: eval/rewards/accuracies."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start an existing sweep from scratch.")
    ] = False,
    as_json: AsJson = False,
    imports: Imports = None,
) -> int:
    """Train every combination of some values. Run the same command again to resume.

    Runs share one pass of the reference. With more GPUs than one run needs, several runs train
    side by side. A run that fails does not stop the others; the sweep exits with its code.
    """
    from rather.commands.sweep_results import Results, RunResult, choose_metric
    from rather.commands.sweep_runs import plan_sweep

    sweep = plan_sweep(config, values, overwrite=overwrite)
    metric = choose_metric(sweep.base, by)
    console = Console(stderr=True)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what the runs print
        sweep.run(lambda text: console.print(Text(f"sweep: {text}"), soft_wrap=True, style="bold"))
    results = Results(sweep, metric, [RunResult.read(run) for run in sweep.runs])
    if as_json:
        print_json(results.as_json())
    else:
        results.print(Console())
        typer.echo(f"Curves of all runs: rather board {sweep.folder}")
    return sweep.exit_code
