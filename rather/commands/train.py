"""Train one run in this process: for `rather train`, and for the runs of a sweep."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial

from rich.console import Console

from rather.commands.terminal import echo
from rather.config.run_config import DPOConfig
from rather.data.show import print_report
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.pipeline import DPOPipeline, run_rank
from rather.run_folder.control import StopRequest
from rather.run_folder.layout import RunFolder
from rather.tracking.logs import close_logging, setup_logging, worker_log


def train_run(config: DPOConfig, stop: StopRequest) -> int:
    """Train, or resume, and return the exit code."""
    rank = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    with RunFolder.of(config).locked(is_main=rank == 0):
        if rank == 0:
            setup_logging(config.log_dir)
        try:
            for role in ("actor_train", "reference"):
                worker_log(config.log_dir, role, rank)
            return run_rank(config, stop)
        finally:
            close_logging()


def dry_run(config: DPOConfig, stop: StopRequest) -> int:
    """Do everything up to the first step, as a rank, or let the ranks of a Ray cluster do it."""
    with closing(DPOPipeline(config)) as pipeline:
        if pipeline.roles.ranks:
            return pipeline.roles.ranks.run(partial(dry_run, config), stop)
        if pipeline.roles.is_main:
            print_report(pipeline.data.report, Console(stderr=True))
        pipeline.initialize()
        first = next(TrainingLoop(pipeline.parts).packed_steps())
        if pipeline.roles.is_main:
            count = len(first.policy)
            echo(
                f"{len(pipeline.data.train)} {config.unit}, {pipeline.total_steps} steps of "
                f"{pipeline.source.order.batch} {config.unit}; the first packs {first.tokens} "
                f"tokens into {count} micro-batch{'es' if count > 1 else ''}. Nothing was trained; "
                "only the data cache was written."
            )
    return 0
