"""ResourceManager: nodes and devices -> processes, on a local Ray of its own or on an existing
cluster.

Device d is number d % num_gpus_per_node of node d // num_gpus_per_node. What is requested is
compared with what the cluster has before anything is placed: Ray itself would wait for ever.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.cluster.health import ANSWER, StackSnapshot
from rather.cluster.host import Host, Process, all_gone
from rather.cluster.preflight import Ledger, Room
from rather.config import plugins
from rather.config.schema import Timeouts
from rather.errors import ConfigError, RayGone, WorkerError

log = logging.getLogger(__name__)

SLOT = "rather_slot"  # of a CPU worker. Not a CPU: eight workers on two cores would wait for ever
SHARE = 0.01  # of a device, for a process: the whole device is reserved by the placement group
OBJECT_STORE = 256 << 20  # bytes of a local Ray: token ids and log-probs pass through it
STARTS = 2  # attempts to start a local Ray: on a busy machine its processes miss their deadlines
TOKEN = "token"  # the file with the secret of a local Ray
SHARED_MEMORY = Path("/dev/shm")  # only its free space is looked at  # nosec B108
SNAPSHOTS = "snapshots"  # the threads in which processes answer while their work stands still
ENDS = 1.0  # seconds in which a process that can do so ends
RAY_KILLS = 6.0  # seconds after which Ray has ended a process that does not end by itself
RAY_CHECKS, RAY_WAITS = 2.0, 12.0  # seconds without its server. After 60 Ray would end this process
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" binds every port to loopback, also on Linux
RESUME = "Run the same command again to resume from the last checkpoint."


@dataclass(frozen=True)
class Seat:
    """A process on its device."""

    handle: Any
    process: Process
    address: str
    device: int
    room: Room

    def __str__(self) -> str:
        return f"device {self.device} on {self.process.machine}"


def name_of(role: str, rank: int, seats: Sequence[Seat]) -> str:
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
        self.devices, self.timeouts = num_nodes * num_gpus_per_node, timeouts or Timeouts()
        self._cluster = f"the Ray cluster at {address}" if address else "this machine"
        self._seats: dict[tuple[int, ...], list[Seat]] = {}
        self.named: dict[str, Sequence[Seat]] = {}  # by role
        self.ledger = Ledger()
        self.is_stopped = self._closed = False
        self._placed: Any = None
        self._ray: Any = None
        self._server = ""  # address of Ray's own server; unknown behind a ray:// proxy
        self._heard = time.monotonic()  # from the server
        # For the token, and the files through which processes find each other.
        self._folder = Path(tempfile.mkdtemp(prefix="rather-"))
        atexit.register(self.close)
        try:
            connect = self.timeouts.connect
            self._ray, self._owns_ray = connected(address, self.devices, self._folder, connect)
            if not (address or "").startswith("ray://"):
                self._server = str(self._ray.get_runtime_context().gcs_address)
            gpus = sum(node.get("GPU", 0) for node in self._nodes())
            if platform == "cuda" and not gpus:
                raise ConfigError(f"platform: cuda, and {self._cluster} has no GPU")
            self.kind = "cuda" if gpus and platform != "cpu" else "cpu"
            self._resource = "GPU" if self.kind == "cuda" else SLOT
            self._reserve()
        except BaseException:
            self.close()
            raise

    # --- the cluster ---

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _reserve(self) -> None:
        """Reserve one bundle of devices on each node, once the cluster has them. Nodes may still be
        arriving."""
        from ray.util.placement_group import placement_group

        deadline = time.monotonic() + self.timeouts.connect
        while problem := self._missing():
            if time.monotonic() > deadline:
                raise ConfigError(problem)
            time.sleep(0.2)
        bundles = [{self._resource: self.num_gpus_per_node}] * self.num_nodes
        strategy = "STRICT_SPREAD" if self.num_nodes > 1 else "STRICT_PACK"
        # Kept at once: a request that is abandoned would be granted as soon as the devices are
        # free, and hold them.
        self._placed = placement_group(bundles, strategy=strategy)
        if not self._placed.wait(max(1.0, deadline - time.monotonic())):
            free = int(self._ray.available_resources().get(self._resource, 0))
            raise ConfigError(
                f"num_nodes: {self._request}, and {self._cluster} has them, but other jobs use "
                f"some: {free} are free. Wait for them, or request fewer."
            )

    @property
    def _request(self) -> str:
        unit = "GPUs" if self.kind == "cuda" else f"CPU workers ({SLOT})"
        sizes = f"num_nodes {self.num_nodes} x num_gpus_per_node {self.num_gpus_per_node}"
        return f"{sizes} = {self.devices} {unit} are requested"

    def _missing(self) -> str | None:
        """Return what the cluster lacks, with the arithmetic; None if it has enough."""
        nodes, each = self.num_nodes, self.num_gpus_per_node
        there = sorted((int(node.get(self._resource, 0)) for node in self._nodes()), reverse=True)
        enough = sum(count >= each for count in there)
        if enough >= nodes:
            return None
        advice = ""
        if self.kind == "cpu" and not any(there):
            advice = f" Start its nodes with --resources='{{\"{SLOT}\": {each}}}'."
        return (
            f"num_nodes: {self._request}; {self._cluster} has {' + '.join(map(str, there)) or '0'} "
            f"on {len(there)} node{'s' * (len(there) != 1)}, so {enough} of {nodes} nodes have "
            f"{each}: {nodes - enough} missing.{advice} Add nodes, or change num_nodes, "
            "num_gpus_per_node and device_mapping."
        )

    # --- processes ---

    def seats(self, device_mapping: Sequence[int], environment: Mapping[str, str]) -> list[Seat]:
        """Return the processes on these devices; the first call starts them and makes a process
        group."""
        mapping = tuple(device_mapping)
        if mapping not in self._seats:
            if max(mapping) >= self.devices:
                raise ConfigError(
                    f"device_mapping: device {max(mapping)} is requested, and num_nodes "
                    f"{self.num_nodes} x num_gpus_per_node {self.num_gpus_per_node} gives devices "
                    f"0 to {self.devices - 1}."
                )
            self._seats[mapping] = started = self._start(mapping, environment)
            if len(started) > 1:
                self._introduce(started)
        return self._seats[mapping]

    def _start(self, mapping: tuple[int, ...], environment: Mapping[str, str]) -> list[Seat]:
        nodes = sorted({device // self.num_gpus_per_node for device in mapping})
        ids = self._gpu_ids(nodes) if self.kind == "cuda" else {}
        own = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        handles = []
        for device in mapping:
            node, local = divmod(device, self.num_gpus_per_node)
            own["CUDA_VISIBLE_DEVICES"] = ids[node][local] if ids else ""
            given = (self.num_gpus_per_node, Process.this(), plugins.loaded())
            handles.append(self._remote(Host, node).remote({**own, **environment}, *given))
        asked = [h.describe.remote(d, self.kind) for h, d in zip(handles, mapping, strict=True)]
        found = self._all(asked, self.timeouts.start, "start a process")
        return [
            Seat(handle, process, address, device, room)
            for handle, device, (process, address, room) in zip(
                handles, mapping, found, strict=True
            )
        ]

    def _remote(self, cls: type, node: int, gpus: float = SHARE) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=node)
        devices = {"num_gpus": gpus} if self.kind == "cuda" else {"resources": {SLOT: SHARE}}
        # A restarted actor would come back without its model, silently.
        never = {"max_restarts": 0, "max_task_retries": 0}
        made = self._ray.remote(concurrency_groups={SNAPSHOTS: 1})(cls)
        return made.options(num_cpus=0, scheduling_strategy=where, **devices, **never)

    def _gpu_ids(self, nodes: Sequence[int]) -> dict[int, list[str]]:
        """Return the machine's own numbers of the reserved GPUs of each node."""
        probes = [self._remote(_Probe, node, self.num_gpus_per_node).remote() for node in nodes]
        asked = [probe.gpu_ids.remote() for probe in probes]
        found = self._all(asked, self.timeouts.connect, "list GPUs")
        for probe in probes:
            self._ray.kill(probe)
        return dict(zip(nodes, found, strict=True))

    def _introduce(self, seats: Sequence[Seat]) -> None:
        """Make a process group: through a file on one machine, through rank 0 on several."""
        if len({seat.process.machine for seat in seats}) == 1:
            store = f"file://{self._folder}/{secrets.token_hex(8)}"
        else:
            store = f"tcp://{seats[0].address}:{self._port_of(seats[0], seats[1:])}"
        # Longer than any deadline of the driver, or the echo of a failure would arrive first.
        seconds = 60 + self.timeouts.longest
        asked = [
            seat.handle.join.remote(rank, len(seats), store, seconds, self.kind)
            for rank, seat in enumerate(seats)
        ]
        for seat, result in zip(
            seats, self._all(asked, self.timeouts.start, "connect"), strict=True
        ):
            if result.failure:
                raise WorkerError(
                    f"{seat}: processes cannot reach each other: {result.failure.text}"
                )

    def _port_of(self, first: Seat, others: Sequence[Seat]) -> int:
        """Return a port of the first process that all others reach: without it they would wait in
        silence."""
        seconds = self.timeouts.connect
        [port] = self._all([first.handle.listen.remote()], seconds, "find a port")
        asked = [seat.handle.cannot_reach.remote(first.address, port, seconds) for seat in others]
        for seat, problem in zip(others, self._all(asked, 2 * seconds, "connect"), strict=True):
            if problem:
                raise WorkerError(
                    f"{seat} cannot reach {first} at {first.address}:{port} within {seconds:.0f} "
                    f"s: {problem}. Workers on several machines need open ports between them."
                )
        self._all([first.handle.close_port.remote()], seconds, "close a port")
        return int(port)

    def _all(self, asked: Sequence[Any], seconds: float, doing: str) -> list[Any]:
        from ray.exceptions import GetTimeoutError, RayError

        try:
            return list(self._ray.get(list(asked), timeout=seconds))
        except RayError as error:
            late = isinstance(error, GetTimeoutError)
            why = f"timed out after {seconds:.0f} s" if late else last_line(error)
            raise WorkerError(f"{self._cluster}: could not {doing}: {why}") from error

    # --- lost processes ---

    def snapshots(self) -> dict[str, StackSnapshot | None]:
        """Return what each rank of each role does; None for those that do not answer within a few
        seconds."""
        asked = {
            seat.handle.snapshot.options(concurrency_group=SNAPSHOTS).remote(): seat.process
            for group in self._seats.values()
            for seat in group
        }
        done = (
            self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER)[0] if asked else []
        )
        found: dict[Process, StackSnapshot] = {}
        for ref in done:
            with suppress(self._ray.exceptions.RayError):  # it has just died
                found[asked[ref]] = self._ray.get(ref)
        return {
            name_of(role, rank, seats): found.get(seat.process)
            for role, seats in self.named.items()
            for rank, seat in enumerate(seats)
        }

    def refuse_without_ray(self) -> None:
        """Report that Ray is gone, before Ray ends this process in its own words and with its own
        exit code."""
        silent = time.monotonic() - self._heard
        if silent < RAY_CHECKS:
            return
        if self._has_ray:
            self._heard = time.monotonic()
        elif silent > RAY_WAITS:
            raise RayGone(f"Ray is gone: its server at {self._server} does not answer. {RESUME}")

    @property
    def _has_ray(self) -> bool:
        return not self._server or _connection_problem(self._server, 1.0) is None

    def renew(self) -> None:
        """Make room for new processes, once the old ones are gone and hold no memory."""
        self.stop()
        self.refuse_without_ray()
        for seats in self.named.values():
            wait_elsewhere(seats)
        self._ray.util.remove_placement_group(self._placed)
        self.ledger, self.named = Ledger(), {}
        try:
            self._reserve()
        except Exception as error:  # Ray raises the base class if its raylet is gone
            raise WorkerError(
                f"lost workers cannot be replaced: {_first_line(error).rstrip('.')}. {RESUME}"
            ) from error
        self.is_stopped = False

    # --- the end ---

    def stop(self, device_mapping: Sequence[int] | None = None) -> None:
        """End the processes on these devices, or all. Those of this machine are gone when it
        returns."""
        self.is_stopped = self.is_stopped or device_mapping is None
        ending = [tuple(device_mapping)] if device_mapping is not None else list(self._seats)
        seats = [seat for mapping in ending for seat in self._seats.pop(mapping, [])]
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
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(self._folder / TOKEN):
            del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]
        shutil.rmtree(self._folder)


def wait_elsewhere(seats: Sequence[Seat]) -> None:
    """Wait until stopped processes are gone on other machines too, where nobody looks: they may
    hold a device."""
    if not all(seat.process.is_here for seat in seats):
        time.sleep(RAY_KILLS)


class _Probe:
    def gpu_ids(self) -> list[str]:
        import ray

        return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name))


def connected(
    address: str | None, devices: int, folder: Path, seconds: float = 8.0
) -> tuple[Any, bool]:
    """Return Ray, and whether this call connected to it."""
    if address not in (None, "auto"):
        _refuse_silence(address, seconds)
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # leave CUDA_VISIBLE_DEVICES to us
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
                f"ray.address: no Ray cluster answers at {address}: {_first_line(error)}"
            ) from error
        return ray, True
    if problem := shortage_of_shared_memory():
        raise ConfigError(problem)
    os.environ.setdefault(LOOPBACK, "0")
    _use_token(folder)
    _read_environment_again()
    log.info("starting a local Ray for %d devices", devices)
    options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "num_cpus": 1}
    options["resources"] = {SLOT: float(devices)}
    for left in reversed(range(STARTS)):
        try:
            with _own_signals():
                ray.init(address="local", **options)
            break
        except Exception as error:  # Ray raises the base class if its own processes do not start
            ray.shutdown()
            why = _first_line(error)
            if not left:
                logs = "its logs are in /tmp/ray/session_latest/logs"
                raise WorkerError(f"a local Ray did not start: {why} ({logs})") from error
            log.warning("a local Ray did not start (%s); trying again", why)
    return ray, True


def _connection_problem(server: str, seconds: float) -> Exception | None:
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        return error
    return None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray handles SIGTERM itself, and would end a run without saving it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _refuse_silence(address: str, seconds: float) -> None:
    """Ray itself would try for minutes. The first node of a cluster may still be starting."""
    server = address.removeprefix("ray://")
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(
            f"ray.address: '{address}' is not host:port, such as 10.0.0.5:6379, or auto"
        )
    deadline = time.monotonic() + seconds
    while error := _connection_problem(server, max(0.1, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"ray.address: nothing answers at {address} within {seconds:.0f} s "
                f"(timeouts.connect): {error}"
            )
        time.sleep(0.2)


def shortage_of_shared_memory() -> str | None:
    """Without enough of it Ray would quietly use a slow disk. Containers often have 64 MiB."""
    if (
        not SHARED_MEMORY.exists()
        or (free := shutil.disk_usage(SHARED_MEMORY).free) >= OBJECT_STORE
    ):
        return None
    return (
        f"shared memory: {SHARED_MEMORY} has {free >> 20} MiB free, and a local Ray needs "
        f"{OBJECT_STORE >> 20}; start the container with --shm-size=1g"
    )


def _use_token(folder: Path) -> None:
    """Set a secret for this process and its children: Ray's own token file would be readable by
    everybody."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: BaseException) -> str:
    """Return the line of Ray's account that holds the exception of a worker."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
