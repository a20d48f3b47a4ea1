"""`rather recipes list|show|copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import Force, command
from rather.recipes import copy_recipe, find_recipe, list_recipes

recipes_app = typer.Typer(
    help="Ready-made configs with the settings of papers and their authors.", no_args_is_help=True
)
RecipeName = Annotated[str, typer.Argument(help="A name from `rather recipes list`.")]


@recipes_app.command("list")
def recipes_list() -> None:
    """List all recipes."""
    table = Table("recipe", "what it is", box=None, pad_edge=False)
    for name, path in list_recipes().items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        table.add_row(Text(name, "bold"), Text(title))
    Console().print(table)


@recipes_app.command("show", epilog="Example: `rather recipes show simpo-llama3-instruct`")
@command
def recipes_show(name: RecipeName) -> None:
    """Print a recipe."""
    typer.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy", epilog="Example: `rather recipes copy dpo my_run.yaml`")
@command
def recipes_copy(
    name: RecipeName,
    file: Annotated[Path | None, typer.Argument(help="File or folder; default: NAME.yaml.")] = None,
    force: Force = False,
) -> None:
    """Copy a recipe to a YAML file, in which you then set your model and your pairs."""
    target = copy_recipe(name, file, force=force)
    typer.echo(
        f"{target}: set `pretrain` and `actor_train.data_args.file_name`, then run "
        f"`rather train {target}`"
    )
