"""SIGTERM and SIGINT stop a run, SIGUSR1 saves a checkpoint. A second SIGTERM or SIGINT quits
immediately.

Before training begins nothing is lost, so the run ends immediately; later the step is finished and
saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from rather.errors import Ended

ENDS = (signal.SIGTERM, signal.SIGINT)
SAVES = signal.SIGUSR1
STOPS = 1000  # added to the signal number; larger than any other request
# Seconds in which torchrun forwards a Ctrl-C that its processes already got from the terminal.
ECHO = 10.0
PATIENCE = 45.0  # seconds for cleaning up; a library may wait forever for something that is gone


class StopRequest:
    """While entered, `signal` and `save_now` hold requests; the loop reads them between steps."""

    def __init__(
        self, last_saved: Callable[[], int | None] = lambda: None, patience: float | None = PATIENCE
    ) -> None:
        self._patience = patience
        self.signal: int | None = None
        self.save_now = False
        self.stops = self.saves = False  # what all processes have agreed on
        self.last_saved = last_saved
        self._at_once = True
        self._heard = 0.0
        self._leaving: threading.Timer | None = None

    def __enter__(self) -> StopRequest:
        # Signals reach only the main thread.
        numbers = (*ENDS, SAVES) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._leaving is not None:
            self._leaving.cancel()
        if error is None:
            self._end_if_asked()

    def begin_training(self) -> None:
        """From now on a stop saves first."""
        self._end_if_asked()
        self._at_once = False

    def _end_if_asked(self) -> None:
        """Raise again: an exception inside a library, such as in `__del__`, may have been
        swallowed.
        """
        if self._at_once and self.signal is not None:
            raise _before_training(self.signal)

    @property
    def ends(self) -> bool:
        """Return whether this process was asked to stop; others may not know yet."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.stops and self.signal is not None else 0

    @property
    def asked(self) -> int:
        """Return the request as a number; the largest one of all processes applies to all."""
        return STOPS + self.signal if self.signal is not None else int(self.save_now)

    def agree(self, asked: int) -> None:
        """Apply the request of all processes. A signal in between waits for the next agreement."""
        self.stops, self.saves = asked >= STOPS, asked > 0
        if self.stops and self.signal is None:
            # This process's own copy of the signal will be an echo.
            self.signal, self._heard = asked - STOPS, time.monotonic()

    def ask_for_a_save(self) -> None:
        self.save_now = True

    def end(self) -> None:
        """Do the same as SIGTERM."""
        self.signal, self._heard = self.signal or signal.SIGTERM, time.monotonic()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == SAVES:
            self.save_now = True
            _say(f"{name}: saving after this step")
        elif self._at_once:
            self.signal = number
            if self._patience is not None and self._leaving is None:
                self._leaving = leave_within(self._patience, 128 + number)
            raise _before_training(number)
        elif self.signal is None:
            self.signal, self._heard = number, time.monotonic()
            _say(f"{name}: finishing this step and saving; press Ctrl-C again to quit immediately")
        elif not self._is_echo():
            saved = self.last_saved()
            last = "no checkpoint yet" if saved is None else f"the last checkpoint is step {saved}"
            _say(f"second signal: quitting immediately; {last}")
            os._exit(128 + number)

    def _is_echo(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._heard < ECHO


def leave_within(seconds: float, code: int) -> threading.Timer:
    """End this process after so many seconds, whatever it waits for, unless cancelled."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()
    return timer


def _before_training(number: int) -> Ended:
    return Ended(
        number,
        f"{signal.Signals(number).name}: stopped before training began. Prepared pairs are kept in "
        "the data cache; run the same command again to continue.",
    )


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
