"""Log files that are complete however the process ends, and hold no secret."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from rather.config.redaction import redact
from rather.errors import ConfigError, RatherError

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
        trace = (
            None if isinstance(error, RatherError) else (type(error), error, error.__traceback__)
        )
        text = f"the run ends: {type(error).__name__}: {error}"
        self.handle(logging.LogRecord("rather", logging.CRITICAL, __file__, 0, text, None, trace))

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failing:
            print(
                f"warning: {self.baseFilename}: lines are being lost ({sys.exception()})",
                file=sys.stderr,
            )
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
