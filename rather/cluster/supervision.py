"""What ends a run, what it survives, and how that is reported once.

A run survives worker failures: processes that died, connections that broke, deadlines that passed.
Anything that a worker or the driver reports itself (a wrong config, bad data, a damaged checkpoint,
NaN, no memory, an exception) would happen again, and ends the run at once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial, wraps
from itertools import chain, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from rather.checkpoint.checkpoint import LATEST
from rather.cluster.health import (
    ANSWER,
    CUT,
    FIRST,
    GRACE,
    ON_RAY,
    RESUME,
    Cause,
    Failure,
    Limit,
    Pulse,
    Snapshots,
    StackSnapshot,
    death,
    first_cause,
    first_rank,
    hang_error,
    phase_of,
)
from rather.cluster.links import Link, connect, open_port
from rather.cluster.process import Process, end_with_others
from rather.cluster.rank_warnings import RankWarnings
from rather.cluster.worker import ActorWorker
from rather.config.redaction import printable
from rather.config.schema import Timeouts
from rather.errors import HangError, RatherError, WorkerError, WorkerLost
from rather.parallel.mesh import gather_objects

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0  # seconds
PATIENCE = 30.0  # seconds for torchrun's store to answer on a busy machine
PAUSE = 5.0  # seconds between two checks that show that this process was stopped
START = 5.0  # seconds for torchrun's store to answer; it was there before
DEBUGGERS = ("bdb.py", "pydevd")


@dataclass
class Supervision:
    """Counts worker failures since the last checkpoint: progress resets the count."""

    run_dir: Path
    max_failures: int
    backoff: float  # seconds before the first further attempt
    write: Callable[..., None]  # adds an incident
    step: Callable[[], int]  # returns how many steps are done
    pause: Callable[[float], None] = time.sleep
    failures: int = 0

    def __post_init__(self) -> None:
        self._first = self._saved = self._last_saved

    @property
    def _last_saved(self) -> int:
        """When the last checkpoint was completed; 0 if there is none."""
        with suppress(FileNotFoundError):
            return (self.run_dir / LATEST).stat().st_mtime_ns
        return 0

    def survive(self, error: RatherError, kind: str, remedy: str) -> None:
        """Return when it is time for another attempt; raise `error` if none is left."""
        saved, most = self._last_saved, self.max_failures
        self.failures = self.failures + 1 if saved == self._saved else 1
        self._saved = saved
        kind = "hang" if isinstance(error, HangError) else kind
        self.note(kind, error, loss=self.failures, max_failures=most)
        if self.failures > most:
            raise error
        pause = self.backoff * 2 ** (self.failures - 1)
        log.warning(
            "%s Now %s in %.0f s: failure %d of %d since the last checkpoint.",
            *(error, remedy, pause, self.failures, most),
        )
        self.pause(pause)

    def note(self, kind: str, error: RatherError, **facts: Any) -> None:
        self.write(kind, self.step(), cause=str(error), **facts)

    @property
    def has_saved(self) -> bool:
        """Whether the run has completed a checkpoint since this began."""
        return self._last_saved != self._first


# --- deadlines of calls in this process ---


@dataclass
class Watchdog:
    """A thread that ends the process, with exit code 7, if one of its calls is not over in time.

    Nothing can be raised in a thread that waits in a collective. Under torchrun all processes end:
    their watchdogs exchange stack snapshots, and one reports them. A process that was stopped as a
    whole and continues is not late. Deadlines are those of the config: a rank also waits for what
    the first one does alone between steps.
    """

    timeouts: Timeouts
    log_dir: Path
    world: int
    supervision: Supervision | None
    pulse: Pulse = field(default_factory=Pulse)
    limit: Limit | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    peers: Peers | None = None
    warnings: RankWarnings | None = None

    def watch(self, role: Any, methods: Iterable[str]) -> None:
        """Give these methods of a role their deadlines."""
        for method in methods:
            if hasattr(role, method):
                setattr(role, method, self._timed(getattr(role, method), role.role, method))

    def start(self, *, links: bool = True) -> None:
        """Start the thread; every process calls this. `links`: also watch the other machines."""
        if self.world > 1:
            self.peers = peers = Peers(PATIENCE)
            peers.write("process", asdict(Process.this()))
            self.warnings = RankWarnings(Peers(PATIENCE).store, peers.rank, self.world)
            logging.getLogger("rather").addHandler(self.warnings)
            if links and (found := peers.links(self.timeouts)):
                # A thread of its own: the other waits in the store of a machine that is cut off.
                work, given = self._watch_links, (found, peers)
                threading.Thread(target=work, args=given, name="links", daemon=True).start()
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        if self.warnings:
            logging.getLogger("rather").removeHandler(self.warnings)
            self._log_warnings_of_others()

    def _log_warnings_of_others(self) -> None:
        if self.warnings and self.peers and self.peers.rank == 0:
            self.warnings.log_those_of_others()

    @contextmanager
    def during(self, call: str, phase: str) -> Iterator[None]:
        with self.pulse.during(call):
            before, self.limit = self.limit, Limit(getattr(self.timeouts, phase), phase)
            try:
                yield
            finally:
                self.limit = before

    def _timed(self, work: Callable[..., Any], role: str, method: str) -> Callable[..., Any]:
        first = ["first_step"] if method in FIRST else []
        phases = chain(first, repeat(phase_of(role, method)))

        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(f"{role}.{method}", next(phases)):
                return work(*args, **kwargs)

        return timed

    def _work(self) -> None:
        checked = time.monotonic()
        while not self.closed.wait(CHECK_EVERY):
            now = time.monotonic()
            if now - checked > PAUSE:
                self.pulse.since += now - checked
            checked, limit = now, self.limit
            self._log_warnings_of_others()
            late = limit is not None and self.pulse.seconds > limit.seconds
            if late or (self.peers and self.peers.has_begun("snapshot")):
                self.end(limit or Limit(self.timeouts.save, "save"))

    def end(self, limit: Limit, role: str = "") -> None:
        """Report a hang of a role, by default that of the current call, and end the process."""
        own, peers = self.pulse.snapshot(), self.peers
        if any(name in own.stacks for name in DEBUGGERS):
            return

        def report(ranks: Snapshots, others: Snapshots = MappingProxyType({})) -> Cause:
            error = hang_error(ranks, others, limit, self.log_dir)
            if self.supervision:
                self.supervision.note("hang", error)
            return print_cause(Cause(Failure.of(error)))

        def report_all(peers: Peers, found: Mapping[int, Any]) -> Cause:
            late = role or (own.call.partition(".")[0] if "." in own.call else "")
            seen = {rank: StackSnapshot(**fields) for rank, fields in found.items()}
            names = peers.names(late)
            named = {names[rank]: seen.get(rank) for rank in peers.processes()}
            # The other role has processes of its own, and only waits for this one.
            others = {name: named.pop(name) for name in [*named] if not name.startswith(late)}
            return report(named, others)

        try:
            if peers:
                peers.settle("snapshot", asdict(own), ANSWER, partial(report_all, peers))
                answered = peers.read("snapshot")
                for rank, process in peers.processes().items():
                    if rank not in answered:  # it cannot end by itself
                        process.kill()
            else:
                report({own.call: own})
                print(own.stacks, file=sys.stderr, flush=True)
        except dist.DistError:  # the store is gone, perhaps with the hanging process
            report({f"rank {os.environ['RANK']} of {self.world}": own})
        os._exit(HangError.exit_code)

    def _watch_links(self, links: Mapping[str, Link], peers: Peers) -> None:
        """End this process once another machine does not answer."""
        silent: list[str] = []
        while not silent and not self.closed.wait(CHECK_EVERY):
            silent = [name for name, link in links.items() if link.is_silent]
        if not silent:
            return
        text = f"{silent[0]} has not answered for {self.timeouts.link:.0f} s {CUT}"
        error = WorkerLost(f"{text} Run the same command again to resume.")
        cause = print_cause(Cause(Failure.of(error)))
        if peers.rank == 0:
            if self.supervision:
                self.supervision.note("worker_lost", error)
            with suppress(dist.DistError):
                peers.publish(cause)  # the others only notice
        os._exit(error.exit_code)


# --- processes that torchrun started ---


class Peers:
    """Messages among these processes, through torchrun's own store: it outlives them, and works if
    all else hangs. A DistError after so many seconds if torchrun itself is gone."""

    def __init__(self, seconds: float) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options: Any = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
        start = f"rather/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store = dist.TCPStore(*self.place, **options)  # type: ignore[attr-defined]
        self.store: Any = dist.PrefixStore(start, store)  # type: ignore[attr-defined]

    @property
    def on_one_machine(self) -> bool:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) == self.world

    def links(self, timeouts: Timeouts) -> dict[str, Link]:
        """Connect the first process with the first one of each other machine. All call this."""
        if self.on_one_machine:
            return {}
        server = None
        if self.rank and os.environ["LOCAL_RANK"] == "0":
            with socket.create_connection(self.place, timeouts.connect) as known:
                server = open_port(known.getsockname()[0])
        found = gather_objects((socket.gethostname(), server and server.getsockname()[:2]))
        links = {
            f"{machine} ({place[0]})": connect(machine, place[0], place[1], timeouts.connect)
            for machine, place in found
            if place and self.rank == 0
        }
        if server:
            server.settimeout(2 * timeouts.connect)
            connection = server.accept()[0]
            links[f"{found[0][0]} ({connection.getpeername()[0]})"] = connection
        return {name: Link(connection, timeouts.link) for name, connection in links.items()}

    def processes(self) -> dict[int, Process]:
        return {rank: Process(**fields) for rank, fields in self.read("process").items()}

    def names(self, role: str) -> list[str]:
        """Return what to call each rank: its role, its rank there, and its machine."""
        processes = self.processes()
        places = self.read("place")  # if each role has processes of its own
        names = []
        for rank in range(self.world):
            own_role, own_rank, world = places.get(rank) or (role, rank, self.world)
            machine = f" (on {processes[rank].machine})" if rank in processes else ""
            names.append(f"{own_role} rank {own_rank} of {world}{machine}".lstrip())
        return names

    def report_silent_death(self, role: str) -> bool:
        """Report for a rank of this machine that has ended without a report, if there is one.

        Call this at once after an echo: the signal is lost when torchrun asks for it.
        """
        deadline, processes = time.monotonic() + GRACE, self.processes()
        while time.monotonic() < deadline and not self.has_begun("failure"):
            for rank, process in processes.items():
                number = process.signal
                if process.is_gone:
                    failure = Failure.of(WorkerLost(f"{death(number)} {RESUME}"))
                    self.write("failure", [asdict(failure), role or None], rank)
                    return True
            time.sleep(0.05)
        return False

    def write(self, topic: str, value: Any, rank: int | None = None) -> None:
        """Write something about a rank, by default this one."""
        self.store.set(f"{topic} {self.rank if rank is None else rank}", json.dumps(value))

    def read(self, topic: str) -> dict[int, Any]:
        """Return what the ranks have written about a topic, with two requests if all of them have."""
        keys = {rank: f"{topic} {rank}" for rank in range(self.world)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        values = self.store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def has_begun(self, topic: str) -> bool:
        with suppress(dist.DistError):
            return bool(self.store.check([f"{topic} speakers"]))
        return False

    def wait(self, keys: Iterable[str], seconds: float) -> bool:
        """Return whether all keys come in time. Polls: the store's own wait warns on stderr."""
        deadline, wanted = time.monotonic() + seconds, list(keys)
        while not (there := self.store.check(wanted)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return bool(there)

    def publish(self, cause: Cause) -> None:
        """Let all processes, and on Ray the one that started them, know why the job ends."""
        self.store.set("cause", json.dumps([asdict(cause.failure), cause.where]))
        self.store.set("code", str(cause.error.exit_code))

    def settle(
        self, topic: str, own: Any, seconds: float, report: Callable[[Mapping[int, Any]], Cause]
    ) -> int:
        """Return the exit code of all processes, once one has reported what all have written."""
        self.write(topic, own)
        if self.store.add(f"{topic} speakers", 1) == 1:
            self.wait([f"{topic} {rank}" for rank in range(self.world)], seconds)
            self.publish(report(self.read(topic)))
        self.wait(["code"], 2 * seconds)
        return int(self.store.get("code"))


def report_first_failure(work: Callable[[], int]) -> int:
    """Run `work` under torchrun. If it fails, all exit alike and one prints the first cause."""
    end_with_others()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # An interrupt may end torchrun before this process could watch it; it would then wait long
        # for the others.
        try:
            Peers(START)
        except dist.DistError:
            print("rather: torchrun, which started this process, is gone", file=sys.stderr)
            raise SystemExit(WorkerError.exit_code) from None
    try:
        return work()
    except Exception as error:
        own, role = Failure.of(error), ""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if isinstance(caller := frame.f_locals.get("self"), ActorWorker):
                role = caller.role
        try:
            peers = Peers(GRACE)
            others_know = own.is_echo and (
                peers.wait(["code"], 0.0) or not peers.report_silent_death(role)
            )
            if others_know and peers.wait(["code"], 2 * GRACE):
                code = int(peers.store.get("code"))
            else:
                peers.write("process", asdict(Process.this()))
                code = peers.settle("failure", [asdict(own), role], GRACE, partial(_report, peers))
        except dist.DistError:  # torchrun's store is gone, or not there yet
            code = print_cause(Cause(own)).error.exit_code
    raise SystemExit(code)


def _report(peers: Peers, reports: Mapping[int, Any]) -> Cause:
    """Print the first cause."""
    failures = {rank: Failure(**fields) for rank, (fields, _) in reports.items()}
    role = reports[first_rank(failures)][1]
    names = peers.names(role or "")
    if role == "":
        names[0] = ""  # outside any role, the first rank reports for all
    return print_cause(first_cause(failures, names, role))


def print_cause(cause: Cause) -> Cause:
    """Print the first cause of a failure; on Ray the process that started this one does so."""
    if ON_RAY not in os.environ:
        print(printable(f"{cause.trace}rather: {cause.error}"), file=sys.stderr, flush=True)
    return cause
