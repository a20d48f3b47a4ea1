"""Log files that are complete however the process ends, and contain no secrets."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from rather.config.redaction import printable, redact
from rather.errors import ConfigError, RatherError
from rather.files import own

_ROOT = logging.getLogger("rather")
_files: dict[Path, _LogFile] = {}
_undo = ExitStack()  # restores what was changed in this process


def setup_logging(log_dir: Path) -> None:
    """Log `rather.*` to <log_dir>/driver.log and, shorter, to stderr until `close_logging`."""
    path = Path(log_dir).absolute() / "driver.log"
    if path not in _files:
        close_logging()
        _add_file(_ROOT, path, "driver")
        _attach(_ROOT, _Stderr())


def worker_log(log_dir: Path, role: str, rank: int) -> logging.Logger:
    """Return the logger of one worker, which writes to <role>-<rank>.log.

    In a process of its own the worker's file takes everything that `rather.*` logs there. In the
    driver's process it takes what is logged through this logger, and driver.log has that too.
    """
    name = f"{role}-{rank}"
    logger = logging.getLogger(f"rather.worker.{name}")
    path = Path(log_dir).absolute() / f"{name}.log"
    if path not in _files:
        _add_file(logger if _files else _ROOT, path, name)
    return logger


def close_logging() -> None:
    """Write the exception that is being handled, if any, close the log files and undo the rest."""
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        for file in _files.values():
            file.write_crash(error)
    _files.clear()
    _undo.close()


def _add_file(logger: logging.Logger, path: Path, origin: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(path, origin)
    except OSError as error:
        problem = f"logging_dir: {path} cannot be written ({error.strerror}); set another folder."
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
    """Also write uncaught exceptions of any thread, and stacks of crashes below Python."""

    def write(error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            file.write_crash(error)
            print(redact("".join(traceback.format_exception(error))), file=sys.stderr)

    was_enabled = faulthandler.is_enabled()
    assert file.stream is not None, "opened by the constructor"
    faulthandler.enable(file.stream.fileno())
    _undo.callback(partial(faulthandler.enable, 2) if was_enabled else faulthandler.disable)
    _undo.callback(setattr, threading, "excepthook", threading.excepthook)
    _undo.callback(setattr, sys, "excepthook", sys.excepthook)
    sys.excepthook = lambda _, error, __: write(error)
    threading.excepthook = lambda args: write(args.exc_value)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # After formatting: a traceback may hold a secret.
        return printable(redact(super().format(record)))


class _LogFile(logging.FileHandler):
    """Flushes each record before the call returns, so a kill loses nothing."""

    def __init__(self, path: Path, origin: str) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Redacting(f"%(asctime)s [{origin}] %(levelname)s %(name)s: %(message)s"))
        self._failing = False

    def _open(self) -> TextIOWrapper:
        mode, how = self.mode, {"encoding": self.encoding, "errors": self.errors}
        return open(self.baseFilename, mode, opener=own, **how)  # type: ignore[call-overload,no-any-return]

    def write_crash(self, error: BaseException) -> None:
        """Write one line for an error of Rather, and a traceback for any other."""
        ours = isinstance(error, RatherError)
        trace = None if ours else (type(error), error, error.__traceback__)
        text = f"the run ends: {type(error).__name__}: {error}"
        self.handle(logging.LogRecord("rather", logging.CRITICAL, __file__, 0, text, None, trace))

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failing:
            lost = f"warning: {self.baseFilename}: lines are being lost ({sys.exception()})"
            print(lost, file=sys.stderr)
        self._failing = True

    def close(self) -> None:
        with suppress(OSError):  # a full disk does not take the rest at the end either
            super().close()


class _Stderr(logging.Handler):
    """Looks up sys.stderr for each line: a progress bar replaces it, to print above itself."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Redacting("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        with suppress(OSError):  # stderr is closed; the file has the line
            print(level + self.format(record), file=sys.stderr, flush=True)
