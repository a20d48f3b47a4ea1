"""What all commands share: common arguments, and errors turned into a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.table import Table
from rich.text import Text

from rather.config import plugins
from rather.config.redaction import hide, redact
from rather.errors import ConfigError, DiskError, Ended, RatherError, RayGone
from rather.tracking.json_lines import strict_json

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)
P = ParamSpec("P")

# Errors of the file system about a path that a user named. Any other OSError is a bug and keeps its
# traceback.
REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE,
}  # fmt: skip
ConfigPath = Annotated[Path, typer.Argument(help="The YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides, such as beta=0.05 or max_steps=200.")
]
Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        help="Python file that registers a loss or a data format; repeatable.",
        callback=plugins.request,
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="The run folder: <output_dir>/<exp_name>.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Turn a function into a command whose result or error becomes the exit code."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(guarded(lambda: function(*args, **kwargs) or 0))

    return run


def settings(path: Path, overrides: list[str] | None) -> DPOConfig:
    """Load and check the config. Its environment is set before torch is imported, which reads it."""
    from rather.config.load import load
    from rather.config.masking import secret_values
    from rather.config.paths import check_paths

    loaded = load(path, overrides or [])
    hide(secret_values(loaded.config.model_dump()))
    check_paths(loaded.config, loaded.sources)
    os.environ.update(loaded.config.system_envs)
    plugins.load_requested()
    from rather.data.formats import check_format
    from rather.losses.objective import from_config

    try:
        from_config(loaded.config)
        for role in ("actor_train", "validation"):
            name = getattr(loaded.config, role).data_args.format
            check_format(name, f"{role}.data_args.format")
    except ConfigError as error:
        problems = [_with_source(problem, loaded.sources) for problem in error.problems]
        raise ConfigError(problems) from error
    return loaded.config


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """`gamma: ...` -> `gamma (dpo.yaml:7): ...`"""
    keys, colon, text = problem.partition(": ")
    places = [sources[key] for key in keys.split(", ") if sources.get(key, "default") != "default"]
    return f"{keys} ({', '.join(places)}){colon}{text}" if places else problem


def print_json(value: Any) -> None:
    typer.echo(strict_json(value, indent=1))


def count(number: int, noun: str) -> str:
    """Return `1 run` or `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_table(title: str | None, first: str, *numbers: str, **options: Any) -> Table:
    """Return a table with one column of text, then columns of numbers."""
    table = Table(title=title, title_justify="left", header_style="bold", **options)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(Text(name), justify="right")
    return table


def guarded(work: Callable[[], int]) -> int:
    """Run a command; print Rather's own errors as one message and return their exit code."""
    try:
        return work()
    except (RatherError, Ended) as error:
        typer.echo(redact(f"rather: {error}"), err=True)
        if isinstance(error, RayGone):
            # Ray's exit handler would look for its server again and crash.
            os._exit(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("rather: interrupted", err=True)
        return 130
    except BrokenPipeError:  # `rather data ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None or error.errno not in REFUSALS:
            raise
        log.debug("file system error", exc_info=True)
        typer.echo(redact(f"rather: {error.filename}: {error.strerror}."), err=True)
        return DiskError.exit_code
