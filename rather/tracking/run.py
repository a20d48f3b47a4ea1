"""RunTracker: sends each record to metrics.jsonl, trackers, console and health watch."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rather.tracking.health import HealthWatch
from rather.tracking.json_lines import (
    LEDGER,
    AppendedFile,
    MetricsFile,
    MetricsPosition,
    Record,
)
from rather.tracking.ledger import LEDGER_SCHEMA, ledger_part
from rather.tracking.trackers import TRACKERS, TrackedRun, Tracker

if TYPE_CHECKING:
    from rather.data.shares import PairRows

log = logging.getLogger(__name__)


class NoTracker:
    """Ignores every record: for processes other than the main one, and runs without a folder."""

    def go_back(self, metrics_position: MetricsPosition, start_step: int) -> None: ...

    def log(self, record: Record) -> None: ...

    def log_pairs(
        self, step: int, pairs: PairRows, ratios: NDArray[Any], weight: NDArray[Any] | None
    ) -> None: ...

    def position(self) -> MetricsPosition:
        return MetricsPosition()

    def close(self, *, failed: bool = False) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


class RunTracker(NoTracker):
    """Sends each record of the run to metrics.jsonl and to all who follow the run."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        total_steps: int,
        start_step: int,
        metrics_position: MetricsPosition = MetricsPosition(),
        quiet: bool = False,
    ) -> None:
        """Start tracking after `start_step` steps.

        `metrics_position` is what `position` returned at the checkpoint to resume from; without it
        metrics.jsonl is written from scratch. `quiet` switches the console off.
        """
        self._metrics = MetricsFile(run.run_dir / "metrics.jsonl")
        self._ledger = AppendedFile(run.run_dir / LEDGER) if run.keeps_ledger else None
        # Packing, hashing and writing 4,096 pairs takes as long as all else that rank 0 does for a
        # step, so a thread does it during the next one.
        self._ledger_thread = ThreadPoolExecutor(1, "ledger")
        self._writing: Future[Any] = self._ledger_thread.submit(int)
        self._run, self._total_steps, self._quiet = run, total_steps, quiet
        self._trackers: dict[str, Tracker] = {}
        self.go_back(metrics_position, start_step)

    def go_back(self, metrics_position: MetricsPosition, start_step: int) -> None:
        """Return to the state of a checkpoint; later records will be logged again."""
        self._close_trackers(failed=False)
        self._metrics.truncate(*metrics_position[:2])
        self._writing.result()
        if self._ledger:
            self._ledger.truncate(*metrics_position[2:])
        run, steps = self._run, (self._total_steps, start_step)
        run.begin(start_step)
        makers: dict[str, Callable[[], Tracker]] = {
            name: partial(TRACKERS[name], run) for name in run.trackers
        }
        if not self._quiet:
            makers["console"] = partial(progress_view, *steps, run.unit)
        makers["health"] = partial(HealthWatch, run.run_dir, *steps, run.unit)
        for name, make in makers.items():
            self._attempt(name, lambda: self._trackers.update({name: make()}))  # noqa: B023 - at once

    def log(self, record: Record) -> None:
        """Log one record with a "step"; in an evaluation the other keys begin with "eval/"."""
        self._metrics.append(record)
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, partial(tracker.log, int(record["step"]), record))

    def log_pairs(
        self, step: int, pairs: PairRows, ratios: NDArray[Any], weight: NDArray[Any] | None
    ) -> None:
        """Append the pairs of a step, or of an evaluation, to ledger.arrows in their order.

        `weight` is None for held-out pairs, which have no gradient: the column is null. Each call
        is one record batch, so that the bytes do not depend on when the run is saved.
        """
        if self._ledger:
            self._writing.result()  # raises what went wrong
            self._writing = self._ledger_thread.submit(
                _write_pairs, self._ledger, step, pairs, ratios, weight
            )

    def position(self) -> MetricsPosition:
        """Return the positions in both files, with every line on the disk, for a checkpoint."""
        self._writing.result()
        ledger = self._ledger.position() if self._ledger else ()
        return MetricsPosition(*self._metrics.position(), *ledger)

    def close(self, *, failed: bool = False) -> None:
        self._close_trackers(failed=failed)
        self._metrics.close()
        self._ledger_thread.shutdown()
        if self._ledger:
            self._ledger.close()
        if not failed:
            self._writing.result()

    def _close_trackers(self, *, failed: bool) -> None:
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, partial(tracker.close, failed=failed))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Let a tracker work; a failure is logged once and switches it off, training continues."""
        try:
            work()
        except Exception as error:
            self._trackers.pop(name, None)
            text = "%s failed and is switched off; training continues (%s: %s)."
            log.warning(text, name, type(error).__name__, error)


def _write_pairs(
    ledger: AppendedFile,
    step: int,
    pairs: PairRows,
    ratios: NDArray[Any],
    weight: NDArray[Any] | None,
) -> None:
    chosen, rejected = ratios.astype(np.float64).T
    steps = [step] * len(chosen)
    weights = [None] * len(chosen) if weight is None else weight
    columns = [steps, pairs.digests, chosen - rejected, chosen, rejected, weights, *pairs.lengths.T]
    arrays = [*map(pa.array, columns, LEDGER_SCHEMA.types)]
    batch = pa.record_batch(arrays, schema=LEDGER_SCHEMA)
    ledger.write(ledger_part(batch, is_first=ledger.is_empty))


FORMATS = {
    "loss": "loss {:.4f}",
    "rewards/accuracies": "acc {:.2f}",
    "rewards/margins": "margin {:.2f}",
    "pairs_per_second": "{:.1f} {unit}/s",
}


def progress_view(*of_run: Any) -> Tracker:
    """Return what shows the progress of a run; a rank on Ray has no terminal."""
    send = getattr(sys.stdout, "send_progress", None)
    return SentProgress(send, *of_run) if send else ProgressView(*of_run)


class SentProgress(Tracker):
    """Sends the calls of a ProgressView to the process that draws it."""

    def __init__(self, send: Callable[..., None], *of_run: Any) -> None:
        self._send = send
        send("begin", *of_run)

    def log(self, step: int, metrics: Record) -> None:
        self._send("log", step, metrics)

    def close(self, *, failed: bool = False) -> None:
        self._send("close")


class DrawnProgress:
    """Draws what the SentProgress of a rank sends."""

    _view: ProgressView | None = None

    def draw(self, call: str, *arguments: Any) -> None:
        if call == "begin":
            self._view = ProgressView(*arguments)
        elif call == "log" and self._view:
            self._view.log(*arguments)
        elif call == "close":
            self.close()

    def close(self) -> None:
        if self._view:
            self._view.close()
        self._view = None


class ProgressView(Tracker):
    """Shows a bar on a terminal and plain lines elsewhere: files and pipes get no control codes."""

    def __init__(self, total_steps: int, start_step: int, unit: str = "pairs") -> None:
        self._total, self._start, self._began = total_steps, start_step, time.monotonic()
        self._unit = unit
        self._bar: Progress | None = None
        if sys.stdout.isatty() and not (console := Console()).is_dumb_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[summary]}", markup=False),
                console=console, expand=True, auto_refresh=False,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, summary="")
            self._bar.start()

    def log(self, step: int, metrics: Record) -> None:
        held_out = [name for name in metrics if name.startswith("eval/")]
        for name in held_out:
            if name.endswith("/loss"):
                name = name.removesuffix("loss")
                self._print(f"step {step}/{self._total}  {name[:-1]}  {summary(metrics, name)}")
        if held_out:
            return
        text = summary(metrics, unit=self._unit)
        if (done := step - self._start) > 0:
            seconds = (time.monotonic() - self._began) / done * max(0, self._total - step)
            text = f"{text}  eta {timedelta(seconds=round(seconds))}"
        if self._bar:
            self._bar.update(self._task, completed=step, summary=text, refresh=True)
        else:
            self._print(f"step {step}/{self._total}  {text}")

    def close(self, *, failed: bool = False) -> None:
        if self._bar:
            self._bar.stop()

    def _print(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)


def summary(metrics: Record, prefix: str = "", *, unit: str = "") -> str:
    """Return the most important numbers: `loss 0.6712  acc 0.58  margin 0.04  12.3 pairs/s`."""
    names = [name for name in FORMATS if prefix + name in metrics]
    shown = [FORMATS[name].format(metrics[prefix + name], unit=unit) for name in names]
    return "  ".join([*shown, *(["skipped"] if metrics.get("skipped_iter") else [])])
