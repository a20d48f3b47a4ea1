"""`rather compare-losses`: every loss on the same log-probs, as a table and as charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rather.commands.terminal import ConfigPath, Imports, Overrides, command, make_table, settings

if TYPE_CHECKING:
    from rather.commands.compare_losses_table import LossRow
    from rather.commands.score import LogProbs

LEGEND = (
    "value: mean loss. gradient: mean norm of d loss / d (log-probs of chosen and rejected) of a "
    "pair. saturated: pairs whose gradient is below 1 % of that at zero margin (policy equal to "
    "reference; for a loss without a reference, both answers equally rewarded). Losses other than "
    "the run's own have their default numbers."
)
EQUAL = "Policy and reference are equal on these pairs: the values are those before any training."


@command
def compare_losses_command(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="Weights to compare on; default: the run's model or checkpoint."),
    ] = None,
    pairs: Annotated[
        int, typer.Option(help="Most pairs, evenly spread over the held-out pairs.", min=1)
    ] = 512,
    plot: Annotated[
        Path | None, typer.Option(help="Plot every loss over the margin to this .html file.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate every loss on the log-probs of a trained model: value, gradient, saturation."""
    given = settings(config, overrides)
    from rather.commands.compare_losses_table import compare_rows, measure, write_plot
    from rather.errors import ConfigError

    if plot is not None and plot.suffix != ".html":
        raise ConfigError(f"--plot {plot}: must be an .html file.")
    x = measure(given, model, pairs)
    rows = compare_rows(given, x)
    print_rows(rows, x, Console())
    if plot is not None:
        write_plot(plot, rows, x)
        typer.echo(f"The charts are in {plot}")


def print_rows(rows: list[LossRow], x: LogProbs, console: Console) -> None:
    title = f"{len(rows) - 1} losses on {len(x.margins)} pairs"
    table = make_table(title, "loss", "value", "gradient", "saturated")
    table.add_column("numbers")
    for number, row in enumerate(rows):
        cells = (f"{row.value:.4g}", f"{row.gradient:.3g}", f"{row.saturated:.1%}")
        numbers = ", ".join(f"{name} {n}" for name, n in row.numbers.items() if n is not None)
        note = f"not computable: {row.missing}" if row.missing else numbers
        cells = ("-", "-", "-") if row.missing else cells
        style = "bold" if number == 0 else ""
        table.add_row(Text(row.name), *cells, Text(note), style=style, end_section=number == 0)
    console.print(table)
    low, middle, high = (float(x.margins.quantile(q)) for q in (0.05, 0.5, 0.95))
    console.print(f"Margins in nats: median {middle:.3g}, 90 % between {low:.3g} and {high:.3g}")
    if not x.margins.any():
        console.print(EQUAL, style="yellow")
    console.print(Text(LEGEND), style="dim")
