"""ResourceManager: nodes and devices -> processes, on a local Ray or an existing cluster.

Device d is number d % num_gpus_per_node of node d // num_gpus_per_node. What is requested is
compared with what the cluster has before anything is placed: Ray itself would wait for ever.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rather.cluster.cleanup import FAILED, STARTED, Cleaner, kill_marked
from rather.cluster.health import CUT, GRACE, KILLED, RESUME, Failure, StackSnapshot, death
from rather.cluster.host import Host
from rather.cluster.links import Link, connection_problem, open_port
from rather.cluster.memory import Room, sentence
from rather.cluster.process import Process, SignalWatch, all_gone
from rather.config import plugins
from rather.config.schema import Timeouts
from rather.errors import ConfigError, RayGone, WorkerError, WorkerLost
from rather.files import read_bytes

log = logging.getLogger(__name__)

SLOT = "rather_slot"  # of a CPU worker. Not a CPU: eight workers on two cores would wait for ever
SHARE = 0.01  # of a device, for a process: the whole device is reserved by the placement group
OBJECT_STORE = 256 << 20  # bytes of a local Ray: token ids and log-probs pass through it
# Seconds before each further attempt to start a local Ray: on a busy machine its processes miss
# deadlines of their own, which cannot be set.
PAUSES = (5.0, 15.0, 30.0)
LONGEST_START = 300.0  # seconds for a local Ray to start, all attempts together
STILL_STARTING = 30.0  # seconds between two lines that say so
RAY_REPORTS = 8.0  # seconds for Ray to report that one of its processes died while it starts
MARK = "RATHER_RAY"  # in the environment of a local Ray's processes: the folder of its manager
AGENT_PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
LONGEST_PLACE = 20  # characters of the folder that has Ray's: a socket's path has at most 107
TOKEN = "token"  # the file with the secret of a local Ray
SHARED_MEMORY = Path("/dev/shm")  # only its free space is looked at  # nosec B108
SNAPSHOTS = "snapshots"  # threads that answer while the main work hangs
ANSWER = 5.0  # seconds in which they answer
ENDS = 1.0  # seconds in which a process that can do so ends
RAY_KILLS = 6.0  # seconds after which Ray has ended a process that does not end by itself
STARTS = 3  # of processes, one of which dies before it has done anything
RAY_CHECKS, RAY_WAITS = 2.0, 12.0  # seconds without its server. After 60 Ray would end this process
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" binds every port to loopback, also on Linux
AGAIN = "Run the same command again, or start it with torchrun, which needs no Ray."
POLL = 1.0  # seconds between two looks at the ranks
CHECK_START = 0.5  # seconds between two looks at Ray's processes while a run starts
RAY_NOTICES = 5.0  # seconds in which Ray itself reports a process that died, with the reason
# Of this process's environment, what ranks get: the number of threads, and the secrets of trackers
# and stores. They travel as an argument: Ray keeps an environment where others can read it.
TRAVELS = re.compile(r"OMP_NUM_THREADS|HF_TOKEN|(WANDB|AWS|MLFLOW)_\w+")


@dataclass(frozen=True)
class Seat:
    """A process on its device."""

    handle: Any
    node: str  # Ray's id of the machine
    address: str  # at which other machines reach it
    process: Process
    device: int
    room: Room
    link: Link | None = None  # from the driver to its machine, of the first process there

    def __str__(self) -> str:
        return f"device {self.device} on {self.process.machine}"


class RankCalls:
    """What the ranks of a job were called to do: results, failures, and processes that died.

    Processes that end and machines that are silent are noticed before Ray says so.
    """

    def __init__(
        self, manager: ResourceManager, seats: Sequence[Seat], refs: Iterable[Any]
    ) -> None:
        """`refs` are Ray's references to the results of the ranks."""
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.pending = dict(enumerate(refs))
        self._manager, self._seats = manager, seats
        self._gone_since: dict[int, float] = {}
        self._signals = [SignalWatch(seat.process) for seat in seats]

    def wait(self, seconds: float = POLL) -> None:
        """Wait for further results, at most so long."""
        import ray

        refs = list(self.pending.values())
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=seconds)
        for rank, ref in list(self.pending.items()):
            if ref not in done:
                continue
            del self.pending[rank]
            try:
                result = ray.get(ref)
            except ray.exceptions.RayError as error:
                result = failure_of(error)
            outcomes = self.failures if isinstance(result, Failure) else self.results
            outcomes[rank] = result
        self._manager.refuse_without_ray()
        self._note_silent_machines()
        self._note_dead_processes()

    def killed(self) -> dict[int, int]:
        """Return rank -> signal for ranks of this machine that a signal ended, if it is known."""
        numbers = {rank: watch.signal for rank, watch in enumerate(self._signals)}
        return {rank: number for rank, number in numbers.items() if number}

    def _note_silent_machines(self) -> None:
        """Blame the first rank on each machine that does not answer."""
        text = f"its machine has not answered for {self._manager.timeouts.link:.0f} s {CUT}"
        for rank, seat in enumerate(self._seats):
            if seat.link and seat.link.is_silent:
                self._manager.cut_off.add(seat.node)
                self.failures[rank] = Failure.of(WorkerLost(text))

    def _note_dead_processes(self) -> None:
        """Blame ranks of this machine that have ended, if Ray is late to say so."""
        now = time.monotonic()
        for rank in self.pending:
            if not self._seats[rank].process.is_gone:
                continue
            if now - self._gone_since.setdefault(rank, now) > RAY_NOTICES:
                self.failures[rank] = Failure.of(WorkerLost(death(None)))


def failure_of(error: Exception) -> Failure:
    """Return why Ray has no result of a process."""
    from ray import exceptions

    gone = (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.ObjectLostError)
    if not isinstance(error, gone):
        return Failure(type(error).__name__, last_line(error), str(error), time.time())
    # Of Ray's long account, the line that says what happened.
    lines = str(error).splitlines()
    reason = ([line for line in lines if "exit" in line.lower()] or lines)[-1].strip()
    text = f"its process died: {reason.partition(' Some common causes')[0]} {KILLED}"
    return Failure(WorkerLost.__name__, text, str(error), time.time())


def names_of(seats: Sequence[Seat], role: str = "") -> list[str]:
    """Return what to call the ranks on these seats."""
    world = len(seats)
    return [f"{role} rank {rank} of {world} ({seat})".lstrip() for rank, seat in enumerate(seats)]


class ResourceManager:
    """Places one process on each device of a mapping; roles with equal mappings share processes."""

    _local: LocalRay | None = None  # the Ray that this process started

    def __init__(
        self,
        num_nodes: int = 1,
        num_gpus_per_node: int = 1,
        *,
        address: str | None = None,
        platform: str = "auto",
        timeouts: Timeouts | None = None,
    ) -> None:
        self.num_nodes, self.num_gpus_per_node = num_nodes, num_gpus_per_node
        self.devices, self.timeouts = num_nodes * num_gpus_per_node, timeouts or Timeouts()
        self._cluster = f"the Ray cluster at {address}" if address else "this machine"
        self._seats: dict[tuple[int, ...], list[Seat]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}  # mapping -> store of its process group
        self.named: dict[str, Sequence[Seat]] = {}  # by role
        self.cut_off: set[str] = set()  # nodes that Ray may still believe to be alive
        self._closed = False
        self._placed: Any = None
        self._ray: Any = None
        self._server = ""  # address of Ray's own server; unknown behind a ray:// proxy
        self._heard = time.monotonic()  # from the server
        # For the token and Ray's own files.
        self._folder = private_folder()
        atexit.register(self.close)
        try:
            connect = self.timeouts.connect
            self._local = None if address else LocalRay(self._folder)
            self._ray, self._owns_ray = connected(
                address, self.devices, self._folder, connect, self._local
            )
            with self._watched():
                self._look(address, platform)
            if self._local:
                self._local.has_started()
        except BaseException:
            self.close()
            raise

    def _look(self, address: str | None, platform: str) -> None:
        """Find out what the cluster has, and reserve what this run needs."""
        if not (address or "").startswith("ray://"):
            self._server = str(self._ray.get_runtime_context().gcs_address)
        has_gpus = any(self._on_nodes("GPU"))
        if platform == "cuda" and not has_gpus:
            raise ConfigError(f"platform: cuda, and {self._cluster} has no GPU")
        self.kind = "cuda" if has_gpus and platform != "cpu" else "cpu"
        self._resource = "GPU" if self.kind == "cuda" else SLOT
        self._reserve()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While workers start, report a dead process of a local Ray as the cause of all else."""
        if not self._local:
            yield
            return
        try:
            with self._local.watched():
                yield
        except Exception as error:  # Ray raises many kinds
            if isinstance(error, ConfigError) or not (death := self._local.death()):
                raise
            raise WorkerError(f"{death} while the run started. {AGAIN}") from error

    # --- the cluster ---

    def _on_nodes(self, resource: str) -> list[int]:
        """Return how many of a resource each node has, most first."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        found = [each["Resources"] for each in nodes if each["NodeID"] not in self.cut_off]
        return sorted((int(node.get(resource, 0)) for node in found), reverse=True)

    def _reserve(self) -> None:
        """Reserve one bundle of devices on each node. Nodes may still be arriving."""
        from ray.util.placement_group import placement_group

        nodes, each = self.num_nodes, self.num_gpus_per_node
        unit = "GPUs" if self.kind == "cuda" else f"CPU workers ({SLOT})"
        asked = (
            f"num_nodes {nodes} x num_gpus_per_node {each} = {self.devices} {unit} are requested"
        )
        deadline = time.monotonic() + self.timeouts.connect
        while True:
            there = self._on_nodes(self._resource)
            enough = sum(count >= each for count in there)
            if enough >= nodes:
                break
            if time.monotonic() > deadline:
                advice = ""
                if self.kind == "cpu" and not any(there):
                    advice = f" Start its nodes with --resources='{{\"{SLOT}\": {each}}}'."
                raise ConfigError(
                    f"num_nodes: {asked}; {self._cluster} has {' + '.join(map(str, there)) or '0'} "
                    f"on {len(there)} node{'s' * (len(there) != 1)}, so {enough} of {nodes} nodes "
                    f"have {each}: {nodes - enough} missing.{advice} Add nodes, or change "
                    "num_nodes, num_gpus_per_node and device_mapping."
                )
            time.sleep(0.2)
        strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
        # Kept at once: a request that is abandoned would be granted as soon as the devices are
        # free, and hold them.
        self._placed = placement_group([{self._resource: each}] * nodes, strategy=strategy)
        if not self._placed.wait(max(1.0, deadline - time.monotonic())):
            free = int(self._ray.available_resources().get(self._resource, 0))
            raise ConfigError(
                f"num_nodes: {asked}, and {self._cluster} has them, but other jobs use some: "
                f"{free} are free. Wait for them, or request fewer."
            )

    # --- processes ---

    def seats(self, device_mapping: Sequence[int], environment: Mapping[str, str]) -> list[Seat]:
        """Return the processes on these devices; the first call starts and connects them."""
        mapping = tuple(device_mapping)
        if mapping not in self._seats:
            if max(mapping) >= self.devices:
                raise ConfigError(
                    f"device_mapping: device {max(mapping)} is requested, and num_nodes "
                    f"{self.num_nodes} x num_gpus_per_node {self.num_gpus_per_node} gives devices "
                    f"0 to {self.devices - 1}."
                )
            log.info("starting %d worker process%s", len(mapping), "es" * (len(mapping) > 1))
            for start in range(1, STARTS + 1):
                try:
                    with self._watched():
                        started = self._link(self._start(mapping, environment))
                    break
                except WorkerLost as error:  # a process that is in no pipeline yet
                    if start == STARTS:
                        raise
                    log.warning("%s; starting again (%d of %d)", error, start + 1, STARTS)
            self._seats[mapping] = started
        return self._seats[mapping]

    def introduce(self, device_mapping: Sequence[int]) -> None:
        """Make a process group of the processes on these devices, unless they are in one."""
        mapping = tuple(device_mapping)
        if len(mapping) == 1 or mapping in self._groups:
            return
        seats = self._seats[mapping]
        with self._watched():
            self._groups[mapping], *place = self.open_store(seats)
            # Longer than any deadline of the driver, or the echo of a failure would arrive first.
            common = (len(seats), *place, 60 + self.timeouts.longest, self.kind)
            refs = [seat.handle.join.remote(rank, *common) for rank, seat in enumerate(seats)]
            self._all(refs, "connect with the others", self.timeouts.start, map(str, seats))

    def forget_groups(self) -> None:
        """The processes run a program that makes groups of its own, and ends them."""
        self._groups.clear()

    def _start(self, mapping: tuple[int, ...], environment: Mapping[str, str]) -> list[Seat]:
        from ray.util.placement_group import placement_group_table

        each = self.num_gpus_per_node
        gpus = self._reserved_gpus(mapping) if self.kind == "cuda" else {}
        own = {name: value for name, value in os.environ.items() if TRAVELS.fullmatch(name)}
        handles = []
        for device in mapping:
            node, local = divmod(device, each)
            own["CUDA_VISIBLE_DEVICES"] = gpus[node][local] if gpus else ""
            given = (each, Process.this(), plugins.loaded())
            handles.append(self._remote(Host, node).remote({**own, **environment}, *given))
        asked = [h.describe.remote(d, self.kind) for h, d in zip(handles, mapping, strict=True)]
        ids = placement_group_table(self._placed)["bundles_to_node_id"]
        known = {node["NodeID"]: node for node in self._ray.nodes()}
        places = [known.get(ids.get(device // each), {}) for device in mapping]
        hosts = [place.get("NodeManagerHostname", "a lost machine") for place in places]
        names = [f"device {d} on {host}" for d, host in zip(mapping, hosts, strict=True)]
        doing = "start a process (Ray needs room for its logs there)"
        found = self._all(asked, doing, self.timeouts.start, names)
        return [
            Seat(handle, place["NodeID"], place["NodeManagerAddress"], *facts)
            for handle, place, facts in zip(handles, places, found, strict=True)
        ]

    def _reserved_gpus(self, mapping: tuple[int, ...]) -> dict[int, list[str]]:
        """Return, by node, the machine's own numbers of the GPUs that are reserved there."""
        per_node = self.num_gpus_per_node
        nodes = sorted({device // per_node for device in mapping})
        probes = [self._remote(_Probe, node, per_node).remote() for node in nodes]
        gpu_ids = self._all([probe.gpu_ids.remote() for probe in probes], "list GPUs")
        for probe in probes:
            self._ray.kill(probe)
        return dict(zip(nodes, gpu_ids, strict=True))

    def _remote(self, cls: type, node: int, gpus: float = SHARE) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=node)
        devices = {"num_gpus": gpus} if self.kind == "cuda" else {"resources": {SLOT: SHARE}}
        # A restarted actor would come back without its model, silently.
        never = {"max_restarts": 0, "max_task_retries": 0}
        made = self._ray.remote(concurrency_groups={SNAPSHOTS: 1})(cls)
        return made.options(num_cpus=0, scheduling_strategy=where, **devices, **never)

    def open_store(self, seats: Sequence[Seat]) -> tuple[Any, str, int]:
        """Return a store at which these processes meet, its address and its port.

        It is in this process, so it outlives them.
        """
        server = open_port(str(self._ray.util.get_node_ip_address()))
        address, port = server.getsockname()[:2]
        # The open port is handed over: nobody else can take it, and it stays on its interface.
        options: Any = {"wait_for_workers": False, "master_listen_fd": server.detach()}
        limit = timedelta(seconds=GRACE)
        store = dist.TCPStore(address, port, is_master=True, timeout=limit, **options)  # type: ignore[attr-defined]
        seconds = self.timeouts.connect
        refs = [seat.handle.connection_problem.remote(address, port, seconds) for seat in seats]
        for seat, problem in zip(seats, self._all(refs, "connect", 2 * seconds), strict=True):
            if problem:
                raise WorkerError(
                    f"{seat} cannot reach the process that started it at {address}:{port} within "
                    f"{seconds:.0f} s: {problem}. Workers on several machines need open ports "
                    "between them."
                )
        return store, address, port

    def _link(self, seats: Sequence[Seat]) -> list[Seat]:
        """Connect this process with the first one on each other machine."""
        linked = {seat.node for seat in seats if seat.process.is_here or not self._server}
        found, limits = list(seats), self.timeouts
        for rank, seat in enumerate(seats):
            if seat.node in linked:
                continue
            linked.add(seat.node)
            [port] = self._all([seat.handle.listen.remote(seat.address)], "open a port")
            try:
                connection = socket.create_connection((seat.address, port), limits.connect)
            except OSError as error:
                text = (
                    "%s cannot be reached at %s:%d (%s): if its network is cut, only Ray reports it"
                )
                log.warning(text, seat, seat.address, port, error)
            else:
                found[rank] = replace(seat, link=Link(connection, limits.link))
        return found

    def _all(
        self,
        asked: Sequence[Any],
        doing: str,
        seconds: float | None = None,
        names: Iterable[str] = (),
    ) -> list[Any]:
        """Return the answers; `names` are those of the processes, for the one that gives none."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        seconds = seconds or self.timeouts.connect
        try:
            return self._answers(list(asked), seconds)
        except RayError as error:
            late = isinstance(error, GetTimeoutError)
            why = f"timed out after {seconds:.0f} s" if late else last_line(error)
            kind = WorkerLost if isinstance(error, RayActorError) else WorkerError
            where = self._cluster
            for name, ref in zip(names, asked, strict=False):
                try:
                    self._ray.get(ref, timeout=0)
                except RayError as own:
                    if late or not isinstance(own, GetTimeoutError):  # others may still start
                        where = name
                        break
            raise kind(f"{where}: could not {doing}: {why}") from error

    def _answers(self, asked: list[Any], seconds: float) -> list[Any]:
        """Return all answers; raise Ray's timeout after so many seconds, or if its server died."""
        from ray.exceptions import GetTimeoutError

        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return list(self._ray.get(asked, timeout=max(0.0, min(left, RAY_CHECKS))))
            except GetTimeoutError:
                if left <= RAY_CHECKS or (self._local and self._local.death()):
                    raise

    # --- lost processes ---

    def snapshots(self) -> dict[str, StackSnapshot | None]:
        """Return what each rank of each role does; None for those that do not answer in time."""
        names = [name for role, seats in self.named.items() for name in names_of(seats, role)]
        seats = [seat for seats in self.named.values() for seat in seats]
        return dict(zip(names, self.ask(seats, "snapshot"), strict=True))

    def ask(self, seats: Sequence[Seat], method: str, *args: Any) -> list[Any]:
        """Return what processes answer whose main work may hang; None from those that are late."""
        refs = []
        for seat in seats:
            call = getattr(seat.handle, method).options(concurrency_group=SNAPSHOTS)
            refs.append(call.remote(*args))
        self._ray.wait(refs, num_returns=len(refs), timeout=ANSWER)
        answers: list[Any] = [None] * len(refs)
        for rank, ref in enumerate(refs):
            with suppress(self._ray.exceptions.RayError):  # it is late, or has just died
                answers[rank] = self._ray.get(ref, timeout=0)
        return answers

    def refuse_without_ray(self) -> None:
        """Report that Ray is gone, before Ray ends this process with its own exit code."""
        silent = time.monotonic() - self._heard
        if silent < RAY_CHECKS:
            return
        if self._has_ray:
            self._heard = time.monotonic()
        elif silent > RAY_WAITS:
            raise RayGone(f"Ray is gone: its server at {self._server} does not answer. {RESUME}")

    @property
    def _has_ray(self) -> bool:
        return not self._server or connection_problem(*_host_and_port(self._server), 1.0) is None

    def renew(self) -> None:
        """Make room for new processes, once the old ones are gone and hold no memory."""
        self.stop()
        self.refuse_without_ray()
        for seats in self.named.values():
            wait_elsewhere(seats)
        self._ray.util.remove_placement_group(self._placed)
        self.named = {}
        try:
            self._reserve()
        except Exception as error:  # Ray raises the base class if its raylet is gone
            raise WorkerError(
                f"lost workers cannot be replaced: {sentence(error).rstrip('.')}. {RESUME}"
            ) from error

    # --- the end ---

    def stop(self, device_mapping: Sequence[int] | None = None) -> None:
        """End the processes on these devices, or all; those of this machine are then gone."""
        ending = [tuple(device_mapping)] if device_mapping is not None else list(self._seats)
        seats = []
        for mapping in ending:
            self._groups.pop(mapping, None)
            seats += self._seats.pop(mapping, [])
        if self._has_ray:
            for seat in seats:
                self._ray.kill(seat.handle)
        here = [seat.process for seat in seats if seat.process.is_here]
        if not all_gone(here, ENDS):  # Ray would wait for five seconds
            for process in here:
                process.kill()
            all_gone(here, RAY_KILLS)

    def close(self) -> None:
        """Leave nothing behind: no process, no reservation, no file."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._ray and self._ray.is_initialized():
            self.stop()
            if not self._has_ray:  # to disconnect would end this process
                atexit.unregister(self._ray.shutdown)
            else:
                if self._placed:
                    self._ray.util.remove_placement_group(self._placed)
                if self._owns_ray:
                    self._ray.shutdown()
        if self._local:
            self._local.close()
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(self._folder / TOKEN):
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
        shutil.rmtree(self._folder, ignore_errors=True)  # a process of Ray may still write a line


def private_folder() -> Path:
    """Create a folder for this user only; a path to a socket in it must have few characters."""
    places = (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp")  # nosec B108
    place = next(place for place in places if place and len(place) <= LONGEST_PLACE)
    return Path(tempfile.mkdtemp(prefix="rather-", dir=place))


def wait_elsewhere(seats: Sequence[Seat]) -> None:
    """Wait for processes on other machines, which cannot be observed, to end."""
    if not all(seat.process.is_here for seat in seats):
        time.sleep(RAY_KILLS)


class _Probe:
    def gpu_ids(self) -> list[str]:
        import ray

        return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name))


# --- Ray itself ---


class LocalRay:
    """The processes of a Ray that this process starts: which of them died, and the end of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._cleaner: Cleaner | None = None

    def clean_up_if_killed(self) -> None:
        """Start the process that ends Ray if this one cannot."""
        self._cleaner = self._cleaner or Cleaner(MARK, self.folder, AGAIN)

    def has_started(self) -> None:
        if self._cleaner:
            self._cleaner.send(STARTED)

    def close(self) -> None:
        """End whatever is left, and remove the folder."""
        self.kill()
        # A process of Ray may still write a line.
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._cleaner:
            self._cleaner.close()
            self._cleaner = None

    def death(self) -> str:
        """Return which of Ray's own processes died, and how; "" if all are alive."""
        for name, process in self.started:
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"Ray's process {name} died ({how})"
        return ""

    def kill(self) -> None:
        """End whatever is left: agents outlive Ray by up to a minute, workers a dead raylet."""
        if self._cleaner:
            self._cleaner.send(FAILED)  # the dead are no news
        kill_marked(MARK, str(self.folder))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember the processes that Ray starts, and mark them and all that they start."""
        from ray._private import services

        starts: dict[str, Any] = {
            "gcs_server": services.start_gcs_server,
            "raylet": services.start_raylet,
        }

        def recording(name: str, *args: Any, **options: Any) -> Any:
            info = starts[name](*args, **options)
            self.started.append((name, info.process))
            if self._cleaner:
                self._cleaner.send(f"{name} {info.process.pid}")
            return info

        self.started.clear()
        os.environ[MARK] = str(self.folder)
        try:
            for name in starts:
                setattr(services, f"start_{name}", partial(recording, name))
            yield
        finally:
            del os.environ[MARK]
            for name, start in starts.items():
                setattr(services, f"start_{name}", start)

    @contextmanager
    def watched(self, limit: float = math.inf) -> Iterator[None]:
        """End this process if one of Ray's died and Ray does not say so, or after the limit.

        Ray itself waits for minutes, and then ends this process with its own words and code.
        """
        over = threading.Event()
        work, given = self._watch, (over, limit)
        threading.Thread(target=work, args=given, name="watch-ray", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, limit: float) -> None:
        began = said = time.monotonic()
        while not over.wait(CHECK_START):
            now = time.monotonic()
            why = self.death()
            if not why and now - began > limit:
                why = f"a local Ray did not start within {limit:.0f} s"
            if not why:
                if limit < math.inf and now - said > STILL_STARTING:
                    said = now
                    log.info("a local Ray is still starting after %.0f s", now - began)
                continue
            if over.wait(RAY_REPORTS):
                return
            # The main thread waits inside Ray, where nothing can be raised.
            self.close()
            print(f"rather: {why} while the run started. {AGAIN}", file=sys.stderr, flush=True)
            os._exit(WorkerError.exit_code)


def connected(
    address: str | None,
    devices: int,
    folder: Path,
    seconds: float = 8.0,
    local: LocalRay | None = None,
) -> tuple[Any, bool]:
    """Return Ray, and whether this call connected to it."""
    if address not in (None, "auto"):
        _refuse_silence(address, seconds)
    # Leave CUDA_VISIBLE_DEVICES to us.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "actor_train.device_mapping: several devices need Ray. Install it with "
            "pip install 'rather[ray]', or start the run with torchrun, which needs no extra."
        ) from error
    if ray.is_initialized():
        return ray, False
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        log.info("connecting to the Ray cluster at %s", address)
        try:
            with _own_signals():
                ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray.address: no Ray cluster answers at {address}: {sentence(error)}. If it "
                "was started with a token, set RAY_AUTH_MODE=token here as well."
            ) from error
        return ray, True
    if problem := shortage_of_shared_memory():
        raise ConfigError(problem)
    os.environ.setdefault(LOOPBACK, "0")
    _use_token(folder)
    _read_environment_again()
    options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "num_cpus": 1}
    options["resources"] = {SLOT: float(devices)}
    # Else this process is accepted only once a worker that nobody has asked for has started; on a
    # busy machine that worker misses a deadline, and this process waits for ever.
    options["_system_config"] = {"prestart_worker_first_driver": False}
    # Ray lets every user change what is in its own folder in /tmp.
    options["_temp_dir"] = str(folder / "ray")
    if local:
        local.clean_up_if_killed()
    local, began = local or LocalRay(folder), time.monotonic()
    attempts = len(PAUSES) + 1
    for attempt, pause in enumerate((*PAUSES, None), 1):
        text = "starting a local Ray for %d devices (attempt %d of %d)"
        log.info(text, devices, attempt, attempts)
        left = LONGEST_START - (time.monotonic() - began)
        try:
            with _own_signals(), known_ports() as port, local.recorded(), local.watched(left):
                ray.init(address="local", _metrics_export_port=port, **options)
            break
        except Exception as error:  # Ray raises the base class if its own processes do not start
            death = local.death()
            ray.shutdown()
            local.kill()
            causes = (sentence(error), death and f"{death}.", _last_of_raylet(folder / "ray"))
            why = " ".join(filter(None, causes))
            if pause is None or time.monotonic() - began + pause > LONGEST_START:
                kept = private_folder()
                with suppress(OSError):
                    shutil.move(folder / "ray", kept)
                raise WorkerError(
                    f"a local Ray did not start in {attempt} attempts: {why} Its logs are "
                    f"in {kept}/ray/session_*/logs. Run again when the machine is less busy, or "
                    f"without Ray: torchrun --nproc-per-node {devices} -m rather train ..."
                ) from error
            log.warning("a local Ray did not start (%s); trying again in %.0f s", why, pause)
            time.sleep(pause)
    return ray, True


@contextmanager
def known_ports() -> Iterator[int]:
    """Give Ray's agents ports that are known before they start; yield that of its metrics.

    Ray's own process waits 15 s for an agent to write down its port, and then gives up; on a busy
    machine the agent takes longer to be imported. `ray.init` has an argument for one of the ports
    only, and for that of the dashboard's agent it waits in any case (ray-project/ray#65983).
    """
    from ray import _raylet
    from ray._private import parameter, services

    made, start, ports = parameter.RayParams, services.start_raylet, dict[str, Any]()
    with ExitStack() as opened:
        for name in (*AGENT_PORTS, "metrics"):
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports[name] = server.getsockname()[1]

    def start_raylet(*args: Any, **options: Any) -> Any:
        given = inspect.signature(start).bind(*args, **options).arguments
        compiled: Any = _raylet
        place = given["session_dir"], given["node_id"], compiled.DASHBOARD_AGENT_LISTEN_PORT_NAME
        compiled.persist_port(*place, given["dashboard_agent_listen_port"])
        return start(*args, **options)

    metrics = ports.pop("metrics")
    parameter.RayParams = partial(made, **ports)  # type: ignore[misc, assignment]
    services.start_raylet = start_raylet
    try:
        yield metrics
    finally:
        parameter.RayParams, services.start_raylet = made, start  # type: ignore[misc]


def _last_of_raylet(folder: Path) -> str:
    """Return the error that Ray's own process logged last, which Ray's exception leaves out."""
    with suppress(OSError, ValueError):
        file = folder / "session_latest" / "logs" / "raylet.out"
        lines = read_bytes(file).decode("utf-8", "replace").splitlines()
        if found := [line for line in lines if re.search(r" [CEF] \d+ \d+\] \(raylet\) ", line)]:
            text = found[-1].partition("(raylet) ")[2].rpartition("Check failed: ")[2]
            return f"Its raylet: {text[:300]}."
    return ""


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray handles SIGTERM itself, and would end a run without saving it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _host_and_port(server: str) -> tuple[str, int]:
    """Return the parts of host:port; an empty host or the port -1 if it is something else."""
    host, _, port = server.removeprefix("ray://").rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else -1


def _refuse_silence(address: str, seconds: float) -> None:
    """Ray itself would try for minutes. The first node of a cluster may still be starting."""
    host, port = _host_and_port(address)
    if not host or port < 0:
        raise ConfigError(
            f"ray.address: '{address}' is not host:port, such as 10.0.0.5:6379, or auto"
        )
    deadline = time.monotonic() + seconds
    while error := connection_problem(host, port, max(0.1, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"ray.address: nothing answers at {address} within {seconds:.0f} s "
                f"(timeouts.connect): {error}"
            )
        time.sleep(0.2)


def shortage_of_shared_memory() -> str | None:
    """Without enough of it Ray would quietly use a slow disk. Containers often have 64 MiB."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else OBJECT_STORE
    if free >= OBJECT_STORE:
        return None
    return (
        f"shared memory: {SHARED_MEMORY} has {free >> 20} MiB free, and a local Ray needs "
        f"{OBJECT_STORE >> 20}; start the container with --shm-size=1g"
    )


def _use_token(folder: Path) -> None:
    """Set a secret for this process and its children; Ray's own file would be readable by all."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token = folder / TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))


def _read_environment_again() -> None:
    """Ray reads the environment when it is imported, which a script may have done before."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # it is compiled

    ray_constants.ENABLE_RAY_CLUSTER = os.environ[LOOPBACK].lower() in ("1", "true")
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def last_line(error: BaseException) -> str:
    """Return the line of Ray's account that holds the exception of a worker."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
