"""Cluster: the workers of one role. Its calls read like those of one worker; each has a deadline.

Token ids travel out, two floats per pair travel back. The first failure ends the call and all processes: the others
would wait for the failed one in a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rather.batch import Columns, PairBatch, PairFacts
from rather.cluster.failure import GRACE, Failure, are_alike, first_cause
from rather.cluster.host import Answer
from rather.cluster.member import Member
from rather.cluster.preflight import need_of
from rather.cluster.resources import ResourceManager, Seat, last_line
from rather.cluster.shares import beside, places, shares
from rather.config.schema import DPOConfig, RoleConfig
from rather.config.strategies import layout
from rather.errors import RatherError, WorkerError
from rather.trainer import StepResult

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
        pipeline_config: DPOConfig,
    ) -> None:
        self.role, self.manager, self.timeouts = name, resource_manager, resource_manager.timeouts
        self.config, self.worker_config = pipeline_config, worker_config
        self.layout = layout(worker_config)
        self.mapping = worker_config.device_mapping or [0]
        self.seats = resource_manager.seats(self.mapping, pipeline_config.envs(worker_config))
        log.info("%s: %s; %s", name, self.layout.told(), _hosts(self.seats))
        world = len(self.seats)
        device = "cuda:0" if self.kind == "cuda" else "cpu"  # the only one that a process sees
        each = [(name, worker_cls, pipeline_config, Member(rank, world, device)) for rank in range(world)]
        self._collected([seat.handle.add.remote(*args) for seat, args in zip(self.seats, each, strict=True)], "start")
        self.takes_turns = False  # with another process on the same devices

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

    def plan(self, largest_pair: int) -> int:
        return int(min(self._call("plan", largest_pair, phase="start")))

    def train_step(self, batches: Sequence[PairBatch], reference: Columns | None) -> StepResult:
        facts = PairFacts.of_step(batches)
        own = shares(batches, self.layout.dp)
        calls = [(own[self.layout.dp_rank(rank)], reference, facts) for rank in range(len(self.seats))]
        result: StepResult = self._call_each("train_step", calls, phase="step")[0]
        self._make_room()
        return result

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        own = shares(batches, self.layout.dp)
        wanted = places(batches)
        calls = [(own[self.layout.dp_rank(rank)], wanted) for rank in range(len(self.seats))]
        columns: Columns = self._call_each("compute_log_probs", calls, phase="step")[0]
        self._make_room()
        return columns

    def score(self, facts: PairFacts, policy: Columns, reference: Columns | None) -> dict[str, float]:
        found: dict[str, float] = self._first("score", facts, policy, reference, phase="step")
        return found

    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = self._first("numbers", phase="save")
        return found

    def write_state(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Every rank writes its pieces; the folder must be one that all machines see."""
        return _union(self._call("write_state", folder.absolute(), phase="save"))

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
        return self._collected([self.seats[0].handle.call.remote(self.role, method, *args)], phase)[0]

    def _call(self, method: str, *args: Any, phase: str) -> list[Any]:
        return self._call_each(method, [args] * len(self.seats), phase=phase)

    def _call_each(self, method: str, args: Sequence[tuple[Any, ...]], *, phase: str) -> list[Any]:
        asked = [seat.handle.call.remote(self.role, method, *each) for seat, each in zip(self.seats, args, strict=True)]
        return self._collected(asked, phase)

    def _collected(self, asked: Sequence[Any], phase: str) -> list[Any]:
        """All values in the order of ranks, before the deadline of the phase; or the first cause of a failure."""
        import ray

        seconds = getattr(self.timeouts, phase)
        deadline = time.monotonic() + seconds
        rank_of = {ref: rank for rank, ref in enumerate(asked)}
        answers: dict[int, Answer] = {}
        pending = list(asked)
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=min(1.0, left))
            answers |= {rank_of[ref]: _answer(ref) for ref in done}
            if any(answer.failure for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        self._tell(answers)
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        if failures:
            raise self._ended(failures, len(asked))
        if pending:
            raise self._late([rank_of[ref] for ref in pending], seconds, phase)
        return [answers[rank].value for rank in range(len(asked))]

    def _tell(self, answers: Mapping[int, Answer]) -> None:
        """What ranks logged: all of the first one's, warnings of all. What several say is said once."""
        said: dict[tuple[int, str], dict[int, str]] = {}
        for rank, answer in sorted(answers.items()):
            for name, level, message in answer.told:
                said.setdefault((level, message), {})[rank] = name
        for (level, message), names in said.items():
            if level >= logging.WARNING:
                logging.getLogger(min(names.items())[1]).log(level, "%s: %s", self._speakers(list(names)), message)
            elif 0 in names:
                logging.getLogger(names[0]).log(level, "%s", message)

    def _speakers(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.seats):
            return self.role
        return f"{self.role} rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _where(self, rank: int) -> str:
        return f"{self.role} rank {rank} of {len(self.seats)} ({self.seats[rank]})"

    def _ended(self, failures: Mapping[int, Failure], ranks: int) -> RatherError:
        """The first cause, told with its place. Everything is stopped."""
        self.manager.stop()
        rank = first_cause(failures)
        cause = failures[rank]
        level = logging.DEBUG if cause.is_ours else logging.ERROR
        logging.getLogger(f"rather.worker.{self.role}-{rank}").log(level, "%s", cause.trace)
        where = f"{self.role}, all {ranks} ranks" if are_alike(failures, ranks) else self._where(rank)
        return cause.error(where, self.role)

    def _late(self, ranks: Sequence[int], seconds: float, phase: str) -> WorkerError:
        self.manager.stop()
        waiting = ", ".join(self._where(rank) for rank in ranks)
        return WorkerError(f"{waiting}: no answer within {seconds:.0f} s (timeouts.{phase}).")


def _answer(ref: Any) -> Answer:
    import ray

    try:
        answer: Answer = ray.get(ref)
    except ray.exceptions.RayActorError as error:
        text = f"its process died: {_reason(error)}"
        return Answer(failure=Failure("ActorDied", text, str(error), time.time()))
    except ray.exceptions.RayError as error:
        return Answer(failure=Failure(type(error).__name__, last_line(error), str(error), time.time()))
    return answer


def _hosts(seats: Sequence[Seat]) -> str:
    machines: dict[str, list[str]] = {}
    for seat in seats:
        machines.setdefault(seat.process.machine, []).append(str(seat.device))
    return "; ".join(f"{machine}: devices {', '.join(devices)}" for machine, devices in machines.items())


def _reason(error: BaseException) -> str:
    """The line of Ray's long story that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (told or lines or ["no reason is known"])[-1]


def _union(written: Sequence[dict[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    return {name: facts for each in written for name, facts in each.items()}
