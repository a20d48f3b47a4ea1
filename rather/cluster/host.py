"""Host: the process of one device, in which the workers of one or both roles live. Ray starts it; no Ray in here.

It imports torch only after its environment is set, answers with values or with what went wrong, and never outlives
the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather import faults
from rather.cluster.failure import Failure
from rather.cluster.stack_snapshot import Look, Pulse
from rather.config import plugins
from rather.config.redaction import redact

if TYPE_CHECKING:
    from rather.cluster.preflight import Room
    from rather.cluster.role import RankInfo
    from rather.cluster.worker import ActorWorker
    from rather.config.schema import DPOConfig

LOOK_EVERY = 1.0  # seconds between two looks at the driver


@dataclass(frozen=True)
class Process:
    """A process that can be told from a later one with the same number."""

    machine: str
    pid: int
    started: str

    @staticmethod
    def this() -> Process:
        return Process(socket.gethostname(), os.getpid(), _started(os.getpid()) or "")

    @property
    def is_here(self) -> bool:
        return self.machine == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        return self.is_here and _started(self.pid) != self.started

    def kill(self) -> None:
        """A process of this machine, if it is still there; a stopped one ends too."""
        if self.is_here and not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def all_gone(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (
        not (gone := all(process.is_gone for process in processes)) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return gone


def _started(pid: int) -> str | None:
    """The kernel's start time of a process; None where there is none, or where /proc does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@dataclass(frozen=True)
class Answer:
    """What a call gave: a value or a failure, and what was logged meanwhile."""

    value: Any = None
    failure: Failure | None = None
    told: list[tuple[str, int, str]] = field(default_factory=list)  # logger, level, message


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a group find each other."""

    rank: int
    world: int
    store: str  # file:// on one machine, else tcp:// at rank 0
    timeout: float  # seconds; longer than any deadline of the driver, or the echo of a failure would arrive first


class Host:
    """One process. Roles are added once it runs; calls go to the worker of a role by name."""

    def __init__(
        self,
        environment: Mapping[str, str],
        neighbours: int,
        driver: Process,
        imports: Sequence[plugins.ImportedFile] = (),
    ) -> None:
        """`neighbours` count the processes that share this machine's cores, itself among them.

        `imports` are the user's files that the driver has imported; they need not exist here.
        """
        self.imports = imports
        threads = max(1, (os.cpu_count() or 1) // neighbours)
        os.environ.update(
            {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **environment}
        )
        self.workers: dict[str, ActorWorker] = {}
        self.pulse = Pulse()
        self.records = _Records()
        logging.getLogger("rather").addHandler(self.records)
        logging.getLogger("rather").setLevel(logging.INFO)
        end_with_others(driver)

    def process(self) -> tuple[Process, str]:
        """Itself, and the address at which other machines reach it."""
        return Process.this(), _address()

    def room(self, place: int, kind: str) -> Room:
        from rather.cluster.preflight import Room

        return Room.here(place, kind)

    def listen(self) -> int:
        """A port that answers until `join`: others find out whether they reach it."""
        self.door = socket.create_server(("", 0))
        return int(self.door.getsockname()[1])

    def cannot_reach(self, address: str, port: int, seconds: float) -> str | None:
        """Why not; None if it can."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def close_door(self) -> None:
        self.door.close()

    def join(self, meeting: Meeting, kind: str) -> Answer:
        """Meets the other processes of the group; both roles of a process share it."""
        return self._answer(lambda: _join(meeting, kind))

    def add(self, role: str, worker_cls: Any, config: DPOConfig, member: RankInfo) -> Answer:
        """A worker for `role`; its class may have to be imported first."""

        def work() -> None:
            from rather.cluster.local import worker_class

            plugins.load_sources(self.imports)
            found = worker_class(worker_cls, f"{role}.worker_cls")
            self.workers[role] = worker = found(config, role, member)
            if role == "reference":
                worker.neighbour = self.workers.get("actor_train")
            faults.arm(config.run_dir, role, member.rank)

        return self._answer(work)

    def call(self, role: str, step: int, method: str, *args: Any) -> Answer:
        faults.at_step(step)
        with self.pulse.during(f"{role}.{method}"):
            return self._answer(lambda: getattr(self.workers[role], method)(*args))

    def look(self) -> Look:
        """What it does; asked in a thread of its own."""
        return self.pulse.look()

    def _answer(self, work: Any) -> Answer:
        try:
            return Answer(work(), told=self.records.taken())
        except Exception as error:
            return Answer(failure=Failure.of(error), told=self.records.taken())


class _Records(logging.Handler):
    """Log records of this process until the next answer carries them to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.name, record.levelno, redact(record.getMessage())))

    def taken(self) -> list[tuple[str, int, str]]:
        kept, self.kept = self.kept, []
        return kept


def _join(meeting: Meeting, kind: str) -> None:
    import torch
    import torch.distributed as dist

    if kind == "cuda":
        torch.cuda.set_device(0)  # the only one that this process sees
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        init_method=meeting.store,
        rank=meeting.rank,
        world_size=meeting.world,
        timeout=timedelta(seconds=meeting.timeout),
    )


def end_with_others(driver: Process | None = None) -> None:
    """From now on this process ends once the driver does, or the process that started it: nothing may hold a device."""
    threading.Thread(target=_watch, args=(driver, os.getppid()), name="watch", daemon=True).start()


def _watch(driver: Process | None, parent: int) -> None:
    while os.getppid() == parent and not (driver and driver.is_gone):
        time.sleep(LOOK_EVERY)
    os._exit(1)


def _address() -> str:
    """The address of the interface that leads out; loopback where none does. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
