"""What a process does right now: the call it is in, how long, and the Python stacks of its threads."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STANDARD = str(Path(os.__file__).parent)
LIBRARIES = f"{os.sep}site-packages{os.sep}"
TORCH = f"{os.sep}torch{os.sep}"
DISTRIBUTED = f"{TORCH}distributed{os.sep}"
DISPATCH = (
    "_ops.py",
    "c10d_logger.py",
    "_contextlib.py",
)  # between a call of torch.distributed and its work


@dataclass(frozen=True)
class Look:
    """In words: it is shown to people, and may have come from another machine."""

    call: str
    seconds: float
    place: str  # the innermost line that is neither torch nor Python's own
    collective: str | None  # the function of torch.distributed in which it waits for others
    stacks: str

    @property
    def where(self) -> str:
        return f"{self.collective} ({self.place})" if self.collective else self.place


class Pulse:
    """The call in which this process is. One thread works, another may look."""

    def __init__(self) -> None:
        self.call, self.since, self.thread = "nothing", time.monotonic(), threading.get_ident()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        before = self.call, self.since, self.thread
        self.call, self.since, self.thread = call, time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self.call, self.since, self.thread = before

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def look(self) -> Look:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            ident: traceback.extract_stack(frame)
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        }
        working = stacks.get(self.thread, traceback.StackSummary())
        # On CUDA the backward pass has threads of its own.
        waits = [found for stack in (working, *stacks.values()) if (found := _collective(stack))]
        told = [
            f"thread {names.get(ident, ident)}{' (works)' * (ident == self.thread)}:\n{''.join(stack.format())}"
            for ident, stack in sorted(stacks.items(), key=lambda item: item[0] != self.thread)
        ]
        return Look(
            self.call, self.seconds, _place(working), waits[0] if waits else None, "\n".join(told)
        )


def _collective(stack: traceback.StackSummary) -> str | None:
    for frame in reversed(stack):
        if not frame.filename.endswith(DISPATCH):
            return (
                frame.name
                if DISTRIBUTED in frame.filename and "_checkpoint" not in frame.filename
                else None
            )
    return None


def _place(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not frame.filename.startswith(STANDARD) and LIBRARIES not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"
    return "no code of its own"
