"""Host: the process of one device, with the workers of one or both roles. Ray starts it; no Ray in
here.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.health import Failure, Pulse, StackSnapshot
from rather.config import plugins
from rather.config.redaction import redact

if TYPE_CHECKING:
    from rather.cluster.preflight import Room
    from rather.cluster.role import RankInfo
    from rather.cluster.worker import ActorWorker
    from rather.config.schema import DPOConfig

CHECK_EVERY = 1.0  # seconds between two checks of the driver

Records = list[tuple[str, int, str]]  # logger, level, message


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
    """The value or the failure of a call, and what was logged meanwhile."""

    value: Any = None
    failure: Failure | None = None
    records: Sequence[tuple[str, int, str]] = ()


class Host:
    """One process. Roles are added once it runs; calls name the role and the method of its
    worker."""

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
        self.imports = imports
        self.workers: dict[str, ActorWorker] = {}
        self.pulse = Pulse()
        self.records = _Records()
        logging.getLogger("rather").addHandler(self.records)
        logging.getLogger("rather").setLevel(logging.INFO)
        end_with_others(driver)

    def describe(self, device: int, kind: str) -> tuple[Process, str, Room]:
        """Return this process, the address at which other machines reach it, and its memory."""
        from rather.cluster.preflight import Room

        return Process.this(), _address(), Room.here(device, kind)

    def listen(self) -> int:
        """Open a port until `close_port`, so that others can find out whether they reach it."""
        self.server = socket.create_server(("", 0))
        return int(self.server.getsockname()[1])

    def cannot_reach(self, address: str, port: int, seconds: float) -> str | None:
        """Return why a port cannot be reached; None if it can."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def close_port(self) -> None:
        self.server.close()

    def join(self, rank: int, world: int, store: str, seconds: float, kind: str) -> CallResult:
        """Join the process group, which both roles of a process share."""

        def work() -> None:
            import torch
            import torch.distributed as dist

            if kind == "cuda":
                torch.cuda.set_device(0)  # the only one that this process sees
            dist.init_process_group(
                backend_of(kind),
                init_method=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )

        return self._result(work)

    def add(self, role: str, worker_cls: Any, config: DPOConfig, member: RankInfo) -> CallResult:
        """Make a worker for `role`; its class may have to be imported first."""

        def work() -> None:
            from rather.cluster.local import worker_class

            plugins.load_sources(self.imports)
            found = worker_class(worker_cls, f"{role}.worker_cls")
            self.workers[role] = worker = found(config, role, member)
            if role == "reference":
                worker.neighbour = self.workers.get("actor_train")

        return self._result(work)

    def call(self, role: str, method: str, *args: Any) -> CallResult:
        with self.pulse.during(f"{role}.{method}"):
            return self._result(lambda: getattr(self.workers[role], method)(*args))

    def snapshot(self) -> StackSnapshot:
        """Return what this process does; called in a thread of its own."""
        return self.pulse.snapshot()

    def _result(self, work: Callable[[], Any]) -> CallResult:
        try:
            return CallResult(work(), records=self.records.take())
        except Exception as error:
            return CallResult(failure=Failure.of(error), records=self.records.take())


class _Records(logging.Handler):
    """Log records of this process until the next result carries them to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Records = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.name, record.levelno, redact(record.getMessage())))

    def take(self) -> Records:
        kept, self.kept = self.kept, []
        return kept


def backend_of(kind: str) -> str:
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def end_with_others(driver: Process | None = None) -> None:
    """End this process once the driver, or the process that started it, is gone: nothing may hold a
    device."""
    threading.Thread(target=_watch, args=(driver, os.getppid()), name="watch", daemon=True).start()


def _watch(driver: Process | None, parent: int) -> None:
    while os.getppid() == parent and not (driver and driver.is_gone):
        time.sleep(CHECK_EVERY)
    os._exit(1)


def _address() -> str:
    """Return the address of the interface that leads out; loopback if none does. Nothing is
    sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
