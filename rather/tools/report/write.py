"""Writes report.html from the run folder alone: at the end of a run, and on request."""

from __future__ import annotations

import logging
from pathlib import Path

from rather.files import replace_own
from rather.run_folder.names import REPORT_PAGE
from rather.tools.report.folder import Folder
from rather.tools.report.sections import report_page

log = logging.getLogger(__name__)


def write_report(run_dir: Path, out: Path | None = None, *, state: str) -> Path:
    """Write the report atomically. `state` describes a run that has not finished."""
    out = out or run_dir / REPORT_PAGE
    replace_own(out, report_page(Folder(run_dir), state))
    return out


def write_last_report(run_dir: Path, kind: object, *_: object) -> None:
    """Write the report when a run ends; `kind` is the type of the error that ended it, or None.

    If the report cannot be written, log a warning: the other files of the run are complete.
    """
    try:
        write_report(run_dir, state="failed" if kind else "stopped")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        text = "%s was not written (%s); `rather report` writes it."
        log.warning(text, run_dir / REPORT_PAGE, reason)
