"""What all commands share: their common arguments, and errors turned into a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rather.errors import RatherError

ConfigPath = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides, such as beta=0.05 or max_steps=200.", show_default=False)
]


def guarded(work: Callable[[], int]) -> int:
    """Runs a command; turns our own errors into their message and exit code."""
    try:
        return work()
    except RatherError as error:
        typer.echo(f"rather: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("rather: interrupted", err=True)
        return 130
    except BrokenPipeError:  # `rather data ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
