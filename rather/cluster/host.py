"""Host: the process of one device, with the workers of one or both roles. It imports no Ray.

It imports torch only after its environment is set, answers with a value or a failure, and never
outlives the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.health import Failure, Pulse, StackSnapshot
from rather.config import plugins
from rather.config.redaction import redact

if TYPE_CHECKING:
    from rather.cluster.memory import Room
    from rather.cluster.worker import ActorWorker, RankInfo
    from rather.config.schema import DPOConfig

CHECK_EVERY = 1.0  # seconds between two checks of the driver


@dataclass(frozen=True)
class Process:
    """A process, distinguishable from a later one with the same pid."""

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
        """End a process of this machine, also a stopped one."""
        if self.is_here and not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def all_gone(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (gone := all(each.is_gone for each in processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone


def _started(pid: int) -> str | None:
    """Return the kernel's start time of a process; None if there is no such process."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


@dataclass(frozen=True)
class CallResult:
    """The value or the failure of a call, and what was logged during it."""

    value: Any = None
    failure: Failure | None = None
    records: Sequence[tuple[str, int, str]] = ()  # logger, level, message


def _as_result(work: Callable[..., Any]) -> Callable[..., CallResult]:
    @wraps(work)
    def call(host: Host, *args: Any) -> CallResult:
        try:
            return CallResult(work(host, *args), records=host.records.take())
        except Exception as error:
            return CallResult(failure=Failure.of(error), records=host.records.take())

    return call


class Host:
    """One process. Roles are added once it runs; calls name a role and a method of its worker."""

    def __init__(
        self,
        environment: Mapping[str, str],
        neighbours: int,
        driver: Process,
        imports: Sequence[plugins.ImportedFile] = (),
    ) -> None:
        """`neighbours` counts the processes that share this machine's cores, including this one.

        `imports` are the user's files that the driver has imported; they need not exist here.
        """
        threads = max(1, (os.cpu_count() or 1) // neighbours)
        os.environ.update(OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false")
        os.environ.update(environment)
        self.imports, self.pulse, self.records = imports, Pulse(), _Records()
        self.workers: dict[str, ActorWorker] = {}
        logging.getLogger("rather").addHandler(self.records)
        logging.getLogger("rather").setLevel(logging.INFO)
        end_with_others(driver)

    def describe(self, device: int, kind: str) -> tuple[Process, str, int, Room]:
        """Return this process, its address for other machines, its device, and its memory."""
        from rather.cluster.memory import Room

        address = "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # finds the interface that leads out; sends nothing
            address = probe.getsockname()[0]
        return Process.this(), address, device, Room.here(device, kind)

    def listen(self) -> int:
        """Open a port until `close_port`, so that others can find out whether they reach it."""
        self.server = socket.create_server(("", 0))
        return int(self.server.getsockname()[1])

    def connection_problem(self, address: str, port: int, seconds: float) -> str | None:
        return connection_problem(address, port, seconds)

    def close_port(self) -> None:
        self.server.close()

    @_as_result
    def join(self, rank: int, world: int, store: str, seconds: float, kind: str) -> None:
        """Join the process group, which both roles of a process share."""
        import torch
        import torch.distributed as dist

        if kind == "cuda":
            torch.cuda.set_device(0)  # the only one that this process sees
        place: Any = {"init_method": store, "rank": rank, "world_size": world}
        dist.init_process_group(backend_of(kind), timeout=timedelta(seconds=seconds), **place)

    @_as_result
    def add(self, role: str, worker_cls: Any, config: DPOConfig, member: RankInfo) -> None:
        """Make a worker for `role`; its class may have to be imported first."""
        from rather.cluster.worker import make_worker

        plugins.load_sources(self.imports)
        self.workers[role] = worker = make_worker(role, config, member, worker_cls)
        if role == "reference":
            worker.neighbour = self.workers.get("actor_train")

    @_as_result
    def call(self, role: str, method: str, *args: Any) -> Any:
        with self.pulse.during(f"{role}.{method}"):
            return getattr(self.workers[role], method)(*args)

    def snapshot(self) -> StackSnapshot:
        """Return what this process does; called in a thread of its own."""
        return self.pulse.snapshot()


class _Records(logging.Handler):
    """Log records of this process until the next result carries them to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.name, record.levelno, redact(record.getMessage())))

    def take(self) -> list[tuple[str, int, str]]:
        kept, self.kept = self.kept, []
        return kept


def backend_of(kind: str) -> str:
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def connection_problem(address: str, port: int, seconds: float) -> str | None:
    """Return why a port cannot be reached; None if it can."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def end_with_others(driver: Process | None = None) -> None:
    """End this process once the driver or its parent is gone: nothing may hold a device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not (driver and driver.is_gone):
            time.sleep(CHECK_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
