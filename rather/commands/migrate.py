"""`rather migrate`: convert the settings of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import Force, command
from rather.errors import ConfigError
from rather.migrate import NAMES
from rather.migrate.rules import CHANGED, IMPOSSIBLE, NEEDLESS, OPEN, UNKNOWN

if TYPE_CHECKING:
    from rather.migrate.engine import Migrated

STYLES = {CHANGED: "yellow", OPEN: "yellow", IMPOSSIBLE: "red", UNKNOWN: "red", NEEDLESS: "dim"}


@command
def migrate_command(
    source: Annotated[
        Path | None,
        typer.Argument(help="YAML or JSON file, or a text file with a command line."),
    ] = None,
    line: Annotated[str | None, typer.Option(help="The command line itself.")] = None,
    peer: Annotated[
        str | None, typer.Option("--from", help=f"The tool: {' | '.join(NAMES)}.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The YAML to write.")] = Path("dpo.yaml"),
    devices: Annotated[
        int | None, typer.Option(help="Number of devices, if no launcher sets it.", min=1)
    ] = None,
    force: Force = False,
) -> None:
    """Convert a config of TRL, LLaMA-Factory, Axolotl and others, and list every difference."""
    from rather.migrate.engine import guess, migrate, write
    from rather.migrate.peers import PEERS
    from rather.migrate.source import read_file, read_line

    if (source is None) == (line is None):
        raise ConfigError("Pass either a file or a command line with --line.")
    given = read_file(source.expanduser()) if source else read_line(line or "")
    if peer is not None and peer not in NAMES:
        raise ConfigError(f"--from {peer}: unknown; choose one of {', '.join(NAMES)}.")
    result = migrate(given, PEERS[peer] if peer else guess(given, PEERS), devices)
    write(result, out, force=force)
    print_migrated(result, Console())
    typer.echo(
        f"Written: {out}. Check the pairs with `rather data {out} --show 3`, then run "
        f"`rather train {out}`."
    )


def print_migrated(result: Migrated, console: Console) -> None:
    """Print what became of each key, then the differences that no key expresses."""
    table = Table(result.peer.name, "value", "status", "Rather", "note", box=None, pad_edge=False)
    for row in result.rows:
        words = (row.key, str(row.value), row.status, row.ours, row.outcome.note)
        table.add_row(*(Text(word, STYLES.get(row.status, "")) for word in words))
    console.print(table)
    training, pairs = result.config.actor_train.training_args, result.config.global_batch()
    size, accumulated = training.per_device_train_batch_size, training.gradient_accumulation_steps
    step = (
        f"A step has {pairs} pairs: {size} per device x {accumulated} accumulated x "
        f"{pairs // (size * accumulated)} data-parallel; set the number of devices with --devices."
    )
    for sentence in (step, *result.peer.always):
        console.print(Text(f"- {sentence}"))
