"""What a run leaves to read beside its model: its forecast, a look at its pairs, how it was started, what it took.

Nothing reads any of it back: what fails here is told, and the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rather.cluster.launch import Roles
from rather.config.schema import DPOConfig
from rather.data.show import token_view
from rather.errors import HangError, RayGone, WorkerLost
from rather.pipeline.forecast import compared, forecast_of
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.steps import PreparedSteps
from rather.pipeline.timeline import Tally
from rather.plan.forecast import Forecast
from rather.report.starts import record_start
from rather.run_folder.layout import PLAN, RUN_REPORT, write_run_files, write_run_report
from rather.tracking.health import counts

log = logging.getLogger(__name__)

PAIRS_SHOWN = 3  # in data_report.json, token by token


class RunSummary:
    """Of the driver that leads; the others write nothing."""

    def __init__(self, config: DPOConfig, roles: Roles, source: PreparedSteps) -> None:
        self.config, self.roles, self.source = config, roles, source
        self.plan: Forecast | None = None

    def forecast(self, *, reference: bool) -> None:
        """Tells what the run will take; one that may not fit is only warned of, for what fits is tried out later."""
        if not self.roles.is_main:
            return
        with _forgiven("the forecast"):
            self.plan = forecast_of(self.config, self.source, self.roles, reference=reference)
        if self.plan:
            log.log(logging.INFO if self.plan.fits else logging.WARNING, "%s", self.plan.line())

    def begin(self, tokenizer: Any, step: int) -> None:
        """The config, without which nobody could go on; and what is known before this start's first step."""
        if not self.roles.is_main:
            return
        data = dict(self.source.data.report)
        with _forgiven("the look at the first pairs"):
            data["shown"] = token_view(self.source.data.train, tokenizer, PAIRS_SHOWN)
        write_run_files(self.config, data)
        if self.plan:
            write_run_report(self.config.run_dir, self.plan.as_json(), PLAN)
        record_start(self.config, self.roles.kind, step, self.source.total_steps)

    def report(self, step: int, tally: Tally, stream: ReferenceStream) -> None:
        """What this start of the run took, for people and scripts."""
        if not self.roles.is_main:
            return
        run_dir = self.config.run_dir
        with _forgiven(RUN_REPORT):
            report: dict[str, Any] = {"steps": step, **tally.report(), "reference": stream.report()}
            report["health"] = counts(run_dir)
            write_run_report(run_dir, report)
            if self.plan:
                plan = compared(
                    self.plan, self.roles.actor_train.peak_memory(), report["pairs_per_second"]
                )
                write_run_report(run_dir, plan, PLAN)


@contextmanager
def _forgiven(name: str) -> Iterator[None]:
    """All but what tells that workers are gone."""
    try:
        yield
    except (WorkerLost, RayGone, HangError):
        raise
    except Exception as error:
        log.warning("%s failed; the run goes on (%s: %s)", name, type(error).__name__, error)
