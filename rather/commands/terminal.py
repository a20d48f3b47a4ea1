"""What all commands share: arguments, tables, and errors turned into a message and an exit code."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.config import plugins
from rather.config.redaction import hide, printable, redact, without_known
from rather.errors import (
    ConfigError,
    Ended,
    RatherError,
    RayGone,
    check_address_space,
    user_error,
)
from rather.tracking.json_lines import strict_json

if TYPE_CHECKING:
    from rather.config.run_config import DPOConfig

log = logging.getLogger(__name__)
P = ParamSpec("P")

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
TrustPaths = Annotated[
    bool,
    typer.Option(
        "--trust-paths",
        help="Read the models and files outside of a run folder that its config.yaml names, also "
        "if the run is not your own.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
GAP = 3  # characters between two columns of a table
MANY_MODULES = 100  # fewer are not worth to be left out of garbage collections
HELP = re.compile(r"\n    (\w+): (.+)")
STYLES = {  # of cells that are one of these words
    "ok": "green", "good": "green", "warning": "yellow", "problem": "red", "serious": "red",
    "failed": "red",
}  # fmt: skip


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, which may come from strangers' files, without known secrets."""
    typer.echo(printable(without_known(str(text))), err=err, nl=nl)


def writable(path: Path | None) -> Path | None:
    """Refuse an output file before any work is done for it."""
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        echo(f"rather: {path}: cannot be written; name a file in an existing folder.", err=True)
        raise typer.Exit(2)
    return path


OutFile = Annotated[Path | None, typer.Option(callback=writable)]
MaybeFile = Annotated[Path | None, typer.Argument()]


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Turn a function into a command whose result or error becomes the exit code.

    A line `name: text` of its docstring is the help of that parameter.
    """
    hints = get_type_hints(function, include_extras=True)
    for name, text in HELP.findall(function.__doc__ or ""):
        hint: Any = hints[name]
        if not hasattr(hint, "__metadata__"):
            flag = [f"--{name.replace('_', '-')}"] if hint is bool else []
            is_option = signature(function).parameters[name].default is not Parameter.empty
            hint = Annotated[hint, typer.Option(*flag) if is_option else typer.Argument()]
        parameter = copy(hint.__metadata__[0])
        parameter.help = text
        hints[name] = Annotated[hint.__origin__, parameter]
    function.__annotations__ = hints
    function.__doc__ = HELP.sub("", function.__doc__ or "").rstrip()

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(guarded(lambda: function(*args, **kwargs)))

    return run


def guarded(work: Callable[[], int | None]) -> int:
    """Run a command; print Rather's own errors as one message and return their exit code."""
    try:
        try:
            check_address_space()
            return work() or 0
        except SystemError as error:
            # Inside Ray's compiled code, what a signal handler raises becomes the cause of this.
            raise error.__cause__ or error from None
    except (RatherError, Ended) as error:
        echo(redact(f"rather: {error}"), err=True)
        if isinstance(error, RayGone):
            # Ray's exit handler would look for its server again and crash.
            os._exit(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        echo("rather: interrupted", err=True)
        return 130
    except BrokenPipeError:  # `rather data ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        refused = user_error(error)
        if refused is None:
            raise
        log.debug("refused by the system", exc_info=True)
        echo(redact(f"rather: {refused}"), err=True)
        return refused.exit_code


def known_model(name: str) -> str:
    """Refuse a model that is neither here nor on the hub, before torch is imported."""
    from rather.data.hub import refuse_unknown_model

    if code := guarded(lambda: refuse_unknown_model(name)):
        raise typer.Exit(code)
    return name


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and transformers without garbage collections, a quarter of a command's start.

    Modules stay until the process ends, so later collections leave them out as well.
    """
    modules = len(sys.modules)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules + MANY_MODULES:
            gc.freeze()
        if was_enabled:
            gc.enable()


def settings(
    path: Path, overrides: Sequence[str] | None, *, with_models: bool = False
) -> DPOConfig:
    """Load and check the config. Its environment is set before torch is imported, which reads it.

    `with_models`: models of the hub must be available.
    """
    from rather.config.load import load
    from rather.config.paths import check_paths
    from rather.config.show import secret_values

    config = load(path, overrides or ())
    hide(secret_values(config.model_dump()))
    check_paths(config)
    for role in config.roles.values() if with_models else ():
        from rather.data.hub import refuse_unknown_model

        refuse_unknown_model(role.model_path, role.model_args.revision)
    os.environ.update(config.system_envs)
    plugins.load_requested()
    with heavy_imports():
        from rather.data.formats import check_format
        from rather.losses.objective import from_config

    def with_source(problem: str) -> str:
        """`gamma: ...` -> `gamma (dpo.yaml:7): ...`"""
        keys, colon, text = problem.partition(": ")
        sources = [config.sources.get(key, "default") for key in keys.split(", ")]
        lines = ", ".join(source for source in sources if source != "default")
        return f"{keys} ({lines}){colon}{text}" if lines else problem

    try:
        from_config(config)
        check_format(config.actor_train.data_args.format, "actor_train.data_args.format")
        check_format(config.validation.data_args.format, "validation.data_args.format")
    except ConfigError as error:
        raise ConfigError(list(map(with_source, error.problems))) from error
    return config


def print_json(value: Any) -> None:
    echo(strict_json(value, indent=1))


def count(number: int, noun: str) -> str:
    """Return `1 run` or `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows below their headings; columns of numbers are aligned to the right.

    On a terminal, long cells are wrapped between words. Elsewhere each row is one line.
    """
    cells = [[Text(printable(str(x)), STYLES.get(str(x), "")) for x in row] for row in rows]
    console = Console(highlight=False)
    columns = [[printable(heading), *(row[index].plain for row in cells)]
               for index, heading in enumerate(headings)]  # fmt: skip
    room = console.width if console.is_terminal else None
    widths = column_widths(columns, room)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for (heading, *texts), width in zip(columns, widths, strict=True):
        is_number = all(re.match(r"-?(\d|nan|inf|$)", text) for text in texts)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold", width=width)
    for row in cells:
        table.add_row(*row)
    if title:
        echo(title)  # not wrapped to the width of the table
    console.width = sum(widths) + GAP * len(widths)
    with console.capture() as lines:
        console.print(table)
    # Rich pads the last column, which makes a line longer than its text.
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines.get().splitlines()))


def column_widths(columns: Sequence[Sequence[str]], room: int | None) -> list[int]:
    """Return the width of each column so that no word or number is broken.

    The widest column that can still be wrapped between words gives way until the table fits into
    `room` characters; None: nothing is wrapped. Words that do not fit make the table wider.
    """
    natural = [max(cell_len(line) for text in texts for line in text.split("\n"))
               for texts in columns]  # fmt: skip
    if room is None:
        return natural
    longest_word = [max((cell_len(word) for text in texts for word in text.split()), default=0)
                    for texts in columns]  # fmt: skip
    widths = list(natural)
    while sum(widths) + GAP * len(widths) > room:
        shrinkable = [i for i, width in enumerate(widths) if width > longest_word[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths
