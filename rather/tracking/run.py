"""RunTracker: sends each record to metrics.jsonl, the trackers, the console and the health watch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rather.tracking.console import ProgressView
from rather.tracking.health import HealthWatch
from rather.tracking.metrics_file import MetricsFile, Record
from rather.tracking.trackers import TRACKERS, TrackedRun, Tracker

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)


class NoTracker:
    """Ignores every record: for processes other than the main one, and runs without a folder."""

    def go_back(self, metrics_position: int, start_step: int) -> None: ...

    def log(self, record: Record) -> None: ...

    def position(self) -> int:
        return 0

    def close(self, *, failed: bool = False) -> None: ...

    def __enter__(self) -> NoTracker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


class RunTracker(NoTracker):
    """Sends each record of the run to metrics.jsonl and to all who follow the run."""

    def __init__(
        self,
        config: DPOConfig,
        *,
        total_steps: int,
        start_step: int,
        metrics_position: int | None,
        quiet: bool = False,
    ) -> None:
        """Start tracking after `start_step` steps.

        `metrics_position` is what `position` returned at the checkpoint to resume from; without it
        metrics.jsonl is written from scratch. `quiet` switches the console off.
        """
        self._metrics = MetricsFile(config.run_dir / "metrics.jsonl")
        self._config, self._total_steps, self._quiet = config, total_steps, quiet
        self._trackers: list[_FailSafeTracker] = []
        self.go_back(metrics_position or 0, start_step)

    def go_back(self, metrics_position: int, start_step: int) -> None:
        """Return to the state of a checkpoint; later records will be logged again."""
        for tracker in self._trackers:
            tracker.close(failed=False)
        self._metrics.truncate(metrics_position)
        run, steps = TrackedRun(self._config, start_step), (self._total_steps, start_step)
        makers: dict[str, Callable[[], Tracker]] = {
            name: partial(TRACKERS[name], run) for name in self._config.trackers
        }
        if not self._quiet:
            makers["console"] = partial(ProgressView, *steps)
        makers["health"] = partial(HealthWatch, self._config.run_dir, *steps)
        self._trackers = [_FailSafeTracker(name, make) for name, make in makers.items()]

    def log(self, record: Record) -> None:
        """Log one record with a "step"; in an evaluation the other keys begin with "eval/"."""
        self._metrics.append(record)
        for tracker in self._trackers:
            tracker.log(int(record["step"]), record)

    def position(self) -> int:
        """Return the length of metrics.jsonl, with every line on the disk, for a checkpoint."""
        return self._metrics.position()

    def close(self, *, failed: bool = False) -> None:
        for tracker in self._trackers:
            tracker.close(failed=failed)
        self._metrics.close()

    def __enter__(self) -> RunTracker:
        return self


class _FailSafeTracker:
    """A tracker whose failure is logged once and switches it off; training never stops for it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        with self._switched_off_on_failure():
            self._tracker = make()

    def log(self, step: int, metrics: Record) -> None:
        with self._switched_off_on_failure():
            if self._tracker:
                self._tracker.log(step, metrics)

    def close(self, *, failed: bool) -> None:
        with self._switched_off_on_failure():
            if self._tracker:
                self._tracker.close(failed=failed)

    @contextmanager
    def _switched_off_on_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            cause = f"{type(error).__name__}: {error}"
            log.warning(
                "%s failed and is switched off; training continues (%s).", self._name, cause
            )
