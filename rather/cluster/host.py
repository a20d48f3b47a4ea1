"""Host: the process of one device, with the workers of one or both roles. It imports no Ray.

It imports torch only after its environment is set, answers with a value or a failure, and never
outlives the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from rather.cluster.health import Failure, Pulse, StackSnapshot, set_environment
from rather.cluster.links import connection_problem, join_group, open_port, use_interface_to
from rather.cluster.process import Process, end_with_others
from rather.cluster.rank_output import BEGINS, STDERR, STDOUT, Output, RankOutput
from rather.config import plugins

if TYPE_CHECKING:
    from rather.cluster.memory import Room
    from rather.cluster.worker import ActorWorker
    from rather.run_folder.control import StopRequest


def _return_failure(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return failures as text: the driver may not be able to import their classes."""

    @wraps(work)
    def call(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception as error:
            return Failure.of(error)

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
        self.imports, self.pulse, self.output = imports, Pulse(), RankOutput()
        self.asked: StopRequest
        self.servers: list[socket.socket] = []
        self.workers: dict[str, ActorWorker] = {}
        logging.getLogger("rather").addHandler(self.output)
        logging.getLogger("rather").setLevel(logging.INFO)
        end_with_others(driver)

    def describe(self, device: int, kind: str) -> tuple[Process, int, Room]:
        """Return this process, its device, and its memory."""
        from rather.cluster.memory import Room

        own = Process.this()
        return own, device, Room.here(device, kind, own.kernel)

    def listen(self, address: str) -> int:
        """Open a port that shows whether this machine answers, and return its number."""
        self.servers.append(open_port(address))
        return int(self.servers[-1].getsockname()[1])

    def connection_problem(self, address: str, port: int, seconds: float) -> str | None:
        return connection_problem(address, port, seconds)

    def join(
        self, rank: int, world: int, address: str, port: int, seconds: float, kind: str
    ) -> None:
        """Join the process group, which both roles of a process share."""
        import torch.distributed as dist

        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(address, port, world, timeout=limit)  # type: ignore[attr-defined]
        use_interface_to(address)
        join_group(kind, "cuda:0", limit, store=store, rank=rank, world_size=world)

    @_return_failure
    def add(self, role: str, make: Callable[[], ActorWorker]) -> None:
        """Make a worker for `role`; its class may have to be imported first."""
        plugins.load_sources(self.imports)
        self.workers[role] = worker = make()
        if role == "reference":
            worker.neighbour = self.workers.get("actor_train")

    @_return_failure
    def call(self, role: str, method: str, args: Sequence[Any]) -> Any:
        """Return the result of a worker's method."""
        with self.pulse.during(f"{role}.{method}"):
            return _on_host(getattr(self.workers[role], method)(*args))

    def snapshot(self) -> StackSnapshot:
        """Return what this process does; called in a thread of its own."""
        return self.pulse.snapshot()

    # --- a program that all ranks run ---

    def run(self, environment: Mapping[str, str], program: Callable[[StopRequest], int]) -> int:
        """Run a program with the environment of a rank; return its exit code."""
        import torch.distributed as dist

        from rather.run_folder.control import StopRequest

        os.environ.update(environment)
        plugins.load_sources(self.imports)
        self.workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.asked = StopRequest(on_begin=lambda: self.output.add(BEGINS))
        try:
            with (
                redirect_stdout(self.output.stream(STDOUT)),
                redirect_stderr(self.output.stream(STDERR)),
            ):
                return program(self.asked)
        except SystemExit as end:
            return int(end.code or 0)

    def take_output(self) -> list[Output]:
        """Return what was logged and printed since the last time; in its own thread."""
        return self.output.take()

    def request(self, number: int) -> None:
        """Ask `run` to stop or to save, as a signal does; in its own thread."""
        if number == signal.SIGUSR1:
            self.asked.save_now = True
        else:
            self.asked.end(number)


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
