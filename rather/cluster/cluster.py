"""Cluster: the workers of one role on Ray, called like a single worker, with deadlines.

The number of a step travels out, two floats per pair travel back. The first failure ends the call and all
processes: the others would wait for the failed one in a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rather.cluster.health import (
    COMPUTED,
    GRACE,
    ONE,
    Deadlines,
    Failure,
    hang_error,
    phase_of,
)
from rather.cluster.host import CallResult
from rather.cluster.resources import (
    ResourceManager,
    SeatWatch,
    failure_of,
    name_of,
    wait_elsewhere,
)
from rather.cluster.role import RoleOnRanks, log_records
from rather.cluster.supervision import Supervision
from rather.cluster.worker import RankInfo
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, ReferenceConfig, RoleConfig
from rather.data.batch import Columns, PairBatch
from rather.data.shares import RunPairs, tokens_of
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
        """`name` is actor_train or reference, `worker_cls` ActorWorker or a subclass."""
        config = pipeline_config or _config_around(name, worker_config)
        super().__init__(name, config, resource_manager.kind, resource_manager.ledger)
        self.device = "cpu"
        self.worker_cls, self.manager = worker_cls, resource_manager
        self.worker_config, self.mapping = worker_config, worker_config.devices
        self.takes_turns = False  # with another process on the same devices
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="reference")
        self.supervision: Supervision | None = None
        self._start()

    def _start(self) -> None:
        """Start the processes and their workers, which have no model yet."""
        manager, is_gpu = self.manager, self.kind == "cuda"
        compiles = is_gpu and self.config.compile != "off"
        self.deadlines = Deadlines(manager.timeouts, compiles=compiles)
        self.seats = manager.seats(self.mapping, self.config.envs(self.worker_config))
        manager.named[self.role] = self.seats
        self._watch = SeatWatch(self.seats, manager.cut_off, manager.timeouts.link)
        # Looked up once: a step makes two calls on each of up to a thousand ranks.
        self._calls = [seat.handle.call.remote for seat in self.seats]
        self.rooms, self.ledger = [seat.room for seat in self.seats], manager.ledger
        places = ", ".join(map(str, self.seats))
        log.info("%s: %s; %s", self.role, self.layout.describe(), places)
        device = "cuda:0" if is_gpu else "cpu"  # the only one that a process sees
        started = []
        for rank, seat in enumerate(self.seats):
            near = sum(each.node == seat.node for each in self.seats)
            member = RankInfo(rank, len(self.seats), device, near)
            started.append(seat.handle.add.remote(self.role, self.worker_cls, self.config, member))
        self._collect(started, "start")

    # --- calls ---

    def ask_log_probs(self, batches: Sequence[PairBatch]) -> Future[Columns]:
        """Ask for the columns of all pairs of a step, in a thread that asks for nothing else."""
        return self._asking.submit(self._timed_log_probs, batches)

    def await_log_probs(self, asked: Future[Columns]) -> Columns:
        return asked.result()

    def _timed_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        began = time.monotonic()
        found = self.compute_log_probs(batches)
        self.seconds += time.monotonic() - began
        return found

    def _run(self, method: str, *args: Any) -> list[Any]:
        import ray

        self.manager.introduce(self.mapping)
        role, computes = self.role, method in COMPUTED
        first, *others = self._calls[:1] if method in ONE else self._calls
        # Put once, however many ranks there are.
        given: Any = ray.put(args) if args and others else args
        # What all ranks have computed of micro-batches is the same: one returns it.
        called = [first(role, method, given, silent=False)]
        called += [call(role, method, given, silent=computes) for call in others]
        tokens = tokens_of(args[0]) if computes else 0
        values = self._collect(called, phase_of(self.role, method), tokens)
        if computes and self.takes_turns:
            self._run("release")
        return values

    def _collect(self, called: Sequence[Any], phase: str, tokens: int = 0) -> list[Any]:
        """Return the values in the order of ranks, or raise the first cause of a failure."""
        import ray

        limit, began = self.deadlines.limit(phase, tokens), time.monotonic()
        deadline = began + limit.seconds
        rank_of = dict(zip(called, range(len(called)), strict=True))
        results: dict[int, CallResult] = {}
        failures: dict[int, Failure] = {}
        pending = list(called)
        while pending and (left := deadline - time.monotonic()) > 0:
            every = len(pending)
            done, pending = ray.wait(pending, num_returns=every, timeout=min(1.0, left))
            found = zip(done, _results(done), strict=True)
            results |= {rank_of[ref]: each for ref, each in found if each}
            self.manager.refuse_without_ray()
            failures = {rank: each.failure for rank, each in results.items() if each.failure}
            failures |= self._watch.failures([rank_of[ref] for ref in pending])
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        log_records(self.role, results)
        if failures:
            raise self._failed(failures, len(called), late=bool(pending))
        if pending:
            snapshots = self.manager.snapshots()
            self._stop()
            names = [name_of(self.role, rank_of[ref], self.seats) for ref in pending]
            late = {name: snapshots.pop(name) for name in names}
            raise hang_error(late, snapshots, limit, self.config.log_dir)
        self.deadlines.record(phase, tokens, time.monotonic() - began)
        values: list[Any] = [None] * len(called)
        for rank, result in results.items():
            values[rank] = result.value
        return values

    def _failed(self, failures: Mapping[int, Failure], ranks: int, *, late: bool) -> RatherError:
        """Return the first cause with its place; stop the workers unless it leaves them intact."""
        names = [name_of(self.role, each, self.seats) for each in range(len(self.seats))]
        error = self._error(failures, ranks, names)
        if isinstance(error, BatchTooLarge):
            return error
        if late or any(failure.known is not DiskError for failure in failures.values()):
            self._stop()
        return error

    def _stop(self) -> None:
        self.manager.stop()


class FrozenReference(Cluster):
    """A reference that never moves, on devices of its own: it can be replaced during training."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        self._loaded = total_steps, model

    def open_pairs(self, pairs: RunPairs) -> None:
        super().open_pairs(pairs)
        self._opened = pairs

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        while True:
            try:
                return super().compute_log_probs(batches)
            except (WorkerLost, HangError) as error:
                if self.supervision is None or self.manager.is_stopped:  # the policy failed
                    raise
                remedy = "the reference alone is started again"
                self.supervision.survive(error, "reference_lost", remedy)
            wait_elsewhere(self.seats)
            self._start()
            self.open_pairs(self._opened)
            self.initialize(*self._loaded)

    def _stop(self) -> None:
        self.manager.stop(self.mapping)


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


def _results(refs: list[Any]) -> list[CallResult | None]:
    """Return all results at once; if one cannot be had, each with its own reason."""
    import ray

    try:
        results: list[CallResult | None] = ray.get(refs)
        return results
    except ray.exceptions.RayError:
        return [_result(ref) for ref in refs]


def _result(ref: Any) -> CallResult | None:
    import ray

    try:
        result: CallResult | None = ray.get(ref)
    except ray.exceptions.RayError as error:
        return CallResult(failure=failure_of(error))
    return result
