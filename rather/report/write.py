"""report.html, written from the run folder alone: when an evaluation is done, every few minutes, and at the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rather.config.schema import DPOConfig
from rather.report import curves, escape, page, parts, plotly_bundle, slug
from rather.report.folder import Folder
from rather.run_folder.layout import REPORT_PAGE

log = logging.getLogger(__name__)

FIRST, EVERY = 20.0, 300.0  # seconds to the first one, and between two where nothing is evaluated
SHARE = 0.01  # of the run's time, at most


class LiveReport:
    """While a run goes on. A report that cannot be written is told once; training never stops for it."""

    def __init__(self, config: DPOConfig, *, leads: bool) -> None:
        self._run_dir, self._on = config.run_dir, leads and config.report_html
        self._last = time.monotonic()
        self._next = self._last + FIRST

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
            log.warning("%s failed and is off from here; the run goes on (%s).", REPORT_PAGE, cause)


def write_report(run_dir: Path, out: Path | None = None, *, state: str) -> Path:
    """Whole or not at all: a reader never sees half of one. `state` is of a run that has not finished."""
    out = out or run_dir / REPORT_PAGE
    text = report_page(Folder.of(run_dir), state)
    unfinished = out.with_name(
        f".{out.name}.{os.getpid()}.part"
    )  # `rather report` may write beside the run
    try:
        # A path or an answer may hold half a character, which UTF-8 has not.
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
    "The same again": parts.again,
}


def report_page(run: Folder, state: str) -> str:
    sections = {title: _part(part, run) for title, part in SECTIONS.items()}
    tiles = _part(partial(parts.tiles, state="finished" if run.finished else state), run)
    body = tiles + "\n".join(
        f'<section aria-labelledby="{(anchor := slug(title))}"><h2 id="{anchor}">{title}</h2>{text}</section>'
        for title, text in sections.items()
        if text
    )
    return page(run.name, body, scripts=[plotly_bundle()])


def _part(part: Callable[[Folder], str], run: Folder) -> str:
    """A file with other content than a run writes costs the part that tells of it, never the rest."""
    try:
        return part(run)
    except Exception as error:
        log.debug("a part of %s cannot be told", REPORT_PAGE, exc_info=True)
        cause = escape(f"{type(error).__name__}: {error}")
        return f'<p class="bad">A file of the run folder is damaged, so this cannot be told ({cause}).</p>'
