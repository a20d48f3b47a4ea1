"""`rather data`: what the model will see, in the terminal, as a page or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rather.commands.terminal import ConfigPath, Imports, Overrides, guarded, print_json
from rather.commands.terminal import settings as settings_of
from rather.errors import DiskError

PAIRS_ON_A_PAGE = 3


def data_command(
    config: ConfigPath,
    overrides: Overrides = None,
    show: Annotated[
        int, typer.Option(help="Print this many pairs with their scored tokens.", min=0)
    ] = 0,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the tokenised pairs to this new folder.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write everything as one HTML file, with charts.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON instead of tables.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Prepare the pairs and show what the model will see: dropped rows with reasons, lengths,
    repeats, contradictions, evaluation prompts that are also in train, and prompts that differ at
    inference."""

    def work() -> int:
        settings = settings_of(config, overrides or [])
        from rather.data.prepare import prepare
        from rather.data.save import save as save_pairs
        from rather.data.show import print_look, print_report, show_pairs, token_view
        from rather.data.template import load_tokenizer
        from rather.report.data_page import data_page

        prepared = prepare(settings)
        report, console = dict(prepared.report), Console(stderr=as_json)
        if show or html:
            args = settings.actor_train.model_args
            path = settings.actor_train.tokenizer_path
            tokenizer = load_tokenizer(path, args.revision, args.trust_remote_code)
            report["shown"] = token_view(prepared.train, tokenizer, show or PAIRS_ON_A_PAGE)
        if as_json:
            print_json(report)
        else:
            print_report(report, console)
            print_look(report["look"], console)
            if show:
                show_pairs(prepared.train, tokenizer, show, console)
        if save:
            for folder in save_pairs(prepared, save):
                typer.echo(f"tokenised pairs are in {folder}", err=as_json)
        if html:
            try:
                html.write_text(data_page(report, settings.exp_name), encoding="utf-8")
            except OSError as error:
                raise DiskError(f"--html {html}: cannot be written ({error.strerror}).") from error
            typer.echo(f"the page is in {html}", err=as_json)
        return 0

    raise typer.Exit(guarded(work))
