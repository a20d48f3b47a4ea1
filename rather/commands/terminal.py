"""What all commands share: their common arguments, and errors turned into a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rather.config import plugins
from rather.config.redaction import hide, redact
from rather.errors import ConfigError, DiskError, Ended, RatherError, RayGone
from rather.tracking.json_lines import strict_json

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)

# What a disk says of a path that somebody named; anything else that escapes is a bug of ours and keeps its trace.
REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE,
}  # fmt: skip
ConfigPath = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, such as beta=0.05 or max_steps=200.", show_default=False),
]
Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        help="Python file that registers a loss or a data format; repeatable.",
        callback=plugins.request,
        show_default=False,
    ),
]


def settings(path: Path, overrides: list[str]) -> DPOConfig:
    """The config, its environment set before torch is imported (which reads some of it only then), its loss checked."""
    from rather.config.load import load
    from rather.config.masking import secret_values
    from rather.config.paths import check_paths

    loaded = load(path, overrides)
    hide(secret_values(loaded.config.model_dump()))
    check_paths(loaded.config, loaded.sources)
    os.environ.update(loaded.config.system_envs)
    plugins.load_requested()
    from rather.losses.objective import from_config

    try:
        from_config(loaded.config)
    except ConfigError as error:
        raise ConfigError(
            [_with_source(problem, loaded.sources) for problem in error.problems]
        ) from error
    return loaded.config


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """`gamma: ...` -> `gamma (dpo.yaml:7): ...`"""
    keys, colon, text = problem.partition(": ")
    places = [sources[key] for key in keys.split(", ") if sources.get(key, "default") != "default"]
    return f"{keys} ({', '.join(places)}){colon}{text}" if places else problem


def print_json(value: Any) -> None:
    typer.echo(strict_json(value, indent=1))


def guarded(work: Callable[[], int]) -> int:
    """Runs a command; turns our own errors into their message and exit code."""
    try:
        return work()
    except (RatherError, Ended) as error:
        typer.echo(redact(f"rather: {error}"), err=True)
        if isinstance(error, RayGone):
            os._exit(
                error.exit_code
            )  # Ray's library would look for its server once more, and crash
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
        log.debug("the disk refuses", exc_info=True)
        typer.echo(redact(f"rather: {error.filename}: {error.strerror}."), err=True)
        return DiskError.exit_code
