"""Cluster: the workers of one role. Its calls read like those of one worker; each has a deadline.

Token ids travel out, two floats per pair travel back. The first failure ends the call and all processes: the others
would wait for the failed one in a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rather import faults
from rather.cluster.deadlines import Deadlines, Limit
from rather.cluster.failure import GRACE, Failure, are_alike, first_cause
from rather.cluster.hang import hang_error
from rather.cluster.host import Answer
from rather.cluster.preflight import need_of
from rather.cluster.resources import ResourceManager, Seat, last_line, wait_elsewhere, where
from rather.cluster.role import RankInfo
from rather.cluster.shares import beside, places, shares
from rather.cluster.supervision import Supervision
from rather.config.schema import ActorConfig, DPOConfig, ReferenceConfig, RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.errors import BatchTooLarge, ConfigError, DiskError, HangError, RatherError, WorkerLost
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import StepResult

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
        """`name` is the role: actor_train is trained, reference is not. `worker_cls` is ActorWorker or a subclass."""
        self.role, self.worker_cls, self.manager = name, worker_cls, resource_manager
        self.config = pipeline_config or _around(name, worker_config)
        self.worker_config = worker_config
        self.layout = layout(worker_config)
        self.mapping = worker_config.device_mapping or [0]
        self.takes_turns = False  # with another process on the same devices
        self.supervision: Supervision | None = None
        self._start()

    def _start(self) -> None:
        """Processes with workers, which know no model yet."""
        self.deadlines = Deadlines.of(self.config, self.manager.timeouts, self.kind)
        self.seats = self.manager.seats(self.mapping, self.config.envs(self.worker_config))
        self.manager.named[self.role] = self.seats
        log.info("%s: %s; %s", self.role, self.layout.told(), _hosts(self.seats))
        world = len(self.seats)
        device = "cuda:0" if self.kind == "cuda" else "cpu"  # the only one that a process sees
        each = [
            (self.role, self.worker_cls, self.config, RankInfo(rank, world, device))
            for rank in range(world)
        ]
        self._collected(
            [seat.handle.add.remote(*args) for seat, args in zip(self.seats, each, strict=True)],
            "start",
        )

    @property
    def kind(self) -> str:
        return self.manager.kind

    # --- calls of the driver ---

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        need = need_of(self.config, self.worker_config, self.kind, model)
        self.manager.ledger.add(self.role, need, [seat.room for seat in self.seats])
        self._call("initialize", total_steps, model, phase="start")

    def embedding_rows(self) -> int:
        return int(self._call("embedding_rows", phase="start")[0])

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        return int(min(self._call("plan", largest_pair, phase="start")))

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        *,
        limits: StepLimits | None = None,
    ) -> StepResult:
        facts = PairFacts.of_step(batches)
        own = shares(batches, self.layout.dp)
        calls = [
            (own[self.layout.dp_rank(rank)], reference, facts, limits)
            for rank in range(len(self.seats))
        ]
        result: StepResult = self._call_each(
            "train_step", calls, phase="step", tokens=_tokens(batches)
        )[0]
        self._make_room()
        return result

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        own = shares(batches, self.layout.dp)
        wanted = places(batches)
        calls = [(own[self.layout.dp_rank(rank)], wanted) for rank in range(len(self.seats))]
        phase = "eval" if self.role == "actor_train" else "step"
        columns: Columns = self._call_each(
            "compute_log_probs", calls, phase=phase, tokens=_tokens(batches)
        )[0]
        self._make_room()
        return columns

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        found: dict[str, float] = self._first("score", facts, policy, reference, phase="eval")
        return found

    def park(self) -> bool:
        return False

    def forget(self) -> None:
        """What work that ran out of memory left behind."""
        self._call("forget", phase="step")

    def peak_memory(self) -> int:
        """Of the rank that took most."""
        return int(max(self._call("peak_memory", phase="save")))

    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = self._first("numbers", phase="save")
        return found

    def write_state(self, folder: Path) -> None:
        """Every rank writes its pieces; the folder must be one that all machines see."""
        self._call("write_state", folder.absolute(), phase="save")

    def write_reference(self, folder: Path) -> None:
        self._call("write_reference", folder.absolute(), phase="save")

    def finish_writing(self) -> None:
        self._call("finish_writing", phase="save")

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        self._call("read_state", path.absolute(), numbers, phase="save")

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        return _union(self._call("write_weights", folder.absolute(), group, phase="save"))

    def mix_weights(self, weights: Path, share: float) -> None:
        self._call("mix_weights", weights.absolute(), share, phase="save")

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        """All ranks write what they hold, and one makes the model of it, a tensor at a time."""
        with beside(folder.absolute()) as pieces:
            self.write_weights(pieces, "model")
            self._first("export", pieces, "model", tokenizer, folder.absolute(), card, phase="save")

    def _make_room(self) -> None:
        if self.takes_turns:
            self._call("release", phase="step")

    # --- all ranks ---

    def _first(self, method: str, *args: Any, phase: str) -> Any:
        """Of rank 0 alone."""
        return self._collected(
            [self.seats[0].handle.call.remote(self.role, faults.step(), method, *args)], phase
        )[0]

    def _call(self, method: str, *args: Any, phase: str) -> list[Any]:
        return self._call_each(method, [args] * len(self.seats), phase=phase)

    def _call_each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, phase: str, tokens: int = 0
    ) -> list[Any]:
        named = (self.role, faults.step(), method)
        asked = [
            seat.handle.call.remote(*named, *each)
            for seat, each in zip(self.seats, args, strict=True)
        ]
        return self._collected(asked, phase, tokens)

    def _collected(self, asked: Sequence[Any], phase: str, tokens: int = 0) -> list[Any]:
        """All values in the order of ranks, before the deadline of the phase; or the first cause of a failure."""
        import ray

        limit, began = self.deadlines.limit(phase, tokens), time.monotonic()
        deadline = began + limit.seconds
        rank_of = {ref: rank for rank, ref in enumerate(asked)}
        answers: dict[int, Answer] = {}
        pending = list(asked)
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=min(1.0, left))
            answers |= {rank_of[ref]: _answer(ref) for ref in done}
            self.manager.refuse_without_ray()
            if any(answer.failure for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        self._tell(answers)
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        if failures:
            raise self._ended(failures, len(asked), late=bool(pending))
        if pending:
            raise self._late([rank_of[ref] for ref in pending], limit)
        self.deadlines.took(phase, tokens, time.monotonic() - began)
        return [answers[rank].value for rank in range(len(asked))]

    def _tell(self, answers: Mapping[int, Answer]) -> None:
        """What ranks logged: all of the first one's, warnings of all. What several say is said once."""
        said: dict[tuple[int, str], dict[int, str]] = {}
        for rank, answer in sorted(answers.items()):
            for name, level, message in answer.told:
                said.setdefault((level, message), {})[rank] = name
        for (level, message), names in said.items():
            if level >= logging.WARNING:
                logging.getLogger(min(names.items())[1]).log(
                    level, "%s: %s", self._speakers(list(names)), message
                )
            elif 0 in names:
                logging.getLogger(names[0]).log(level, "%s", message)

    def _speakers(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.seats):
            return self.role
        return f"{self.role} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _where(self, rank: int) -> str:
        return where(self.role, rank, self.seats)

    def _ended(self, failures: Mapping[int, Failure], ranks: int, *, late: bool) -> RatherError:
        """The first cause, told with its place. Workers are stopped unless it leaves them as they were."""
        rank = first_cause(failures)
        cause = failures[rank]
        level = logging.DEBUG if cause.is_ours else logging.ERROR
        logging.getLogger(f"rather.worker.{self.role}-{rank}").log(level, "%s", cause.trace)
        where = (
            f"{self.role}, all {ranks} ranks" if are_alike(failures, ranks) else self._where(rank)
        )
        error = cause.error(where, self.role)
        if len(self.seats) == 1 and cause.kind == torch.OutOfMemoryError.__name__:
            return BatchTooLarge(str(error))
        if late or any(failure.known is not DiskError for failure in failures.values()):
            self._stop()
        return error

    def _late(self, ranks: Sequence[int], limit: Limit) -> HangError:
        """Of those that are late the one that holds the others up, by what all processes say that they do."""
        late = {(self.role, rank) for rank in ranks}
        looks = self.manager.looks()
        self._stop()
        others = [found for place, found in looks.items() if place not in late]
        return hang_error(
            [looks[place] for place in sorted(late)], others, limit, self.config.log_dir
        )

    def _stop(self) -> None:
        self.manager.stop()


class FrozenReference(Cluster):
    """A reference that never moves, on devices of its own: it can be replaced while the policy goes on."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        self._loaded = total_steps, model

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        while True:
            try:
                return super().compute_log_probs(batches)
            except (WorkerLost, HangError) as error:
                if self.supervision is None or self.manager.is_stopped:  # for a loss of the policy
                    raise
                self.supervision.survive(
                    error, "reference_lost", "the reference alone is started again"
                )
            wait_elsewhere(self.seats)
            self._start()
            self.initialize(*self._loaded)

    def _stop(self) -> None:
        self.manager.stop(self.mapping)


def _around(name: str, worker_config: RoleConfig) -> DPOConfig:
    """A run that says nothing but this role."""
    kinds: dict[str, type] = {"actor_train": ActorConfig, "reference": ReferenceConfig}
    if name not in kinds:
        raise ConfigError(f"name: '{name}' is no role; there are {' and '.join(kinds)}.")
    if not isinstance(worker_config, kinds[name]):
        raise ConfigError(
            f"worker_config: {type(worker_config).__name__} is not the config of {name}."
        )
    if worker_config.model_args.model_name_or_path is None:
        raise ConfigError("worker_config: no model is named; set model_args.model_name_or_path.")
    if worker_config.is_canonical:
        raise ConfigError(
            "worker_config: is of a run with determinism: canonical; give that as pipeline_config."
        )
    log.warning(
        "%s: the loss, its numbers and the seed are their defaults; give pipeline_config= for those of a run",
        name,
    )
    own: Any = {name: worker_config.model_copy(deep=True)}  # a config completes what it is made of
    return DPOConfig(**own)


def _tokens(batches: Sequence[PairBatch]) -> int:
    return sum(batch.real_tokens for batch in batches)


def _answer(ref: Any) -> Answer:
    import ray

    try:
        answer: Answer = ray.get(ref)
    except (
        ray.exceptions.RayActorError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.ObjectLostError,
    ) as error:
        text = f"its process died: {_reason(error)}"
        return Answer(failure=Failure(WorkerLost.__name__, text, str(error), time.time()))
    except ray.exceptions.RayError as error:
        return Answer(
            failure=Failure(type(error).__name__, last_line(error), str(error), time.time())
        )
    return answer


def _hosts(seats: Sequence[Seat]) -> str:
    machines: dict[str, list[str]] = {}
    for seat in seats:
        machines.setdefault(seat.process.machine, []).append(str(seat.device))
    return "; ".join(
        f"{machine}: devices {', '.join(devices)}" for machine, devices in machines.items()
    )


def _reason(error: BaseException) -> str:
    """The line of Ray's long story that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    reason = (told or lines or ["no reason is known"])[-1].partition(" Some common causes")[0]
    if "SYSTEM_ERROR" in reason:  # nobody asked it to end
        reason += " It crashed, or was killed from outside, often for lack of host memory."
    return reason


def _union(written: Sequence[dict[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    return {name: facts for each in written for name, facts in each.items()}
