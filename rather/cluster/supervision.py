"""Losses that a run survives: how many in a row, with which pause, and what is written down of them.

Only processes that died, connections that broke and deadlines that passed are losses. Anything that a worker or the
driver says itself (a wrong config, bad data, a damaged checkpoint, NaN, no memory, an exception of the code) would come
again, and ends the run at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rather.checkpoint.checkpoint import LATEST
from rather.config.schema import DPOConfig
from rather.errors import HangError, RatherError

log = logging.getLogger(__name__)


class Supervision:
    """Counts the losses since the last new checkpoint: a run that gets on may meet any number of them."""

    def __init__(
        self,
        config: DPOConfig,
        write: Callable[..., None],
        step: Callable[[], int],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`write` adds an incident; `step` says how many steps are done."""
        self.config, self._write, self._step, self._pause = config, write, step, pause
        self.losses = 0
        self._began = self._saved = _last_saved(config.run_dir)

    def survive(self, error: RatherError, kind: str, remedy: str) -> None:
        """Returns when it is time for another attempt; raises `error` where none is left."""
        saved = _last_saved(self.config.run_dir)
        if saved != self._saved:
            self.losses, self._saved = 0, saved
        self.losses += 1
        most = self.config.max_failures
        self.note(
            "hang" if isinstance(error, HangError) else kind,
            error,
            loss=self.losses,
            max_failures=most,
        )
        if self.losses > most:
            raise error
        pause = self.config.failure_backoff * 2 ** (self.losses - 1)
        told = (error, remedy, f" in {pause:.0f} s" if pause else "", self.losses, most)
        log.warning("%s Now %s%s: loss %d of %d since the last checkpoint.", *told)
        self._pause(pause)

    def note(self, kind: str, error: RatherError, **facts: Any) -> None:
        self._write(kind, self._step(), cause=str(error), **facts)

    def going_on(self) -> DPOConfig:
        """The config with which the run goes on from its own last checkpoint; from where it began while it has none."""
        given = self.config.resume_from_checkpoint
        named = isinstance(given, str) and _last_saved(self.config.run_dir) == self._began
        return self.config.model_copy(
            update={"overwrite": False, "resume_from_checkpoint": given if named else "auto"}
        )


def _last_saved(run_dir: Path) -> int:
    """When a checkpoint was completed last; 0 where none was."""
    try:
        return (run_dir / LATEST).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
