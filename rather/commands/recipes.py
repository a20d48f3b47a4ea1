"""`rather recipes list|show|copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import guarded
from rather.recipes import copy_recipe, list_recipes, show_recipe

recipes_app = typer.Typer(
    help="Ready configs with the settings of papers and their authors.", no_args_is_help=True
)

RecipeName = Annotated[
    str, typer.Argument(help="A name that `rather recipes list` shows.", show_default=False)
]


@recipes_app.command("list")
def recipes_list() -> None:
    """List all recipes."""
    table = Table("recipe", "what it is", box=None, pad_edge=False)
    for recipe in list_recipes():
        table.add_row(Text(recipe.name, "bold"), Text(recipe.title))
    Console().print(table)


@recipes_app.command("show", epilog="Example: `rather recipes show simpo-llama3-instruct`")
def recipes_show(name: RecipeName) -> None:
    """Print a recipe."""

    def work() -> int:
        typer.echo(show_recipe(name), nl=False)
        return 0

    raise typer.Exit(guarded(work))


@recipes_app.command("copy", epilog="Example: `rather recipes copy dpo my_run.yaml`")
def recipes_copy(
    name: RecipeName,
    file: Annotated[
        Path | None, typer.Argument(help="File or folder; else NAME.yaml.", show_default=False)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file where it exists.")
    ] = False,
) -> None:
    """Copy a recipe to a YAML file of your own, in which you name your model and your pairs."""

    def work() -> int:
        target = copy_recipe(name, file, force=force)
        typer.echo(
            f"{target}: set `pretrain` and `actor_train.data_args.file_name`, then `rather train {target}`"
        )
        return 0

    raise typer.Exit(guarded(work))
