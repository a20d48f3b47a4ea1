"""Writes report.html from the run folder alone: during a run, at its end, and on request.

With 20,000 logged steps and 320,000 visits of pairs, a page takes eight seconds of computing. While
a run trains, a child process writes it, so that the other ranks do not wait for the first one. It
ends when the page is written.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess  # nosec B404
import sys
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
PATIENCE = 60.0  # seconds at the end of a run for the page that is being written
POLITE = 10  # niceness of the child: training comes first
START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from rather.tools.report.write import main
main()
"""


class LiveReport:
    """Writes the report during a run. A failure costs one warning and never stops training."""

    def __init__(self, run_dir: Path, *, wanted: object) -> None:
        """`wanted` is False, or report_html (true or auto) on the driver that writes files."""
        self._run_dir, self._on, self._last = run_dir, bool(wanted), time.monotonic()
        self._next = self._last + FIRST
        self._child: subprocess.Popen[str] | None = None
        if self._on and not has_plotly():
            self._on = False
            log.info("%s is not written: %s", REPORT_PAGE, NO_PLOTLY)

    def log(self, *, evaluated: bool) -> None:
        now = time.monotonic()
        if self._child and self._child.poll() is not None:
            self._collect(self._child, now)
        is_due = now >= self._next and (evaluated or now - self._last >= EVERY)
        if self._on and is_due and not self._child:
            self._last = now
            self._child = start_child(self._run_dir)

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end_child()
        try:
            if self._on:
                write_report(self._run_dir, state="failed" if kind else "stopped")
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}")

    def _collect(self, child: subprocess.Popen[str], now: float) -> None:
        """Take what a child that has ended says: how long it took, or why it failed."""
        seconds, reason = child.communicate()
        self._child = None
        if child.returncode:
            last_line = reason.strip().rpartition("\n")[2]
            self._turn_off(last_line or f"exit code {child.returncode}")
        else:
            self._next = now + float(seconds) / SHARE

    def _end_child(self) -> None:
        """Wait for the child, which would replace the last page; end it if it takes too long."""
        if self._child:
            try:
                self._child.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.communicate()

    def _turn_off(self, reason: str) -> None:
        self._on = False
        text = "%s failed and is off from now on; the run continues (%s)."
        log.warning(text, REPORT_PAGE, reason)


def start_child(run_dir: Path) -> subprocess.Popen[str]:
    """Start the process that writes the page of a run that is training."""
    return subprocess.Popen(  # nosec B603
        [sys.executable, "-c", START, json.dumps(sys.path), str(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_report(run_dir: Path, out: Path | None = None, *, state: str) -> Path:
    """Write the report atomically. `state` describes a run that has not finished."""
    out = out or run_dir / REPORT_PAGE
    # Reading texts takes seconds, which a running job does not spend on each of its reports.
    run = Folder(run_dir, reads_texts=state != "running")
    replace_own(out, report_page(run, state))
    return out


def main() -> None:
    """Write the page of the run folder that the command line names; print the seconds it took."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal is for the run
    os.nice(POLITE)
    started = time.monotonic()
    write_report(Path(sys.argv[1]), state="running")
    print(time.monotonic() - started)
