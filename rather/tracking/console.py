"""What a run tells on the terminal: a progress bar, or plain lines where no one watches."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rather.tracking.metrics_file import Record

FIGURES = {
    "loss": "loss {:.4f}",
    "rewards/accuracies": "acc {:.2f}",
    "rewards/margins": "margin {:.2f}",
    "pairs_per_second": "{:.1f} pairs/s",
}


class ProgressView:
    """A progress bar on a terminal, plain lines elsewhere: no control codes ever reach a file or a pipe."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self._total, self._start = total_steps, start_step
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if sys.stdout.isatty() and not (console := Console()).is_dumb_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None))
            figures = TextColumn("{task.fields[figures]}", markup=False)
            self._bar = Progress(
                *columns, figures, console=console, expand=True, auto_refresh=False
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, figures="")
            self._bar.start()

    def log(self, step: int, metrics: Record) -> None:
        evaluation = [key for key in metrics if key.startswith("eval/")]
        for name in (key.removesuffix("/loss") for key in evaluation if key.endswith("/loss")):
            self._print(f"step {step}/{self._total}  {name}  {figures(metrics, name + '/')}")
        if evaluation:
            return
        text = "  ".join(part for part in (figures(metrics), self._eta(step)) if part)
        if self._bar:
            self._bar.update(self._task, completed=step, figures=text, refresh=True)
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

    def _eta(self, step: int) -> str:
        if step <= self._start:
            return ""
        seconds = (
            (time.monotonic() - self._began) / (step - self._start) * max(0, self._total - step)
        )
        return f"eta {timedelta(seconds=round(seconds))}"


def figures(metrics: Record, prefix: str = "") -> str:
    """The few numbers for a person: `loss 0.6712  acc 0.58  margin 0.04  12.3 pairs/s`."""
    shown = [
        form.format(metrics[prefix + key])
        for key, form in FIGURES.items()
        if prefix + key in metrics
    ]
    return "  ".join([*shown, *(["skipped"] if metrics.get("skipped_iter") else [])])
