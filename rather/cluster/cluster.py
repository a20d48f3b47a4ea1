"""Cluster: the workers of one role on Ray, called like a single worker.

For scripts that call a role themselves. A run calls nothing: its ranks run a program (ray_ranks.py).
The first failure ends the call and all processes: the others would wait for the failed one in a
collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rather.cluster.group import RankInfo
from rather.cluster.health import GRACE, Limit, first_cause, hang_error
from rather.cluster.resources import POLL, RankCalls, ResourceManager, names_of
from rather.cluster.worker import make_worker
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, ReferenceConfig, RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch
from rather.errors import ConfigError, RatherError
from rather.train.rank_trainer import Limits, StepResult

log = logging.getLogger(__name__)


class Cluster:
    """One worker on each device of `worker_config.device_mapping`, called together."""

    def __init__(
        self,
        name: str,
        worker_cls: type | str | None,
        resource_manager: ResourceManager,
        worker_config: RoleConfig,
        *,
        pipeline_config: DPOConfig | None = None,
    ) -> None:
        """`name` is actor_train or reference, `worker_cls` ActorWorker or a subclass."""
        self.config = pipeline_config or _config_around(name, worker_config)
        self.role, self.worker_cls, self.manager = name, worker_cls, resource_manager
        self.mapping, self.layout = worker_config.devices, layout(worker_config)
        self.seats = resource_manager.seats(self.mapping, self.config.envs(worker_config))
        resource_manager.named[name] = self.seats
        places = ", ".join(map(str, self.seats))
        log.info("%s: %s; %s", name, self.layout.describe(), places)

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Make the workers and load the model; `model` replaces the configured one."""
        self.manager.introduce(self.mapping)
        device = "cuda:0" if self.manager.kind == "cuda" else "cpu"  # all that a process sees
        made = []
        for rank, seat in enumerate(self.seats):
            near = sum(each.node == seat.node for each in self.seats)
            member = RankInfo(rank, len(self.seats), device, near)
            make = partial(make_worker, self.role, self.config, member, self.worker_cls)
            made.append(seat.handle.add.remote(self.role, make))
        self._collect(made)
        self._call("initialize", total_steps, model)

    def train_step(
        self, batches: Sequence[PairBatch], reference: Columns | None, limits: Limits = None
    ) -> StepResult:
        """Take one optimizer step on the micro-batches of all ranks."""
        result: StepResult = self._call("train_step", batches, reference, limits)
        return result

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        """Return the columns of all pairs of these micro-batches."""
        columns: Columns = self._call("compute_log_probs", batches)
        return columns

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks, which compute together; return what the first returns."""
        import ray

        shared: Any = ray.put(args)  # once, however many ranks there are
        return self._collect(
            [seat.handle.call.remote(self.role, method, shared) for seat in self.seats]
        )

    def _collect(self, asked: Sequence[Any]) -> Any:
        """Return the first rank's value, or raise the first cause of a failure."""
        limit = Limit.longest(self.manager.timeouts)
        deadline = time.monotonic() + limit.seconds
        calls = RankCalls(self.manager, self.seats, asked)
        while calls.pending and (left := deadline - time.monotonic()) > 0:
            calls.wait(min(POLL, left))
            if calls.failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        self._log_output()
        if not calls.failures and not calls.pending:
            return calls.results[0]
        names = names_of(self.seats, self.role)
        error: RatherError
        if calls.failures:
            cause = first_cause(calls.failures, names, self.role)
            cause.log_trace()
            error = cause.error
        else:
            others = self.manager.snapshots()
            late = {names[rank]: others.pop(names[rank]) for rank in calls.pending}
            error = hang_error(late, others, limit, self.config.log_dir)
        self.manager.stop()
        raise error

    def _log_output(self) -> None:
        """Repeat all that the first rank logged, and the warnings of the others, each once."""
        logged = set()
        for rank, output in enumerate(self.manager.ask(self.seats, "take_output")):
            for _, name, level, text in output or ():
                warns = level >= logging.WARNING
                if text not in logged and (warns or rank == 0):
                    who = f"{self.role} rank {rank}: " if warns else ""
                    logging.getLogger(name).log(level, "%s%s", who, text)
                logged.add(text)


def _config_around(name: str, worker_config: RoleConfig) -> DPOConfig:
    """Return a run that configures nothing but this role."""
    kinds: dict[str, type] = {"actor_train": ActorConfig, "reference": ReferenceConfig}
    if (
        not isinstance(worker_config, kinds.get(name, ()))
        or worker_config.model_args.model_name_or_path is None
    ):
        raise ConfigError(
            f"worker_config: must be the config of role '{name}' (of {' and '.join(kinds)}) with "
            "model_args.model_name_or_path; or pass pipeline_config."
        )
    log.warning(
        "%s: loss and seed are the defaults; pass pipeline_config= for those of a run", name
    )
    own: Any = {name: worker_config.model_copy(deep=True)}  # a config completes what it is made of
    return DPOConfig(**own)
