"""What a process logs and prints, until another one fetches it.

No torch in here: the process of a device imports this before its environment is set.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from io import TextIOBase
from typing import Any

from rather.config.redaction import redact

MOST_LINES = 10_000  # kept until they are fetched; a starter that is late loses the oldest
LOG, STDOUT, STDERR, BEGINS, PROGRESS = "log", "stdout", "stderr", "begins", "progress"

# A log record (logger, level, message), a text for a stream, the note that training begins, or what
# a progress bar shows, as JSON.
Output = tuple[str, str, int, str]


class RankOutput(logging.Handler):
    """Keeps what this process logs and prints, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[Output] = deque(maxlen=MOST_LINES)
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        self.add(LOG, record.name, record.levelno, redact(record.getMessage()))

    def add(self, kind: str, name: str = "", level: int = 0, text: str = "") -> None:
        with self._turn:
            self._kept.append((kind, name, level, text))

    def take(self) -> list[Output]:
        with self._turn:
            taken = list(self._kept)
            self._kept.clear()
        return taken

    def stream(self, kind: str) -> TextIOBase:
        """Return a text stream whose content is kept."""
        return _Stream(self, kind)


class _Stream(TextIOBase):
    def __init__(self, output: RankOutput, kind: str) -> None:
        self._output, self._kind = output, kind

    def write(self, text: str) -> int:
        self._output.add(self._kind, text=redact(text))
        return len(text)

    def send_progress(self, *message: Any) -> None:
        """Let the process that owns the terminal draw what `SentProgress` reports."""
        self._output.add(PROGRESS, text=json.dumps(message, default=float))


def pass_on(taken: list[Output], draw: Callable[..., None]) -> bool:
    """Log, print and draw what a rank has; return whether it says that training begins."""
    begins = False
    for kind, name, level, text in taken:
        if kind == LOG:
            logging.getLogger(name).log(level, "%s", text)
        elif kind == BEGINS:
            begins = True
        elif kind == PROGRESS:
            draw(*json.loads(text))
        else:
            stream = sys.stdout if kind == STDOUT else sys.stderr
            stream.write(text)
            stream.flush()
    return begins
