"""One record of a run to everyone who is told it, and the forgiveness that no tracker stops a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rather.tracking.console import ProgressView
from rather.tracking.health import Watch
from rather.tracking.metrics_file import MetricsFile, Record
from rather.tracking.past import Past
from rather.tracking.trackers import TRACKERS, Tracker

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)


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
        begins anew. With `start_step` steps done the trackers go on with the run that they know."""
        self._metrics = MetricsFile(config.run_dir / "metrics.jsonl")
        self._config, self._total_steps, self._quiet = config, total_steps, quiet
        self._trackers: list[_Forgiving] = []
        self.go_back(metrics_position or 0, start_step)

    def go_back(self, metrics_position: int, start_step: int) -> None:
        """To where a checkpoint was saved: what came after will be told again."""
        for tracker in self._trackers:
            tracker.close(failed=False)
        self._metrics.truncate(metrics_position)
        config, past = self._config, Past(self._config.run_dir, start_step)
        self._trackers = [
            _Forgiving(name, partial(TRACKERS[name], config, past)) for name in config.trackers
        ]
        if not self._quiet:
            self._trackers.append(
                _Forgiving("console", partial(ProgressView, self._total_steps, start_step))
            )
        watch = partial(
            Watch, config.run_dir, self._total_steps, start_step
        )  # reads metrics.jsonl as it is now
        self._trackers.append(_Forgiving("health", watch))

    def log(self, record: Record) -> None:
        """One record; it has a "step", and in an evaluation the other keys begin with "eval/"."""
        self._metrics.append(record)
        for tracker in self._trackers:
            tracker.log(int(record["step"]), record)

    def position(self) -> int:
        """The length of metrics.jsonl, all of it on the disk: goes into the checkpoint."""
        return self._metrics.position()

    def close(self, *, failed: bool = False) -> None:
        for tracker in self._trackers:
            tracker.close(failed=failed)
        self._metrics.close()

    def __enter__(self) -> RunTracker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


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

    def close(self, *, failed: bool) -> None:
        if self._tracker:
            with self._forgiven():
                self._tracker.close(failed=failed)

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            cause = f"{type(error).__name__}: {error}"
            log.warning("%s failed and is off from here; the run goes on (%s).", self._name, cause)
