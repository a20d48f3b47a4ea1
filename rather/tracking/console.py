"""The terminal view of a run: a progress bar, or plain lines if stdout is not a terminal."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rather.tracking.metrics_file import Record

FORMATS = {
    "loss": "loss {:.4f}",
    "rewards/accuracies": "acc {:.2f}",
    "rewards/margins": "margin {:.2f}",
    "pairs_per_second": "{:.1f} pairs/s",
}


class ProgressView:
    """Shows a bar on a terminal and plain lines elsewhere: files and pipes get no control codes."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._total, self._start, self._began = total_steps, start_step, time.monotonic()
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
        sets = [name[:-5] for name in metrics if name.startswith("eval/") and name[-5:] == "/loss"]
        for name in sets:
            self._print(f"step {step}/{self._total}  {name}  {summary(metrics, name + '/')}")
        if any(name.startswith("eval/") for name in metrics):
            return
        text = summary(metrics)
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


def summary(metrics: Record, prefix: str = "") -> str:
    """Return the most important numbers: `loss 0.6712  acc 0.58  margin 0.04  12.3 pairs/s`."""
    names = [name for name in FORMATS if prefix + name in metrics]
    shown = [FORMATS[name].format(metrics[prefix + name]) for name in names]
    return "  ".join([*shown, *(["skipped"] if metrics.get("skipped_iter") else [])])
