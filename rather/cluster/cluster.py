"""Cluster: the workers of one role on Ray. Its calls read like those of one worker; each has a
deadline.

Token ids travel out, two floats per pair travel back. The first failure ends the call and all
processes: the others would wait for the failed one in a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from rather.cluster.health import (
    GRACE,
    Deadlines,
    Failure,
    Limit,
    are_alike,
    first_cause,
    hang_error,
    phase_of,
)
from rather.cluster.host import CallResult
from rather.cluster.ranks import RoleOnRanks, folder_next_to, shares
from rather.cluster.resources import ResourceManager, last_line, name_of, wait_elsewhere
from rather.cluster.role import RankInfo
from rather.cluster.supervision import Supervision
from rather.config.schema import ActorConfig, DPOConfig, ReferenceConfig, RoleConfig
from rather.data.batch import Columns, PairBatch
from rather.errors import BatchTooLarge, ConfigError, DiskError, HangError, RatherError, WorkerLost

log = logging.getLogger(__name__)


class Cluster(RoleOnRanks):
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
        """`name` is the role: actor_train is trained, reference is not. `worker_cls` is ActorWorker
        or a subclass."""
        config = pipeline_config or _config_around(name, worker_config)
        super().__init__(name, config, resource_manager.kind, resource_manager.ledger)
        self.worker_cls, self.manager, self.worker_config = (
            worker_cls,
            resource_manager,
            worker_config,
        )
        self.mapping = worker_config.device_mapping or [0]
        self.takes_turns = False  # with another process on the same devices
        self.supervision: Supervision | None = None
        self._start()

    def _start(self) -> None:
        """Start the processes and their workers, which have no model yet."""
        is_gpu = self.kind == "cuda"
        compiles = is_gpu and self.config.compile != "off"
        self.deadlines = Deadlines(self.manager.timeouts, compiles=compiles)
        self.seats = self.manager.seats(self.mapping, self.config.envs(self.worker_config))
        self.manager.named[self.role] = self.seats
        self.rooms = [seat.room for seat in self.seats]
        self.ledger = self.manager.ledger
        machines: dict[str, list[str]] = {}
        for seat in self.seats:
            machines.setdefault(seat.process.machine, []).append(str(seat.device))
        hosts = [f"{machine}: devices {', '.join(each)}" for machine, each in machines.items()]
        log.info("%s: %s; %s", self.role, self.layout.describe(), "; ".join(hosts))
        device = "cuda:0" if is_gpu else "cpu"  # the only one that a process sees
        started = [
            seat.handle.add.remote(
                self.role, self.worker_cls, self.config, RankInfo(rank, len(self.seats), device)
            )
            for rank, seat in enumerate(self.seats)
        ]
        self._collect(started, "start")

    # --- calls ---

    def _run(
        self,
        method: str,
        *args: Any,
        batches: Sequence[PairBatch] = (),
        one: bool = False,
        exchange: bool = False,
    ) -> list[Any]:
        own = shares(batches, self.layout.dp) if batches else []
        called = []
        for rank, seat in enumerate(self.seats[:1] if one else self.seats):
            first = (own[self.layout.dp_rank(rank)],) if own else ()
            call = (self.role, method, *first, *args)
            called.append(seat.handle.call.remote(*call))
        tokens = sum(batch.real_tokens for batch in batches)
        values = self._collect(called, phase_of(self.role, method), tokens)
        if batches and self.takes_turns:
            self._run("release")
        return values

    def _shared_folder(self, folder: Path) -> AbstractContextManager[Path]:
        return folder_next_to(folder)

    def _collect(self, called: Sequence[Any], phase: str, tokens: int = 0) -> list[Any]:
        """Return all values in the order of ranks, before the deadline; or raise the first cause of
        a failure."""
        import ray

        limit, began = self.deadlines.limit(phase, tokens), time.monotonic()
        deadline = began + limit.seconds
        rank_of = {ref: rank for rank, ref in enumerate(called)}
        results: dict[int, CallResult] = {}
        failures: dict[int, Failure] = {}
        pending = list(called)
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=min(1.0, left))
            results |= {rank_of[ref]: _result(ref) for ref in done}
            self.manager.refuse_without_ray()
            failures = {rank: each.failure for rank, each in results.items() if each.failure}
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        self._log(results)
        if failures:
            raise self._failed(failures, len(called), late=bool(pending))
        if pending:
            raise self._late([rank_of[ref] for ref in pending], limit)
        self.deadlines.record(phase, tokens, time.monotonic() - began)
        return [results[rank].value for rank in range(len(called))]

    def _log(self, results: Mapping[int, CallResult]) -> None:
        """Repeat what ranks logged: everything of the first one, warnings of all, equal ones
        once."""
        said_by: dict[tuple[str, int], dict[int, str]] = {}
        for rank, result in sorted(results.items()):
            for name, level, message in result.records:
                said_by.setdefault((message, level), {})[rank] = name
        for (message, level), names in said_by.items():
            first = min(names)
            if level >= logging.WARNING:
                listed = f" rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
                who = self.role if len(names) == len(self.seats) else self.role + listed
                logging.getLogger(names[first]).log(level, "%s: %s", who, message)
            elif first == 0:
                logging.getLogger(names[0]).log(level, "%s", message)

    def _failed(self, failures: Mapping[int, Failure], ranks: int, *, late: bool) -> RatherError:
        """Return the first cause with its place. Workers are stopped unless it leaves them
        intact."""
        rank = first_cause(failures)
        cause = failures[rank]
        level = logging.DEBUG if cause.is_expected else logging.ERROR
        logging.getLogger(f"rather.worker.{self.role}-{rank}").log(level, "%s", cause.trace)
        alike = are_alike(failures, ranks)
        place = f"{self.role}, all {ranks} ranks" if alike else name_of(self.role, rank, self.seats)
        error = cause.error(place)
        if len(self.seats) == 1 and cause.kind == torch.OutOfMemoryError.__name__:
            return BatchTooLarge(str(error))
        if late or any(failure.known is not DiskError for failure in failures.values()):
            self._stop()
        return error

    def _late(self, ranks: Sequence[int], limit: Limit) -> HangError:
        snapshots = self.manager.snapshots()
        self._stop()
        names = [name_of(self.role, rank, self.seats) for rank in ranks]
        late = {name: snapshots.pop(name) for name in names}
        return hang_error(late, snapshots, limit, self.config.log_dir)

    def _stop(self) -> None:
        self.manager.stop()


class FrozenReference(Cluster):
    """A reference that never moves, on devices of its own: it can be replaced while the policy
    keeps training."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        self._loaded = total_steps, model

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        while True:
            try:
                return super().compute_log_probs(batches)
            except (WorkerLost, HangError) as error:
                if self.supervision is None or self.manager.is_stopped:  # the policy failed
                    raise
                self.supervision.survive(
                    error, "reference_lost", "the reference alone is started again"
                )
            wait_elsewhere(self.seats)
            self._start()
            self.initialize(*self._loaded)

    def _stop(self) -> None:
        self.manager.stop(self.mapping)


def _config_around(name: str, worker_config: RoleConfig) -> DPOConfig:
    """Return a run that configures nothing but this role."""
    kinds: dict[str, type] = {"actor_train": ActorConfig, "reference": ReferenceConfig}
    problem = ""
    if name not in kinds:
        problem = f"name: '{name}' is not a role; there are {' and '.join(kinds)}."
    elif not isinstance(worker_config, kinds[name]):
        problem = f"worker_config: {type(worker_config).__name__} is not the config of {name}."
    elif worker_config.model_args.model_name_or_path is None:
        problem = "worker_config: no model is named; set model_args.model_name_or_path."
    elif worker_config.is_canonical:
        problem = (
            "worker_config: belongs to a run with determinism: canonical; pass pipeline_config."
        )
    if problem:
        raise ConfigError(problem)
    log.warning(
        "%s: loss and seed are the defaults; pass pipeline_config= for those of a run", name
    )
    own: Any = {name: worker_config.model_copy(deep=True)}  # a config completes what it is made of
    return DPOConfig(**own)


def _result(ref: Any) -> CallResult:
    import ray

    gone = ("RayActorError", "NodeDiedError", "ObjectLostError")
    try:
        result: CallResult = ray.get(ref)
    except ray.exceptions.RayError as error:
        lost = isinstance(error, tuple(getattr(ray.exceptions, name) for name in gone))
        kind = WorkerLost.__name__ if lost else type(error).__name__
        text = f"its process died: {_reason(error)}" if lost else last_line(error)
        return CallResult(failure=Failure(kind, text, str(error), time.time()))
    return result


def _reason(error: BaseException) -> str:
    """Return the line of Ray's long account that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    reason = (telling or lines or ["no reason is known"])[-1].partition(" Some common causes")[0]
    if "SYSTEM_ERROR" in reason:  # nobody asked it to end
        reason += " It crashed, or was killed from outside, often for lack of host memory."
    return reason
