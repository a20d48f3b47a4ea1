"""A reference in processes of its own under torchrun, called by the policy's first process.

The first processes that torchrun starts are the policy's ranks, the others the reference's. Each
role has a process group of its own, so nothing in it sees the other one. The policy's first process
has a connection to each process of the reference: the number of a step travels out, two floats per
pair travel back. So the reference can work one step ahead, as on Ray.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from rather.cluster.health import (
    COMPUTED,
    CUT,
    GRACE,
    ONE,
    PHASES,
    Failure,
    Limit,
    hang_error,
    phase_of,
)
from rather.cluster.host import CallResult, Host, Process, connect, keep_alive, open_port
from rather.cluster.memory import Ledger
from rather.cluster.role import RoleOnRanks, log_records
from rather.cluster.supervision import PATIENCE, Peers, Watchdog
from rather.cluster.worker import RankInfo
from rather.config.run_config import DPOConfig
from rather.data.batch import Columns, PairBatch
from rather.errors import WorkerError, WorkerLost

TOPIC = "serves"  # of torchrun's store: address, port and token of a process of the reference


class RemoteReference(RoleOnRanks):
    """The reference as the policy's processes see it: the first one calls, the others do not."""

    def __init__(self, config: DPOConfig, kind: str, ledger: Ledger) -> None:
        super().__init__("reference", config, kind, ledger)
        self.device, self.rooms, self.names = "cpu", [], list[str]()
        self.watchdog: Watchdog | None = None
        self._connections: list[Connection] = []
        self._turn = threading.Lock()  # steps ahead, evaluations and saves all call
        self._computed = False

    def connect(self, first: int) -> None:
        """Connect to the processes of the reference, of which `first` is torchrun's rank."""
        peers, limits = Peers(PATIENCE), self.config.timeouts
        keys = [f"{TOPIC} {rank}" for rank in range(first, peers.world)]
        if not peers.wait(keys, limits.start):
            raise WorkerError(
                f"reference: no process within {limits.start:.0f} s (timeouts.start)."
            )
        names = peers.names("reference")
        for rank, (address, port, token) in sorted(peers.read(TOPIC).items()):
            name = names[rank]
            made = connect(name, address, port, limits.connect)
            self._connections.append(_lasting(made, limits.link))
            self._connections[-1].send_bytes(token.encode())
            self.rooms = [*self.rooms, self._connections[-1].recv()[-1]]
            self.names.append(name)

    def close(self) -> None:
        """Let the processes of the reference end."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        found = self._run("compute_log_probs", batches)[0]
        return {name: torch.from_numpy(column) for name, column in found.items()}

    def _run(self, method: str, *args: Any) -> list[Any]:
        if not self._connections:
            return [None]
        called = self._connections[:1] if method in ONE else self._connections
        with self._turn:
            for rank, connection in enumerate(called):
                with suppress(OSError):  # reported when its answer is awaited
                    # What all ranks have computed of micro-batches is the same: one returns it.
                    connection.send((method, args, method in COMPUTED and rank > 0))
            return self._collect(called, method)

    def _collect(self, called: Sequence[Connection], method: str) -> list[Any]:
        """Return the values in the order of ranks, or raise the first cause of a failure."""
        key = phase_of(self.role, method)
        if method == "compute_log_probs" and not self._computed:
            key, self._computed = "first_step", True
        limit = Limit(getattr(self.config.timeouts, key), key)
        deadline = time.monotonic() + limit.seconds
        results: dict[int, CallResult] = {}
        pending = {connection: rank for rank, connection in enumerate(called)}
        while pending and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), left):
                assert isinstance(ready, Connection)
                results[pending.pop(ready)] = result = self._receive(ready)
                if result.failure:  # the others may wait for it in a collective
                    deadline = min(deadline, time.monotonic() + GRACE)
        log_records(self.role, results)
        if failures := {rank: each.failure for rank, each in results.items() if each.failure}:
            raise self._error(failures, len(called), self.names)
        if pending:
            if self.watchdog:
                self.watchdog.end(limit, self.role)
            late = {self.names[rank]: None for rank in pending.values()}
            raise hang_error(late, {}, limit, self.config.log_dir)
        return [results[rank].value for rank in range(len(called))]

    def _receive(self, connection: Connection) -> CallResult:
        try:
            result: CallResult = connection.recv() or CallResult()
            return result
        except (EOFError, OSError) as error:
            text = "its process died: it crashed, or was killed from outside."
            if isinstance(error, TimeoutError):
                seconds = self.config.timeouts.link
                text = f"its machine has not answered for {seconds:.0f} s {CUT}"
            return CallResult(failure=Failure.of(WorkerLost(text)))


def serve(config: DPOConfig, member: RankInfo, kind: str) -> None:
    """Answer the calls of the policy's first process until it closes the role."""
    peers = Peers(PATIENCE)
    watchdog = Watchdog(config.timeouts, config.log_dir, peers.world, None)
    host = Host(config.envs(config.reference), member.near, Process.this())
    if failure := host.add("reference", None, config, member).failure:
        raise failure.error("reference")
    watchdog.watch(host.workers["reference"], PHASES)
    watchdog.start(links=False)
    with socket.create_connection(peers.place, config.timeouts.connect) as known:
        server = open_port(known.getsockname()[0])
    token = secrets.token_hex(16)
    peers.write(TOPIC, [*server.getsockname()[:2], token])
    connection = _accept(server, token, config)
    connection.send(host.describe(peers.rank, kind))
    try:
        while (call := connection.recv()) is not None:
            connection.send(_with_arrays(host.call("reference", *call)))
    except (EOFError, OSError) as error:
        # In these words it counts as an echo: another process knows the cause.
        text = "connection closed by peer: the policy's first process is gone"
        raise RuntimeError(text) from error
    finally:
        watchdog.closed.set()


def _with_arrays(result: CallResult | None) -> CallResult | None:
    """Return the result with arrays: tensors would travel as open files, on one machine only."""
    if result is None or not isinstance(result.value, dict):
        return result
    items = result.value.items()
    value = {name: each.numpy() if isinstance(each, Tensor) else each for name, each in items}
    return replace(result, value=value)


def _lasting(made: socket.socket, seconds: float) -> Connection:
    """Return a connection that waits for ever, unless the other machine is silent for long."""
    made.settimeout(None)
    keep_alive(made, seconds)
    return Connection(made.detach())


def _accept(server: socket.socket, token: str, config: DPOConfig) -> Connection:
    """Return the connection of the policy's first process, which knows the token."""
    server.settimeout(config.timeouts.start)
    with server:
        while True:
            connection = _lasting(server.accept()[0], config.timeouts.link)
            with suppress(EOFError, OSError):
                if connection.poll(config.timeouts.connect):
                    found = connection.recv_bytes(len(token))
                    if hmac.compare_digest(found, token.encode()):
                        return connection
            connection.close()
