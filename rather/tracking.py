"""What a run tells: metrics.jsonl, TensorBoard, the console and the log files. The only door to trackers.

metrics.jsonl is the record of the run and part of what a checkpoint promises: no line is lost or doubled. All
the rest may fail (a full disk, a closed pipe): that is told once, the part is switched off, the run goes on.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rather import faults
from rather.errors import CheckpointError, ConfigError, DiskError, RatherError
from rather.redaction import redact

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)

Record = Mapping[str, float | int]


class RunTracker:
    """Brings each record of the run to metrics.jsonl, to the trackers of `track_with` and to the console."""

    def __init__(
        self,
        config: DPOConfig,
        *,
        total_steps: int,
        start_step: int,
        metrics_position: int | None,
        quiet: bool = False,
    ) -> None:
        """`metrics_position` is what `position` gave at the checkpoint that is continued; without it the file
        begins anew. Steps after `start_step`, left by a run that died, are purged from the trackers."""
        self._metrics = MetricsFile(config.run_dir / "metrics.jsonl")
        self._config, self._total_steps, self._quiet = config, total_steps, quiet
        self._trackers: list[_Forgiving] = []
        self.go_back(metrics_position or 0, start_step)

    def go_back(self, metrics_position: int, start_step: int) -> None:
        """To where a checkpoint was saved: what came after will be told again."""
        for tracker in self._trackers:
            tracker.close()
        self._metrics.truncate(metrics_position)
        purge_step = start_step + 1 if start_step else 0
        makers = {name: partial(TRACKERS[name], self._config, purge_step) for name in self._config.trackers}
        self._trackers = [_Forgiving(name, make) for name, make in makers.items()]
        if not self._quiet:
            self._trackers.append(_Forgiving("console", partial(ProgressView, self._total_steps, start_step)))

    def log(self, record: Record) -> None:
        """One record; it has a "step", and in an evaluation the other keys begin with "eval/"."""
        self._metrics.append(record)
        for tracker in self._trackers:
            tracker.log(int(record["step"]), record)

    def position(self) -> int:
        """The length of metrics.jsonl, all of it on the disk: goes into the checkpoint."""
        return self._metrics.position()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._metrics.close()

    def __enter__(self) -> RunTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoTracker:
    """Of a process that does not lead: its records are those of another."""

    def go_back(self, metrics_position: int, start_step: int) -> None:
        pass

    def log(self, record: Record) -> None:
        pass

    def position(self) -> int:
        return 0

    def __enter__(self) -> NoTracker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# --- metrics.jsonl ---


class MetricsFile:
    """One JSON object per line, appended; after each line the file holds whole lines only.

    A line that a full disk does not take is kept and written with a later one, so that none is lost.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._unwritten = b""

    def append(self, record: Record) -> None:
        already_failing = bool(self._unwritten)
        self._unwritten += json_line(record).encode()
        try:
            faults.point("metrics")
            self._write()
            faults.point("metrics.done")
        except OSError as error:
            if not already_failing:
                log.warning("%s: cannot be written (%s); its lines wait.", self.path, error.strerror)

    def position(self) -> int:
        try:
            self._write()
            faults.point("metrics.sync")
            os.fsync(self._descriptor)
        except OSError as error:
            waiting = f"{len(self._unwritten):,} bytes of metrics wait for room on the disk"
            raise DiskError(f"{self.path}: cannot be written ({error.strerror}); {waiting}.") from error
        return self._size

    def truncate(self, position: int) -> None:
        """Back to the length it had at a checkpoint: what came after will be written again."""
        if self._size < position or (position and os.pread(self._descriptor, 1, position - 1) != b"\n"):
            raise CheckpointError(
                f"{self.path}: has {self._size:,} bytes, the checkpoint was saved when a line ended at "
                f"{position:,}: the file was cut or changed since. Put it back, or begin anew with "
                "--overwrite or another exp_name."
            )
        os.ftruncate(self._descriptor, position)
        os.fsync(self._descriptor)
        self._size, self._unwritten = position, b""

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s: the last lines were lost (%s).", self.path, error.strerror)
        os.close(self._descriptor)

    def _write(self) -> None:
        """All or nothing: a full disk takes the first half of a line, which is cut off again."""
        done = 0
        try:
            while done < len(self._unwritten):
                done += os.write(self._descriptor, self._unwritten[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done
        self._unwritten = b""


def json_line(record: Record) -> str:
    """Strict JSON, fields in the order given. JSON has no NaN: such a value is null, and the last field says
    what it was: {"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}."""
    nonfinite = {key: str(value) for key, value in record.items() if not math.isfinite(value)}
    fields: dict[str, Any] = {key: None if key in nonfinite else value for key, value in record.items()}
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, allow_nan=False) + "\n"


# --- trackers ---


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars by their metric names. What an earlier, killed run wrote from `purge_step` on is dropped."""

    def __init__(self, log_dir: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, and is not always asked for

        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)

    def log(self, step: int, metrics: Record) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else a kill takes the last two minutes along

    def close(self) -> None:
        self._writer.close()


TRACKERS: Mapping[str, Callable[[DPOConfig, int], Tracker]] = {
    "tensorboard": lambda config, purge_step: TensorBoard(config.tensorboard_dir, purge_step),
}


class _Forgiving:
    """A tracker whose failure is told once and switches it off; training never stops for it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        with self._forgiven():
            self._tracker = make()

    def log(self, step: int, metrics: Record) -> None:
        if self._tracker:
            with self._forgiven():
                self._tracker.log(step, metrics)

    def close(self) -> None:
        if self._tracker:
            with self._forgiven():
                self._tracker.close()

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            cause = f"{type(error).__name__}: {error}"
            log.warning("%s failed and is off from here; the run goes on (%s).", self._name, cause)


# --- console ---

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
            self._bar = Progress(*columns, figures, console=console, expand=True, auto_refresh=False)
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

    def close(self) -> None:
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
        seconds = (time.monotonic() - self._began) / (step - self._start) * max(0, self._total - step)
        return f"eta {timedelta(seconds=round(seconds))}"


def figures(metrics: Record, prefix: str = "") -> str:
    """The few numbers for a person: `loss 0.6712  acc 0.58  margin 0.04  12.3 pairs/s`."""
    shown = [form.format(metrics[prefix + key]) for key, form in FIGURES.items() if prefix + key in metrics]
    return "  ".join([*shown, *(["skipped"] if metrics.get("skipped_iter") else [])])


# --- log files ---

_ROOT = logging.getLogger("rather")
_files: dict[Path, _LogFile] = {}
_undo = ExitStack()  # gives back what was changed in this process


def setup_logging(log_dir: Path) -> None:
    """From now on `rather.*` logs to <log_dir>/driver.log and, shorter, to stderr. Until `close_logging`."""
    path = Path(log_dir).absolute() / "driver.log"
    if path not in _files:
        close_logging()
        _add_file(_ROOT, path, "driver")
        _attach(_ROOT, _Stderr())


def worker_log(log_dir: Path, role: str, rank: int) -> logging.Logger:
    """The logger of one worker, with its own <role>-<rank>.log.

    In a process of its own the worker's file takes everything that `rather.*` logs there. In the driver's
    process it takes what is said through this logger, and driver.log has that too.
    """
    name = f"{role}-{rank}"
    logger = logging.getLogger(f"rather.worker.{name}")
    path = Path(log_dir).absolute() / f"{name}.log"
    if path not in _files:
        _add_file(logger if _files else _ROOT, path, name)
    return logger


def close_logging() -> None:
    """Closes the log files and undoes the rest. An exception that is just passing is written down first."""
    passing = sys.exception()
    if passing is not None and not isinstance(passing, SystemExit):
        for file in _files.values():
            file.write_crash(passing)
    _files.clear()
    _undo.close()


def _add_file(logger: logging.Logger, path: Path, origin: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(path, origin)
    except OSError as error:
        problem = f"logging_dir: {path} cannot be written ({error.strerror}); name another folder."
        raise ConfigError(problem) from error
    _attach(logger, file)
    if not _files:
        _catch_crashes(file)
    _files[path] = file


def _attach(logger: logging.Logger, handler: logging.Handler) -> None:
    _undo.callback(handler.close)
    _undo.callback(logger.removeHandler, handler)
    _undo.callback(_ROOT.setLevel, _ROOT.level)
    logger.addHandler(handler)
    _ROOT.setLevel(logging.INFO)


def _catch_crashes(file: _LogFile) -> None:
    """Uncaught exceptions of any thread, and the stacks of a crash below Python, go into the file too."""
    hook, thread_hook, dumping = sys.excepthook, threading.excepthook, faulthandler.is_enabled()

    def tell(error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            file.write_crash(error)
            print(redact("".join(traceback.format_exception(error))), file=sys.stderr)

    sys.excepthook = lambda _, error, __: tell(error)
    threading.excepthook = lambda args: tell(args.exc_value)
    assert file.stream is not None, "opened when made"
    faulthandler.enable(file.stream.fileno())
    _undo.callback(partial(faulthandler.enable, 2) if dumping else faulthandler.disable)
    _undo.callback(setattr, threading, "excepthook", thread_hook)
    _undo.callback(setattr, sys, "excepthook", hook)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))  # after formatting: a traceback may hold a secret too


class _LogFile(logging.FileHandler):
    """Each record is in the file when the call returns, so the file is complete however the process ends."""

    def __init__(self, path: Path, origin: str) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Redacting(f"%(asctime)s [{origin}] %(levelname)s %(name)s: %(message)s"))
        self._failing = False

    def write_crash(self, error: BaseException) -> None:
        """An error of ours is a sentence; any other needs its traceback."""
        trace = None if isinstance(error, RatherError) else (type(error), error, error.__traceback__)
        text = f"the run ends: {type(error).__name__}: {error}"
        self.handle(logging.LogRecord("rather", logging.CRITICAL, __file__, 0, text, None, trace))

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failing:
            print(f"warning: {self.baseFilename}: lines are being lost ({sys.exception()})", file=sys.stderr)
        self._failing = True

    def close(self) -> None:
        with suppress(OSError):  # what a full disk did not take cannot be written at the end either
            super().close()


class _Stderr(logging.Handler):
    """Looks up sys.stderr for each line: a live progress bar takes its place, to print above itself."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Redacting("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        with suppress(OSError):  # nobody reads stderr any more; the file has the line
            print(level + self.format(record), file=sys.stderr, flush=True)
