"""SIGTERM and SIGINT ask for an end, SIGUSR1 for a checkpoint. A second SIGTERM or SIGINT ends at once.

Until the model is there an end loses nothing, and comes at once; after that the step in hand is finished and saved.
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
STOPS = 1000  # above every number that asks for less
ECHO = 10.0  # seconds in which torchrun passes on the Ctrl-C that its processes have got from the terminal as well
PATIENCE = 45.0  # seconds for taking leave; after that a library that waits for what is gone has had its time


class StopRequest:
    """While entered, `signal` and `save_now` tell what was asked for; the loop looks at them between steps."""

    def __init__(
        self, last_saved: Callable[[], int | None] = lambda: None, patience: float | None = PATIENCE
    ) -> None:
        self._patience = patience
        self.signal: int | None = None
        self.save_now = False
        self.stops = self.saves = False  # as all processes have agreed
        self.last_saved = last_saved
        self._at_once = True
        self._heard = 0.0
        self._leaving: threading.Timer | None = None

    def __enter__(self) -> StopRequest:
        main = (
            threading.current_thread() is threading.main_thread()
        )  # the only one that signals reach
        self._before = {
            number: signal.signal(number, self._received) for number in (*ENDS, SAVES) if main
        }
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
        """From now on there is something to save."""
        self._end_if_asked()
        self._at_once = False

    def _end_if_asked(self) -> None:
        """An exception raised amid a library's own work, such as its `__del__`, may have gone no further."""
        if self._at_once and self.signal is not None:
            raise _before_training(self.signal)

    @property
    def ends(self) -> bool:
        """Whether this process was asked to end; others may not know yet."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.stops and self.signal is not None else 0

    @property
    def asked(self) -> int:
        """As one number, of which the largest of several processes holds for all."""
        return STOPS + self.signal if self.signal is not None else int(self.save_now)

    def agree(self, asked: int) -> None:
        """`asked` holds for all. A signal that came meanwhile waits for the next agreement."""
        self.stops, self.saves = asked >= STOPS, asked > 0
        if self.stops and self.signal is None:
            self.signal, self._heard = (
                asked - STOPS,
                time.monotonic(),
            )  # its own copy of the signal is an echo

    def ask_for_a_save(self) -> None:
        self.save_now = True

    def end(self) -> None:
        """The same as SIGTERM, asked for in another way."""
        self.signal, self._heard = self.signal or signal.SIGTERM, time.monotonic()

    def _received(self, number: int, _frame: FrameType | None) -> None:
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
            _say(f"{name}: finishing this step and saving; once more ends at once")
        elif not self._is_echo():
            saved = self.last_saved()
            told = "no checkpoint yet" if saved is None else f"the last checkpoint is step {saved}"
            _say(f"second signal: ending at once; {told}")
            os._exit(128 + number)

    def _is_echo(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._heard < ECHO


def leave_within(seconds: float, code: int) -> threading.Timer:
    """Ends this process then, whatever it is waiting for; unless cancelled."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()
    return timer


def _before_training(number: int) -> Ended:
    return Ended(
        number,
        f"{signal.Signals(number).name}: ended before training began. Pairs that were prepared are kept in the data "
        "cache, and the same command goes on from there.",
    )


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
