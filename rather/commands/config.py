"""`rather config show|explain|schema|reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rather.commands.terminal import ConfigPath, Overrides, command, print_json

config_app = typer.Typer(
    help="Inspect a configuration: effective values, meanings, the schema.", no_args_is_help=True
)


@config_app.command("show", epilog="Example: `rather config show dpo.yaml beta=0.05`")
@command
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print every effective value and where it comes from."""
    from rather.config.load import load
    from rather.config.show import show

    typer.echo(show(load(config, overrides or [])))


@config_app.command("explain", epilog="Example: `rather config explain beta dpo.yaml`")
@command
def config_explain(
    key: Annotated[
        str, typer.Argument(help="A key path, such as actor_train.training_args.learning_rate.")
    ],
    config: Annotated[Path | None, typer.Argument(help="Also show the value in this YAML.")] = None,
    overrides: Overrides = None,
) -> None:
    """Explain a key: meaning, type, range, default; with a YAML also its value and source."""
    from rather.config.load import load
    from rather.config.show import explain

    if config and key.endswith(".yaml"):  # both orders are accepted
        key, config = str(config), Path(key)
    typer.echo(explain(load(config, overrides or []) if config else None, key))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from rather.config.show import json_schema

    print_json(json_schema())


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of all keys as Markdown (docs/config.md)."""
    from rather.config.show import reference_markdown

    typer.echo(reference_markdown(), nl=False)
