"""Writes report.html from the run folder alone: after evaluations, every few minutes, and at the
end of a run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from rather.report import curves, escape, page, parts, plotly_bundle, slug
from rather.report.charts import NO_PLOTLY, has_plotly
from rather.report.folder import REPORT_PAGE, Folder

log = logging.getLogger(__name__)

FIRST, EVERY = (
    20.0,
    300.0,
)  # seconds until the first report, and between two if nothing is evaluated
SHARE = 0.01  # of the run's time, at most


class LiveReport:
    """Writes the report during a run.

    A report that cannot be written costs one warning and never stops training.
    """

    def __init__(self, run_dir: Path, *, wanted: object) -> None:
        """`wanted` is False, or report_html (true or auto) on the driver that writes files."""
        self._run_dir, self._on = run_dir, bool(wanted)
        self._last = time.monotonic()
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
        if not self._on:
            return
        try:
            write_report(self._run_dir, state=state)
        except Exception as error:
            self._on = False
            cause = f"{type(error).__name__}: {error}"
            log.warning(
                "%s failed and is off from now on; the run continues (%s).", REPORT_PAGE, cause
            )


def write_report(run_dir: Path, out: Path | None = None, *, state: str) -> Path:
    """Write the report atomically. `state` describes a run that has not finished."""
    out = out or run_dir / REPORT_PAGE
    text = report_page(Folder.of(run_dir), state)
    # `rather report` and the run may write at the same time.
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        # Texts may contain lone surrogates, which UTF-8 cannot encode.
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


SECTIONS: dict[str, Callable[[Folder], str]] = {
    "Curves": lambda run: curves.curves(run.metrics),
    "Health": parts.health,
    "Answers before and after": parts.answers,
    "Data": parts.data,
    "Time and cost": parts.time_and_cost,
    "Incidents": parts.incidents,
    "Settings": parts.settings,
    "Machine": parts.machine,
    "Reproduce this run": parts.reproduce,
}


def report_page(run: Folder, state: str) -> str:
    state = "finished" if run.finished else state
    body = _part(lambda run: parts.tiles(run, state), run)
    for title, part in SECTIONS.items():
        if text := _part(part, run):
            anchor = slug(title)
            body += f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{title}</h2>'
            body += f"{text}</section>\n"
    return page(run.name, body, scripts=[plotly_bundle()])


def _part(part: Callable[[Folder], str], run: Folder) -> str:
    """Return a part of the page; a damaged file costs only the part that shows it."""
    try:
        return part(run)
    except Exception as error:
        log.debug("a part of %s cannot be shown", REPORT_PAGE, exc_info=True)
        cause = escape(f"{type(error).__name__}: {error}")
        text = f"A file of the run folder is damaged, so this cannot be shown ({cause})."
        return f'<p class="bad">{text}</p>'
