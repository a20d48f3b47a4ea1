"""Host: the process of one device, with the workers of one or both roles. It imports no Ray.

It imports torch only after its environment is set, answers with a value or a failure, and never
outlives the driver.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.health import Failure, Pulse, StackSnapshot, set_environment
from rather.cluster.rank_output import BEGINS, STDERR, STDOUT, Output, RankOutput
from rather.config import plugins
from rather.config.redaction import redact
from rather.errors import WorkerError

if TYPE_CHECKING:
    from rather.cluster.memory import Room
    from rather.cluster.worker import ActorWorker, RankInfo
    from rather.config.run_config import DPOConfig
    from rather.run_folder.control import StopRequest

CHECK_EVERY = 1.0  # seconds between two checks of the driver
SIOCGIFADDR = 0x8915  # Linux: the request for the address of an interface


@dataclass(frozen=True)
class Process:
    """A process, distinguishable from a later one with the same pid."""

    machine: str
    pid: int
    started: str
    kernel: str  # which numbers the process: two machines may have one name

    @staticmethod
    def this() -> Process:
        pid = os.getpid()
        started = "".join(_stat(pid)[STARTED : STARTED + 1])
        return Process(socket.gethostname(), pid, started, _kernel())

    @property
    def is_here(self) -> bool:
        return self.kernel == _kernel()

    @property
    def is_gone(self) -> bool:
        """Return whether it has ended, even if its parent has not collected it yet."""
        if not self.is_here:
            return False
        fields = _stat(self.pid)
        return len(fields) <= STARTED or fields[STARTED] != self.started or fields[0] in "ZX"

    @property
    def signal(self) -> int | None:
        """Return the signal that ended it; None if unknown, as after its parent collected it."""
        fields = _stat(self.pid)
        is_ended = len(fields) > EXIT_STATUS and fields[STARTED] == self.started
        return int(fields[EXIT_STATUS]) & 0x7F or None if is_ended and fields[0] == "Z" else None

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


def kill_marked(name: str, value: str) -> None:
    """End all processes of this machine that have `name` with this value in their environment."""
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to somebody else
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


STARTED, EXIT_STATUS = 19, 49  # in _stat


def _stat(pid: int) -> list[str]:
    """Return what the kernel says about a process, from its state on; nothing if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _kernel() -> str:
    """Return what identifies the kernel, and within it the container, that numbers processes."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@dataclass(frozen=True)
class CallResult:
    """The value or the failure of a call, and what was logged during it."""

    value: Any = None
    failure: Failure | None = None
    records: Sequence[tuple[str, int, str]] = ()  # logger, level, message


def _as_result(work: Callable[..., Any]) -> Callable[..., CallResult]:
    @wraps(work)
    def call(host: Host, *args: Any, **options: Any) -> CallResult:
        try:
            return CallResult(work(host, *args, **options), records=host.records.take())
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
        set_environment(environment)
        self.imports, self.pulse, self.records = imports, Pulse(), LogRecords()
        self.output = RankOutput()
        self.asked: StopRequest
        self.servers: list[socket.socket] = []
        self.workers: dict[str, ActorWorker] = {}
        logging.getLogger("rather").addHandler(self.records)
        logging.getLogger("rather").setLevel(logging.INFO)
        end_with_others(driver)

    def describe(self, device: int, kind: str) -> tuple[Process, int, Room]:
        """Return this process, its device, and its memory."""
        from rather.cluster.memory import Room

        own = Process.this()
        return own, device, Room.here(device, kind, own.kernel)

    def listen(self, address: str) -> int:
        """Open a port, and return its number: the first is that at which all ranks will meet."""
        self.servers.append(open_port(address))
        return int(self.servers[-1].getsockname()[1])

    def connection_problem(self, address: str, port: int, seconds: float) -> str | None:
        return connection_problem(address, port, seconds)

    @_as_result
    def join(
        self, rank: int, world: int, address: str, port: int, seconds: float, kind: str
    ) -> None:
        """Join the process group, which both roles of a process share."""
        import torch.distributed as dist

        limit = timedelta(seconds=seconds)
        # The open port is handed over: nobody else can take it, and it stays on its interface.
        own: Any = (
            {"is_master": True, "master_listen_fd": self.servers[0].detach()} if not rank else {}
        )
        store = dist.TCPStore(address, port, world, timeout=limit, **own)  # type: ignore[attr-defined]
        use_interface_to(address)
        join_group(kind, "cuda:0", limit, store=store, rank=rank, world_size=world)

    @_as_result
    def add(self, role: str, worker_cls: Any, config: DPOConfig, member: RankInfo) -> None:
        """Make a worker for `role`; its class may have to be imported first."""
        from rather.cluster.worker import make_worker

        plugins.load_sources(self.imports)
        self.workers[role] = worker = make_worker(role, config, member, worker_cls)
        if role == "reference":
            worker.neighbour = self.workers.get("actor_train")

    def call(
        self, role: str, method: str, args: Sequence[Any], silent: bool = False
    ) -> CallResult | None:
        """Return the result of a worker's method. `silent`: None unless there is more to say."""
        result = self._call(role, method, args, silent)
        return result if not silent or result.failure or result.records else None

    @_as_result
    def _call(self, role: str, method: str, args: Sequence[Any], silent: bool) -> Any:
        from rather.data.shares import Batches

        worker = self.workers[role]
        with self.pulse.during(f"{role}.{method}"):
            args = [worker.named.find(arg) if isinstance(arg, Batches) else arg for arg in args]
            value = getattr(worker, method)(*args)
            return None if silent else _on_host(value)

    def snapshot(self) -> StackSnapshot:
        """Return what this process does; called in a thread of its own."""
        return self.pulse.snapshot()

    # --- a program that all ranks run ---

    def run(
        self, environment: Mapping[str, str], program: Callable[..., int], config: DPOConfig
    ) -> int:
        """Run a program with the environment of a rank; return its exit code."""
        import torch.distributed as dist

        from rather.run_folder.control import StopRequest

        os.environ.update(environment)
        plugins.load_sources(self.imports)
        self.workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        logging.getLogger("rather").removeHandler(self.records)
        logging.getLogger("rather").addHandler(self.output)
        self.asked = StopRequest(on_begin=lambda: self.output.add(BEGINS))
        try:
            with (
                redirect_stdout(self.output.stream(STDOUT)),
                redirect_stderr(self.output.stream(STDERR)),
            ):
                return program(config, self.asked)
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            logging.getLogger("rather").removeHandler(self.output)
            logging.getLogger("rather").addHandler(self.records)

    def take_output(self) -> list[Output]:
        """Return what `run` has logged and printed since the last call; in its own thread."""
        return self.output.take()

    def request(self, number: int) -> None:
        """Ask `run` to stop or to save, as a signal does; in its own thread."""
        if number == signal.SIGUSR1:
            self.asked.save_now = True
        else:
            self.asked.end(number)


class LogRecords(logging.Handler):
    """Log records of this process until the next result carries them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.name, record.levelno, redact(record.getMessage())))

    def take(self) -> list[tuple[str, int, str]]:
        kept, self.kept = self.kept, []
        return kept


def _on_host(value: Any) -> Any:
    """Return the value with its tensors on the CPU: the driver may have no GPU to open them."""
    if hasattr(value, "cpu"):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = [each.name for each in fields(value) if each.init]
        found = {name: _on_host(getattr(value, name)) for name in own}
        return replace(value, **found)
    return value


def use_interface_to(address: str) -> None:
    """Let gloo offer the interface to an address, not what this host's own name resolves to."""
    if name := interface_to(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def join_group(kind: str, device: str, timeout: timedelta, **place: Any) -> None:
    """Join the process group of all ranks, or of those that share a store."""
    import torch
    import torch.distributed as dist

    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout, **place)
        return
    torch.cuda.set_device(device)
    place["device_id"] = torch.device(device)  # connects all ranks now, before two exchange tensors
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, **place)


def interface_to(address: str) -> str | None:
    """Return the network interface that leads to an IPv4 address; None if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # finds the route; sends nothing
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if probe.getsockname()[0] == socket.inet_ntoa(found[20:24]):
                    return name
    return None


def connect(name: str, address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to a process, or raise an error that names it."""
    try:
        return socket.create_connection((address, port), seconds)
    except (OSError, OverflowError) as error:
        raise WorkerError(f"{name} cannot be reached at {address}:{port}: {error}") from error


def connection_problem(address: str, port: int, seconds: float) -> str | None:
    """Return why a port cannot be reached; None if it can."""
    try:
        connect("", address, port, seconds).close()
    except WorkerError as error:
        return str(error.__cause__)
    return None


# --- the links between machines ---


def open_port(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Break a connection if the other machine has not answered for so many seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Silence for a third of the time, then four questions.
    ask = {socket.TCP_KEEPIDLE: seconds / 3, socket.TCP_KEEPINTVL: seconds / 6}
    for option, number in (ask | {socket.TCP_KEEPCNT: 4}).items():
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(number)))


class Link:
    """A connection to another machine, whose kernel is asked whether it is there.

    The kernel also answers for a process that is busy, stopped or in a debugger.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """The other machine is lost if it has not answered for so many seconds."""
        self.connection, self._silent = connection, False
        connection.setblocking(False)
        keep_alive(connection, seconds)

    @property
    def is_silent(self) -> bool:
        """Return whether the machine does not answer. The end of its process is not silence."""
        try:
            self.connection.recv(1)
        except (BlockingIOError, ConnectionError):
            pass
        except OSError:  # reported once
            self._silent = True
        return self._silent


def end_with_others(driver: Process | None = None) -> None:
    """End this process once the driver or its parent is gone: nothing may hold a device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not (driver and driver.is_gone):
            time.sleep(CHECK_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
