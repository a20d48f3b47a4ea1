"""Writes report.html from the run folder alone: during a run, at its end, and on request."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rather.files import replace_own
from rather.run_folder.names import REPORT_PAGE
from rather.tools.report.folder import Folder
from rather.tools.report.page import NO_PLOTLY, has_plotly
from rather.tools.report.sections import report_page

log = logging.getLogger(__name__)

# Seconds until the first report, and between two if nothing is evaluated.
FIRST, EVERY = 20.0, 300.0
SHARE = 0.01  # of the run's time, at most


class LiveReport:
    """Writes the report during a run. A failure costs one warning and never stops training."""

    def __init__(self, run_dir: Path, *, wanted: object) -> None:
        """`wanted` is False, or report_html (true or auto) on the driver that writes files."""
        self._run_dir, self._on, self._last = run_dir, bool(wanted), time.monotonic()
        self._next = self._last + FIRST
        if self._on and not has_plotly():
            self._on = False
            log.info("%s is not written: %s", REPORT_PAGE, NO_PLOTLY)

    def log(self, *, evaluated: bool) -> None:
        now = time.monotonic()
        if now >= self._next and (evaluated or now - self._last >= EVERY):
            self._write("running")
            self._last = time.monotonic()
            self._next = self._last + (self._last - now) / SHARE

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._write("failed" if kind else "stopped")

    def _write(self, state: str) -> None:
        try:
            if self._on:
                write_report(self._run_dir, state=state)
        except Exception as error:
            self._on = False
            text = "%s failed and is off from now on; the run continues (%s: %s)."
            log.warning(text, REPORT_PAGE, type(error).__name__, error)


def write_report(run_dir: Path, out: Path | None = None, *, state: str) -> Path:
    """Write the report atomically. `state` describes a run that has not finished."""
    out = out or run_dir / REPORT_PAGE
    # Reading texts takes seconds, which a running job does not spend on each of its reports.
    run = Folder(run_dir, reads_texts=state != "running")
    replace_own(out, report_page(run, state))
    return out
