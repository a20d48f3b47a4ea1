"""A reference on devices of its own: its ranks follow the policy's first rank over a bridge.

Each role has a process group of its own, so nothing in it sees the other one. The bridge, one more
gloo group, joins the two first ranks. The policy's first rank asks; each question has a number, and
so has its answer. A step is asked for by its number and one bit for each pair whose log-probs are
unknown; two floats for each pair come back. So the reference can work one step ahead, and an answer
that nobody waits for any more is dropped.
"""

from __future__ import annotations

import logging
import pickle  # nosec B403 - only for messages between the ranks of a job
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rather.cluster.group import broadcast
from rather.cluster.health import PHASES, Failure
from rather.cluster.memory import Room, sentence
from rather.cluster.preflight import refuse_private_folder, refuse_unlike_cpus
from rather.cluster.process import Process
from rather.cluster.supervision import Watchdog
from rather.cluster.worker import ActorWorker
from rather.config.schema import RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch
from rather.data.shares import Batches, RunPairs
from rather.errors import BatchTooLarge
from rather.parallel.mesh import gather_objects

POLICY, REFERENCE = 0, 1  # ranks on the bridge
# The reference waits as long as nobody asks; that a peer is gone is noticed by its connection.
FOR_EVER = timedelta(days=365)
END = "end"


class Bridge:
    """Numbered messages between the first ranks of two roles."""

    def __init__(self, store: Any, rank: int) -> None:
        """`store` is one that both ranks reach. Returns when they are connected."""
        place = dist.PrefixStore("bridge", store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(place, rank, 2, FOR_EVER)
        self._peer = 1 - rank
        self._sending: list[tuple[Any, Tensor]] = []  # until the other rank has received it
        self.sent = self.received = 0  # messages

    def send(self, number: int, message: Any) -> None:
        """Begin to send. It is over once the other rank receives, which may itself be sending."""
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for tensor in (torch.tensor([number, len(body)]), body):
            self._sending.append((self._group.send([tensor], self._peer, 0), tensor))
        self.sent += 1

    def flush(self) -> None:
        """Wait until all messages have been received."""
        for work, _ in self._sending:
            work.wait()

    def receive(self) -> tuple[int, Any]:
        head = torch.empty(2, dtype=torch.int64)
        self._group.recv([head], self._peer, 0).wait()
        number, size = head.tolist()
        body = torch.empty(size, dtype=torch.uint8)
        self._group.recv([body], self._peer, 0).wait()
        self.received += 1
        return number, pickle.loads(body.numpy().tobytes())  # from a rank of this job  # nosec B301


@dataclass(frozen=True)
class Answer:
    """What the reference says to a question, and how long it took."""

    value: Any  # or the Failure
    seconds: float


class ReferenceApart:
    """The reference as the policy's ranks see it: the first one asks, the others do not."""

    role, device = "reference", "cpu"  # where log-probs arrive

    def __init__(
        self, section: RoleConfig, kind: str, bridge: Bridge | None, shared_dir: Path | None
    ) -> None:
        """Its weights pass through `shared_dir`, if the reference moves."""
        self.args, self.kind, self.bridge = section.model_args, kind, bridge
        self.shared_dir, self.layout = shared_dir, layout(section)
        self._seconds = 0.0  # that it worked since `take_seconds`
        self._asked = 0  # the number of the last question
        self._dropped = 0  # the last number whose answer nobody waits for any more
        self._early: dict[int, Answer] = {}  # that came before they were waited for

    def initialize(self, total_steps: int) -> None:
        if self.shared_dir:
            refuse_private_folder(
                self.shared_dir, lambda folder: self._call("folder_problem", folder) or []
            )
        rooms: Sequence[Room] = self._call("rooms") or []
        refuse_unlike_cpus(self.role, self.args, self.kind, rooms)
        self._call("initialize", total_steps)

    def open_pairs(self, pairs: RunPairs) -> None:
        self._call("open_pairs", pairs)

    def pack(self, batches: Sequence[PairBatch]) -> None:
        """Its own ranks pack what they take of a step."""

    def embedding_rows(self) -> int:
        return int(self._call("embedding_rows") or 0)

    def park(self) -> bool:
        return False

    def forget(self) -> None:
        self._call("forget")

    def mix_weights(self, folder: Path, share: float) -> None:
        self._call("mix_weights", folder.absolute(), share)

    def write_state(self, folder: Path) -> None:
        self._call("write_state", folder.absolute())

    def finish_writing(self) -> None:
        self._call("finish_writing")

    def close(self) -> None:
        """Let the ranks of the reference end."""
        if self.bridge:
            self._ask(END)
            with suppress(RuntimeError):  # it is gone already
                self.bridge.flush()

    def ask_log_probs(self, batches: Sequence[PairBatch]) -> int:
        """Ask for the columns of all pairs of a step; return the number of the question."""
        return self._ask("compute_log_probs", batches)

    def await_log_probs(self, number: int) -> Columns:
        answer = self._answer(number)
        self._seconds += answer.seconds
        found: Mapping[str, Any] = answer.value
        return {name: torch.from_numpy(column) for name, column in found.items()}

    def drop_questions(self) -> None:
        """Ignore the answers to all questions so far."""
        self._dropped = self._asked
        self._early.clear()

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        return self.await_log_probs(self.ask_log_probs(batches))

    def take_seconds(self) -> float:
        """Return how long the reference has worked since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _call(self, method: str, *args: Any) -> Any:
        """Return what the reference answers; None on ranks that do not ask."""
        return self._answer(self._ask(method, *args)).value if self.bridge else None

    def _ask(self, method: str, *args: Any) -> int:
        assert self.bridge is not None
        self._asked += 1
        self.bridge.send(self._asked, (method, args))
        return self._asked

    def _answer(self, number: int) -> Answer:
        """Return the answer to a question, or raise the failure that it reports."""
        assert self.bridge is not None
        while number not in self._early:
            other, answer = self.bridge.receive()
            if other > self._dropped:
                self._early[other] = answer
        answer = self._early.pop(number)
        if isinstance(answer.value, Failure):  # it can be repeated with smaller micro-batches
            raise answer.value.error("")
        return answer


# --- the ranks of the reference ---


def follow(worker: ActorWorker, kind: str, bridge: Bridge | None, watchdog: Watchdog) -> None:
    """Do what the policy's first rank asks for until it asks to end; all ranks of the role do.

    A failure ends this rank, and with it the job: its own words are the first cause.
    """
    watchdog.watch(worker, PHASES)
    watchdog.start(links=False)
    logging.getLogger("rather").setLevel(logging.INFO)
    if bridge and watchdog.warnings:
        watchdog.warnings.setLevel(logging.INFO)  # of the other ranks only warnings
    # The default group would give up if all log-probs are cached for an hour.
    group = dist.new_group(backend="gloo", timeout=FOR_EVER) if worker.member.world > 1 else None
    try:
        while True:
            number, (method, args) = broadcast(bridge.receive() if bridge else None, group)
            if method == END:
                return
            began = time.monotonic()
            try:
                value = _value(worker, kind, method, args)
            except torch.OutOfMemoryError as error:  # of a single rank: it can do with less
                value = Failure.of(BatchTooLarge(sentence(error)))
            if bridge:
                bridge.send(number, Answer(value, time.monotonic() - began))
    finally:
        watchdog.close()


def _value(worker: ActorWorker, kind: str, method: str, args: Sequence[Any]) -> Any:
    if method == "rooms":
        return gather_objects(Room.here(worker.member.rank, kind, Process.this().kernel))
    if method == "compute_log_probs":
        [batches] = args
        if isinstance(batches, Batches):
            assert worker.pairs is not None
            batches = batches.of(worker.pairs)
        return _arrays(worker.compute_log_probs(batches))
    value = getattr(worker, method)(*args)
    return gather_objects(value) if method == "folder_problem" else value


def _arrays(columns: Columns) -> dict[str, Any]:
    """Return the columns as arrays: tensors would travel as open files, on one machine only."""
    return {name: np.asarray(column.cpu()) for name, column in columns.items()}
