"""SIGTERM and SIGINT ask for an end: the step in hand is finished and saved. A second one ends at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, a signal only sets `signal`; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.last_saved: int | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._received) for number in SIGNALS}
        return self

    def __exit__(self, *_exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            saved = "no checkpoint yet" if self.last_saved is None else f"the last checkpoint is step {self.last_saved}"
            sys.stderr.write(f"\nsecond signal: ending at once; {saved}\n")
            sys.stderr.flush()
            os._exit(1)
        self.signal = number
        sys.stderr.write(f"\n{signal.Signals(number).name}: finishing this step and saving; once more ends at once\n")
        sys.stderr.flush()
