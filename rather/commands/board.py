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


def board_command(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder of the runs, or one run.")
    ] = Path("output"),  # the default of output_dir
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1; 0 picks a free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Show all runs of a folder on a local page: live curves, comparisons, findings, and pairs
    token by token.
    """

    def work() -> int:
        from rather.board.serve import Board
        from rather.errors import ConfigError
        from rather.report import plotly_bundle

        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: not a folder; give the one that contains the runs, such as output."
            )
        plotly_bundle()  # say now if the extra is missing
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only models and tokenizers of this machine
        with Board(folder.absolute(), port) as board:
            count = len(board.runs.rows())
            runs = "1 run" if count == 1 else f"{count} runs"
            typer.echo(f"{folder}: {runs} at {board.address} (stop with Ctrl-C)")
            opening = private_page(board.address) if browser and has_display() else nullcontext()
            with opening as page, suppress(KeyboardInterrupt):
                if page:
                    webbrowser.open(page)
                board.serve_forever()
        return 0

    raise typer.Exit(guarded(work))


@contextmanager
def private_page(address: str) -> Iterator[str]:
    """Provide the address of a page, readable by this user only, that redirects to the board.

    Every user of the machine can read the arguments of a browser process, and the board's address
    has the token.
    """
    with TemporaryDirectory(prefix="rather-board-") as folder:
        page = Path(folder) / "board.html"
        page.touch(mode=0o600)
        page.write_text(
            '<!doctype html><meta name="referrer" content="no-referrer"><title>rather</title>'
            f'<meta http-equiv="refresh" content="0; url={escape(address)}">\n'
        )
        yield page.as_uri()


def has_display() -> bool:
    """Return whether a browser can open a window; without a display it would open in this
    terminal.
    """
    return sys.platform != "linux" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
