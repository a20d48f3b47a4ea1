"""ResourceManager: nodes and devices -> processes, on a local Ray of its own or on a cluster that is already there.

Device d is number d % num_gpus_per_node of node d // num_gpus_per_node. What is asked for is compared with what the
cluster has before anything is placed: Ray itself would wait for ever.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather import faults
from rather.cluster.hang import ANSWER, Rank
from rather.cluster.host import Answer, Host, Meeting, Process, all_gone
from rather.cluster.preflight import Ledger, Room
from rather.cluster.stack_snapshot import Look
from rather.config import plugins
from rather.config.schema import Timeouts
from rather.errors import ConfigError, RayGone, WorkerError

log = logging.getLogger(__name__)

SLOT = "rather_slot"  # of a CPU worker. Not a CPU: eight workers on two cores would wait for ever
SHARE = 0.01  # of a device, for a process: the whole device is reserved by the placement
OBJECT_STORE = 256 << 20  # bytes of a local Ray: token ids and log-probs pass through it
STARTS = 2  # tries of a local Ray: on a busy machine its own processes miss their deadlines
TOKEN = "token"  # a file of the folder that each connection has
SHARED_MEMORY = Path("/dev/shm")  # only its free space is looked at  # nosec B108
LOOKS = "look"  # the threads in which processes answer while their work stands still
ENDS = 1.0  # seconds in which a process that can do so ends
RAY_KILLS = (
    6.0  # seconds after which Ray has ended a process that does not end by itself, on any machine
)
RAY_LOOKS, RAY_WAITS = (
    2.0,
    12.0,
)  # seconds without a word of its server. After sixty Ray would end this process
LOOPBACK = (
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" binds every port of Ray to loopback, on Linux too
)


@dataclass(frozen=True)
class Seat:
    """A process on its device."""

    handle: Any
    process: Process
    address: str
    node: str  # Ray's id
    device: int
    room: Room

    def __str__(self) -> str:
        return f"device {self.device} on {self.process.machine}"


def where(role: str, rank: int, seats: Sequence[Seat]) -> str:
    return f"{role} rank {rank} of {len(seats)} ({seats[rank]})"


class ResourceManager:
    """Places one process on each device of a mapping; roles with equal mappings share processes."""

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
        self.address, self.timeouts = address, timeouts or Timeouts()
        self._seats: dict[tuple[int, ...], list[Seat]] = {}
        self.named: dict[str, Sequence[Seat]] = {}  # by role
        self.ledger = Ledger()
        self.is_stopped = self._closed = False
        self._server: str | None = None  # of Ray, where it is known
        self._heard = time.monotonic()  # of it
        self._folder = Path(
            tempfile.mkdtemp(prefix="rather-")
        )  # the token and the meeting places of processes
        atexit.register(self.close)
        try:
            self._ray, self._is_ours = connected(
                address, self.devices, self._folder, self.timeouts.connect
            )
            self._server = _server(self._ray, address)
            self.kind = self._kind(platform)
            self._reserve()
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> int:
        return self.num_nodes * self.num_gpus_per_node

    # --- the cluster ---

    def _kind(self, platform: str) -> str:
        gpus = sum(node["Resources"].get("GPU", 0) for node in self._nodes())
        if platform == "cuda" and not gpus:
            raise ConfigError(f"platform: cuda, and {self._name} has no GPU")
        return "cuda" if gpus and platform != "cpu" else "cpu"

    @property
    def _name(self) -> str:
        return f"the Ray cluster at {self.address}" if self.address else "this machine"

    @property
    def _resource(self) -> str:
        return "GPU" if self.kind == "cuda" else SLOT

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _reserve(self) -> None:
        """One bundle of devices on each node, once the cluster has them. Nodes may still be arriving."""
        from ray.util.placement_group import placement_group

        deadline = time.monotonic() + self.timeouts.connect
        while problem := self._missing():
            if time.monotonic() > deadline:
                raise ConfigError(problem)
            time.sleep(0.2)
        bundles = [{self._resource: self.num_gpus_per_node}] * self.num_nodes
        # Kept at once: a request that is given up would be granted as soon as the devices are free, and hold them.
        self._placed = placement_group(
            bundles, strategy="STRICT_SPREAD" if self.num_nodes > 1 else "STRICT_PACK"
        )
        if not self._placed.wait(max(1.0, deadline - time.monotonic())):
            free = int(self._ray.available_resources().get(self._resource, 0))
            raise ConfigError(
                f"num_nodes: {self._wanted}, and {self._name} has them, but other jobs use some: {free} are free. "
                "Wait for them, or ask for fewer."
            )

    @property
    def _wanted(self) -> str:
        unit = "GPUs" if self.kind == "cuda" else f"CPU workers ({SLOT})"
        sizes = f"num_nodes {self.num_nodes} x num_gpus_per_node {self.num_gpus_per_node}"
        return f"{sizes} = {self.devices} {unit} are asked for"

    def _missing(self) -> str | None:
        """The arithmetic of what the cluster lacks, or None."""
        there = sorted(
            (int(node["Resources"].get(self._resource, 0)) for node in self._nodes()), reverse=True
        )
        enough = sum(count >= self.num_gpus_per_node for count in there)
        if enough >= self.num_nodes:
            return None
        listing = " + ".join(map(str, there)) or "0"
        advice = ""
        if self.kind == "cpu" and not any(there):
            advice = (
                f" Start its nodes with --resources='{{\"{SLOT}\": {self.num_gpus_per_node}}}'."
            )
        return (
            f"num_nodes: {self._wanted}; {self._name} has {listing} on {len(there)} node{'s' * (len(there) != 1)}, "
            f"so {enough} of {self.num_nodes} nodes have {self.num_gpus_per_node}: {self.num_nodes - enough} missing."
            f"{advice} Add nodes, or change num_nodes, num_gpus_per_node and device_mapping."
        )

    # --- processes ---

    def seats(self, device_mapping: Sequence[int], environment: Mapping[str, str]) -> list[Seat]:
        """The processes on these devices; started and introduced to each other when first asked for."""
        mapping = tuple(device_mapping)
        if mapping not in self._seats:
            if max(mapping) >= self.devices:
                raise ConfigError(
                    f"device_mapping: device {max(mapping)} is asked for, and num_nodes {self.num_nodes} x "
                    f"num_gpus_per_node {self.num_gpus_per_node} gives devices 0 to {self.devices - 1}."
                )
            started = self._start(mapping, environment)
            self._seats[mapping] = started
            if len(started) > 1:
                self._introduce(started)
        return self._seats[mapping]

    def _start(self, mapping: tuple[int, ...], environment: Mapping[str, str]) -> list[Seat]:
        ids = (
            self._gpu_ids({device // self.num_gpus_per_node for device in mapping})
            if self.kind == "cuda"
            else {}
        )
        own = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        own[faults.VARIABLE] = os.environ.get(
            faults.VARIABLE, ""
        )  # Ray itself may have begun with another one
        handles = []
        for device in mapping:
            node, local = divmod(device, self.num_gpus_per_node)
            own["CUDA_VISIBLE_DEVICES"] = ids[node][local] if ids else ""
            given = (
                {**own, **environment},
                self.num_gpus_per_node,
                Process.this(),
                plugins.loaded(),
            )
            handles.append(self._remote(Host, node).remote(*given))
        answers = self._all(
            [handle.process.remote() for handle in handles], self.timeouts.start, "start a process"
        )
        nodes = self._all(
            [handle.node.remote() for handle in handles], self.timeouts.start, "start a process"
        )
        asked = [
            handle.room.remote(device, self.kind)
            for handle, device in zip(handles, mapping, strict=True)
        ]
        rooms = self._all(asked, self.timeouts.start, "look at its memory")
        return [
            Seat(handle, process, address, node, device, room)
            for handle, (process, address), node, device, room in zip(
                handles, answers, nodes, mapping, rooms, strict=True
            )
        ]

    def _remote(self, cls: type, node: int, gpus: float = SHARE) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=node)
        devices = {"num_gpus": gpus} if self.kind == "cuda" else {"resources": {SLOT: SHARE}}
        # A restarted actor would come back without its model and without a word.
        never = {"max_restarts": 0, "max_task_retries": 0}
        made = self._ray.remote(concurrency_groups={LOOKS: 1})(_with_node(cls))
        return made.options(num_cpus=0, scheduling_strategy=where, **devices, **never)

    def _gpu_ids(self, nodes: set[int]) -> dict[int, list[str]]:
        """The machine's own numbers of the reserved GPUs of each node."""
        probes = {
            node: self._remote(_Probe, node, gpus=self.num_gpus_per_node).remote()
            for node in sorted(nodes)
        }
        found = self._all(
            [probe.gpu_ids.remote() for probe in probes.values()],
            self.timeouts.connect,
            "list GPUs",
        )
        for probe in probes.values():
            self._ray.kill(probe)
        return dict(zip(probes, found, strict=True))

    def _introduce(self, seats: Sequence[Seat]) -> None:
        """A process group of these processes: through a file on one machine, through rank 0 on several."""
        first = seats[0]
        if len({seat.process.machine for seat in seats}) == 1:
            store = f"file://{self._folder}/{secrets.token_hex(8)}"
        else:
            store = f"tcp://{first.address}:{self._port_of(first, seats[1:])}"
        meetings = [
            Meeting(rank, len(seats), store, 60 + self.timeouts.longest)
            for rank in range(len(seats))
        ]
        asked = [
            seat.handle.join.remote(each, self.kind)
            for seat, each in zip(seats, meetings, strict=True)
        ]
        for seat, answer in zip(
            seats, self._all(asked, self.timeouts.start, "meet each other"), strict=True
        ):
            assert isinstance(answer, Answer)
            if answer.failure:
                raise WorkerError(
                    f"{seat}: processes cannot reach each other: {answer.failure.text}"
                )

    def _port_of(self, first: Seat, others: Sequence[Seat]) -> int:
        """A port of the first process that all others reach: without it they would wait for it in silence."""
        seconds = self.timeouts.connect
        [port] = self._all([first.handle.listen.remote()], seconds, "find a port")
        asked = [seat.handle.cannot_reach.remote(first.address, port, seconds) for seat in others]
        for seat, problem in zip(
            others, self._all(asked, 2 * seconds, "reach each other"), strict=True
        ):
            if problem:
                raise WorkerError(
                    f"{seat} cannot reach {first} at {first.address}:{port} within {seconds:.0f} s: {problem}. Workers "
                    "on several machines need open ports between them."
                )
        self._all([first.handle.close_door.remote()], seconds, "close a port")
        return int(port)

    def _all(self, asked: Sequence[Any], seconds: float, doing: str) -> list[Any]:
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return list(self._ray.get(list(asked), timeout=seconds))
        except GetTimeoutError:
            raise WorkerError(f"{self._name}: did not {doing} within {seconds:.0f} s.") from None
        except RayError as error:
            raise WorkerError(f"{self._name}: could not {doing}: {last_line(error)}") from error

    # --- processes that are lost ---

    def looks(self) -> dict[tuple[str, int], Rank]:
        """What each rank of each role does; those that cannot say it are given a few seconds."""
        seats = [seat for group in self._seats.values() for seat in group]
        asked = {
            seat.handle.look.options(concurrency_group=LOOKS).remote(): seat.process
            for seat in seats
        }
        done = (
            self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER)[0] if asked else []
        )
        found = {asked[ref]: self._look(ref) for ref in done}
        return {
            (role, rank): Rank(where(role, rank, seats), found.get(seat.process))
            for role, seats in self.named.items()
            for rank, seat in enumerate(seats)
        }

    def _look(self, ref: Any) -> Look | None:
        try:
            found: Look = self._ray.get(ref)
        except self._ray.exceptions.RayError:  # it has just died
            return None
        return found

    def refuse_without_ray(self) -> None:
        """Says that Ray is gone, which would end this process in its own words and with a code of its own."""
        if time.monotonic() - self._heard < RAY_LOOKS:
            return
        if self._has_ray:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > RAY_WAITS:
            raise RayGone(
                f"Ray is gone: its server at {self._server} does not answer. The same command goes on from the last "
                "checkpoint."
            )

    @property
    def _has_ray(self) -> bool:
        return self._server is None or _answers(self._server)

    def renew(self) -> None:
        """Room for new processes, once the old ones are gone and hold no memory."""
        self.stop()
        self.refuse_without_ray()
        for seats in self.named.values():
            wait_elsewhere(seats)
        self._ray.util.remove_placement_group(self._placed)
        self.ledger, self.named = Ledger(), {}
        try:
            self._reserve()
        except Exception as error:  # Ray raises the base class where its raylet is gone
            advice = "The same command goes on from the last checkpoint."
            raise WorkerError(
                f"lost workers cannot be replaced: {_first_line(error).rstrip('.')}. {advice}"
            ) from error
        self.is_stopped = False

    # --- the end ---

    def stop(self, device_mapping: Sequence[int] | None = None) -> None:
        """Ends the processes on these devices, or all, at once. Those of this machine are gone when it returns."""
        if device_mapping is None:
            self.is_stopped = True
            seats, self._seats = [seat for group in self._seats.values() for seat in group], {}
        else:
            seats = self._seats.pop(tuple(device_mapping), [])
        if self._has_ray:
            for seat in seats:
                self._ray.kill(seat.handle)
        here = [seat.process for seat in seats if seat.process.is_here]
        if not all_gone(here, ENDS):  # Ray would wait for five seconds
            for process in here:
                process.kill()
            all_gone(here, RAY_KILLS)

    def close(self) -> None:
        """Leaves nothing behind: no process, no reservation, no file."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if (ray := getattr(self, "_ray", None)) and ray.is_initialized():
            self.stop()
            if self._has_ray:
                self._take_leave(ray)
            else:  # to take leave of it would end this process
                atexit.unregister(ray.shutdown)
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(
            self._folder / TOKEN
        ):  # the next Ray gets its own
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)
        self._folder.rmdir()

    def _take_leave(self, ray: Any) -> None:
        if placed := getattr(self, "_placed", None):
            ray.util.remove_placement_group(placed)
        if self._is_ours:
            ray.shutdown()


def wait_elsewhere(seats: Sequence[Seat]) -> None:
    """Until stopped processes are gone on other machines too, where nobody looks: they may hold a device."""
    if not all(seat.process.is_here for seat in seats):
        time.sleep(RAY_KILLS)


class _Probe:
    def gpu_ids(self) -> list[str]:
        import ray

        return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name))


def _with_node(cls: type) -> type:
    """The same class, which also knows its Ray node."""

    def node(_self: Any) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    return type(cls.__name__, (cls,), {"node": node})


def connected(
    address: str | None, devices: int, folder: Path, seconds: float = 8.0
) -> tuple[Any, bool]:
    """Ray, and whether the connection is ours to end."""
    if address not in (None, "auto"):
        _refuse_silence(address, seconds)
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # CUDA_VISIBLE_DEVICES is ours to set
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "actor_train.device_mapping: several devices need Ray. Install it with "
            "pip install 'rather[ray]', or start the run with torchrun, which needs no extra."
        ) from error
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        log.info("connecting to the Ray cluster at %s", address)
        try:
            with _own_signals():
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray.address: no Ray cluster answers at {address}: {_first_line(error)}"
            ) from error
        return ray, True
    if problem := shortage_of_shared_memory():
        raise ConfigError(problem)
    os.environ.setdefault(LOOPBACK, "0")
    _use_token(folder)
    _read_environment_again()
    log.info("starting a local Ray for %d devices", devices)
    quiet |= {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "resources": {SLOT: float(devices)},
    }
    for left in reversed(range(STARTS)):
        try:
            with _own_signals():
                ray.init(address="local", num_cpus=1, **quiet)
            break
        except Exception as error:  # Ray raises the base class where its own processes do not start
            ray.shutdown()
            if not left:
                logs = "its logs are in /tmp/ray/session_latest/logs"
                raise WorkerError(
                    f"a local Ray did not start: {_first_line(error)} ({logs})"
                ) from error
            log.warning("a local Ray did not start (%s); once more", _first_line(error))
    return ray, True


def _server(ray: Any, address: str | None) -> str | None:
    """Where Ray's own server listens; unknown to those who reach it through another."""
    if address and address.startswith("ray://"):
        return None
    return str(ray.get_runtime_context().gcs_address)


def _answers(server: str) -> bool:
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and would end a run without saving it."""
    before, is_main = (
        signal.getsignal(signal.SIGTERM),
        threading.current_thread() is threading.main_thread(),
    )
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _refuse_silence(address: str, seconds: float) -> None:
    """Ray itself would try for minutes. The first node of a cluster may still be starting."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(
            f"ray.address: '{address}' is not host:port, such as 10.0.0.5:6379, or auto"
        )
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, left)).close()
            return
        except (OSError, OverflowError) as error:
            if left < 0:
                text = f"ray.address: nothing answers at {address} within {seconds:.0f} s (timeouts.connect): {error}"
                raise ConfigError(text) from error
            time.sleep(0.2)


def shortage_of_shared_memory() -> str | None:
    """Without enough of it Ray would quietly use a slow disk. Containers often have 64 MiB."""
    if not SHARED_MEMORY.exists():
        return None
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= OBJECT_STORE:
        return None
    return (
        f"shared memory: {SHARED_MEMORY} has {free >> 20} MiB free, and a local Ray needs {OBJECT_STORE >> 20}; "
        "start the container with --shm-size=1g"
    )


def _use_token(folder: Path) -> None:
    """Ray's own token file would be readable by everybody. Only for this process and its children."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token = folder / TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))


def _read_environment_again() -> None:
    """Ray reads it when it is imported, and a script may have done so before us."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # it is compiled

    ray_constants.ENABLE_RAY_CLUSTER = os.environ[LOOPBACK].lower() in ("1", "true")
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Where an exception of a worker stands in Ray's account of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
