"""The command `rather sweep`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import ConfigPath, Imports, guarded, print_json

if TYPE_CHECKING:
    from rather.commands.sweep.results import Result
    from rather.commands.sweep.runs import Sweep

Values = Annotated[
    list[str],
    typer.Argument(
        help="Keys with several values, such as beta=0.01,0.05; others hold for all.",
        show_default=False,
    ),
]


def sweep_command(
    config: ConfigPath,
    values: Values,
    by: Annotated[
        str | None,
        typer.Option(
            help="Held-out metric that tells the best run; else eval/rewards/accuracies.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew where such a sweep exists.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    imports: Imports = None,
) -> None:
    """Train every combination of some values. The same command goes on where it was interrupted.

    Runs share one pass of the reference. With more GPUs than one run takes, several go side by side. One that fails
    does not stop the others; its exit code is that of the sweep.
    """
    raise typer.Exit(guarded(partial(_sweep, config, values, by, overwrite, as_json)))


def _sweep(
    config: Path, values: Sequence[str], by: str | None, overwrite: bool, as_json: bool
) -> int:
    from rather.commands.sweep.results import metric_of, results_of, verdict, winner, write_page
    from rather.commands.sweep.runs import Sweep

    sweep = Sweep.planned(config, values, overwrite=overwrite)
    metric = metric_of(sweep.base, by)
    console = Console(stderr=True)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what the runs print
        sweep.run(lambda text: console.print(Text(f"sweep: {text}"), soft_wrap=True, style="bold"))
    results = results_of(sweep, metric)
    said = verdict(sweep, results, metric)
    page = write_page(sweep, results, metric, said)
    if as_json:
        top = winner(results)
        told = {
            "metric": metric,
            "best": top.point.name if top else None,
            "reference": sweep.reference,
        }
        print_json({**told, "runs": [result.told() for result in results]})
    else:
        print_results(sweep, results, metric, Console())
        for sentence in (*said, f"curves of all runs: {page}"):
            typer.echo(sentence)
    return sweep.exit_code


def print_results(
    sweep: Sweep, results: Sequence[Result], metric: str | None, console: Console
) -> None:
    """Narrow enough for eighty columns: the page has the rest."""
    table = Table(
        title=f"Sweep {sweep.folder}",
        title_justify="left",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    held_out = [
        name for name in dict.fromkeys((metric, "eval/rewards/margins", "eval/loss")) if name
    ]
    shown = [name for name in held_out if any(name in r.curves for r in results)] or [
        "rewards/accuracies",
        "loss",
    ]
    for name in ("steps", *(name.rpartition("/")[2] for name in shown), "reference", "seconds"):
        table.add_column(name, justify="right")
    for result in results:
        numbers = [
            result.steps,
            *(result.last(name) for name in shown),
            result.forwards,
            result.seconds,
        ]
        cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
        state = result.outcome.state
        style = {"finished": "", "waiting": "yellow"}.get(state, "red")
        table.add_row(Text(result.point.name), state, *cells, style=style)
    console.print(table)
    console.print("reference: micro-batches that it computed for the run", style="dim")
    for result in results:
        if result.outcome.error:
            console.print(
                Text(f"{result.point.name}: {result.outcome.error}"), soft_wrap=True, style="red"
            )
