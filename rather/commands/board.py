"""The command `rather board`: serves the page until Ctrl-C."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rather.commands.terminal import guarded

OUTPUT = Path("output")  # the default of output_dir


def board_command(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder of the runs, or one run.")
    ] = OUTPUT,
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser on it.")] = True,
) -> None:
    """Show all runs of a folder on a local page: live curves, comparisons, findings, and pairs token by token."""

    def work() -> int:
        from rather.board.serve import Board
        from rather.errors import ConfigError

        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: is no folder; name the one that holds the runs, such as output."
            )
        os.environ.setdefault(
            "HF_HUB_OFFLINE", "1"
        )  # models and tokenizers are those of this machine
        with Board(folder.absolute(), port) as board:
            typer.echo(
                f"{folder}: {len(board.runs.rows())} runs at {board.address} (Ctrl-C ends it)"
            )
            opening = door(board.address) if browser and has_display() else nullcontext()
            with opening as page, suppress(KeyboardInterrupt):
                if page:
                    webbrowser.open(page)
                board.serve_forever()
        return 0

    raise typer.Exit(guarded(work))


@contextmanager
def door(address: str) -> Iterator[str]:
    """The address of a page for this user only that leads there.

    A browser is told it in its arguments, which every user of the machine can read; the board's own carries the token.
    """
    with TemporaryDirectory(prefix="rather-board-") as folder:
        page = Path(folder) / "board.html"
        page.touch(mode=0o600)
        leads = f'<meta http-equiv="refresh" content="0; url={escape(address)}">'
        page.write_text(
            f'<!doctype html><meta name="referrer" content="no-referrer">{leads}<title>rather</title>\n'
        )
        yield page.as_uri()


def has_display() -> bool:
    """Without one, the browser that opens would be one in this terminal."""
    return sys.platform != "linux" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
