"""The command `rather report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rather.commands.terminal import guarded


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file; default: report.html in the run folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Write the report of a run: one self-contained HTML file, made from the run folder."""

    def work() -> int:
        from rather.errors import ConfigError
        from rather.report.write import write_report
        from rather.run_folder import control

        state = "running" if control.holder(run) else "not finished"
        try:
            typer.echo(f"the report is in {write_report(run, out, state=state)}")
        except OSError as error:
            raise ConfigError(
                f"--out {error.filename or out}: cannot be written ({error.strerror})."
            ) from error
        return 0

    raise typer.Exit(guarded(work))
