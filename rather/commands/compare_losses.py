"""The command `rather compare-losses`: the table in the terminal, and the drawing where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import ConfigPath, Imports, Overrides, guarded
from rather.commands.terminal import settings as settings_of

if TYPE_CHECKING:
    from rather.commands.compare_losses_table import LogProbs, Row

LEGEND = (
    "value: mean loss. gradient: mean size of d loss / d (log-probs of chosen and rejected) of a pair. "
    "saturated: pairs whose gradient is below 1 % of its size at zero margin (policy equal to reference; for a loss "
    "without one, both answers equally rewarded). Losses other than the run's own have their default numbers."
)
EQUAL = "The policy is equal to its reference on these pairs: values are those before any training."


def compare_losses_command(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Weights to compare on; else the run's newest checkpoint or its model.",
            show_default=False,
        ),
    ] = None,
    pairs: Annotated[
        int, typer.Option(help="Most pairs, spread over the evaluation or training pairs.", min=1)
    ] = 512,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw every loss against the margin: an .html file.", show_default=False),
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate every loss on the same log-probs of a trained model: value, gradient, share of saturated pairs."""

    def work() -> int:

        settings = settings_of(config, overrides or [])
        from rather.commands.compare_losses_page import check_kind, write_plot
        from rather.commands.compare_losses_table import measure, rows_of

        if plot is not None:
            check_kind(plot)
        x = measure(settings, model, pairs)
        rows = rows_of(settings, x)
        print_rows(rows, x, Console())
        if plot is not None:
            write_plot(plot, rows, x)
            typer.echo(f"the drawing is in {plot}")
        return 0

    raise typer.Exit(guarded(work))


def print_rows(rows: Sequence[Row], x: LogProbs, console: Console) -> None:
    from rather.commands.compare_losses_page import text_histogram

    table = Table(
        title=f"{len(rows) - 1} losses on {len(x.margins)} pairs",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("loss")
    for name in ("value", "gradient", "saturated"):
        table.add_column(name, justify="right")
    table.add_column("numbers")
    for number, row in enumerate(rows):
        cells = (
            ("-", "-", "-")
            if row.missing
            else (f"{row.value:.4g}", f"{row.gradient:.3g}", f"{row.saturated:.1%}")
        )
        told = f"not computable: {row.missing}" if row.missing else _written(row.numbers)
        table.add_row(
            Text(row.name),
            *cells,
            Text(told),
            style="bold" if number == 0 else "",
            end_section=number == 0,
        )
    console.print(table)
    console.print(Text(f"margins in nats: {text_histogram(x.margins)}"), soft_wrap=True)
    if bool((x.policy["sum"] == x.reference["sum"]).all()):
        console.print(EQUAL, style="yellow")
    console.print(Text(LEGEND), style="dim")


def _written(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
