"""`rather migrate SOURCE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import guarded
from rather.errors import ConfigError
from rather.migrate import NAMES
from rather.migrate.rules import CHANGED, IMPOSSIBLE, NEEDLESS, OPEN, UNKNOWN
from rather.migrate.source import Source, read_file, read_line

if TYPE_CHECKING:
    from rather.migrate.engine import Migrated

STYLES = {CHANGED: "yellow", OPEN: "yellow", IMPOSSIBLE: "red", UNKNOWN: "red", NEEDLESS: "dim"}


def migrate_command(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="YAML or JSON file, or a text file with a command line.", show_default=False
        ),
    ] = None,
    line: Annotated[
        str | None, typer.Option(help="The command line itself.", show_default=False)
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option("--from", help=f"Whose it is: {' | '.join(NAMES)}.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The YAML to write.")] = Path("dpo.yaml"),
    devices: Annotated[
        int | None,
        typer.Option(help="Devices it ran on, where no launcher tells.", min=1, show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file where it exists.")
    ] = False,
) -> None:
    """Turn the settings of another trainer into a YAML of ours, with a table of what became of each key."""

    def work() -> int:
        from rather.migrate.engine import guess, migrate, write
        from rather.migrate.peers import PEERS

        given = _source(source, line)
        if peer is not None and peer not in NAMES:
            raise ConfigError(f"--from {peer}: unknown; there are {', '.join(NAMES)}.")
        result = migrate(given, PEERS[peer] if peer else guess(given, PEERS), devices)
        write(result, out, force=force)
        show(result, Console())
        typer.echo(
            f"Written: {out}. Look at the pairs with `rather data {out} --show 3`, then `rather train {out}`."
        )
        return 0

    raise typer.Exit(guarded(work))


def _source(file: Path | None, line: str | None) -> Source:
    if (file is None) == (line is None):
        raise ConfigError("name a file, or give a command line with --line: one of the two.")
    return read_line(line) if line is not None else read_file(Path(str(file)).expanduser())


def show(result: Migrated, console: Console) -> None:
    """The table, then what no key tells."""
    table = Table(result.peer.name, "value", "is", "here", "remark", box=None, pad_edge=False)
    for row in result.rows:
        words = (row.key, str(row.value), row.status, row.ours, row.outcome.note)
        table.add_row(*(Text(word, STYLES.get(row.status, "")) for word in words))
    console.print(table)
    training, pairs = result.config.actor_train.training_args, result.config.global_batch()
    sizes = training.per_device_train_batch_size, training.gradient_accumulation_steps
    devices = pairs // (sizes[0] * sizes[1])
    step = f"A step has {pairs} pairs: {sizes[0]} a device x {sizes[1]} accumulated x {devices} data-parallel"
    for sentence in (f"{step}; --devices says on how many it ran.", *result.peer.always):
        console.print(Text(f"- {sentence}"))
