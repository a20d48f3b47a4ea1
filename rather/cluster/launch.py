"""Where the roles of a config run: in this process, in processes that torchrun started, or on
Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.health import PHASES
from rather.cluster.local import device_kind, local_cluster
from rather.cluster.preflight import Ledger, Room
from rather.cluster.ranks import folder_next_to
from rather.cluster.role import Role
from rather.cluster.spmd import (
    SpmdCluster,
    broadcast,
    gather,
    join_ranks,
    max_over_ranks,
    started_by_torchrun,
)
from rather.cluster.supervision import COMPUTING, Supervision, Watchdog
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.errors import ConfigError
from rather.model.sizes import division_problems

if TYPE_CHECKING:
    from rather.cluster.resources import ResourceManager

log = logging.getLogger(__name__)


@dataclass
class Roles:
    """Policy and reference, wherever they are. `close` leaves nothing behind.

    Under torchrun every process is a driver: the main one decides and writes, and broadcasts to the
    others.
    """

    actor_train: Role
    reference: Role | None
    kind: str  # of the devices: cpu or cuda
    here: bool = True  # in this process, whose device the driver may use
    rank: int = 0  # of this driver
    drivers: int = 1
    gpu_memory: int = 0  # bytes of the GPU of a worker on Ray
    runs_ahead: bool = False  # the reference has devices of its own
    closing: ExitStack = field(default_factory=ExitStack)
    restart: Callable[[], Roles] | None = None  # makes the same roles in new processes, on Ray
    watchdog: Watchdog | None = None  # of this process

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the main driver's value; each driver calls this in the same order."""
        with self._waiting("broadcast"):
            return broadcast(value) if self.drivers > 1 else value

    def max_over_drivers(self, number: int) -> int:
        with self._waiting("max_over_drivers"):
            return max_over_ranks(number, self.kind) if self.drivers > 1 else number

    def _waiting(self, call: str) -> AbstractContextManager[None]:
        """Limit the wait for what the main driver does alone, such as preparing data or searching a
        cache."""
        return self.watchdog.during(call, "save") if self.watchdog else nullcontext()

    def watch(self) -> None:
        """End this process if one of its calls misses its deadline: for commands."""
        if self.watchdog:
            self.watchdog.start()

    @contextmanager
    def folder_beside(self, folder: Path) -> Iterator[Path]:
        """Make an empty folder for what ranks write together, removed when all are done."""
        with folder_next_to(folder) if self.is_main else nullcontext() as made:
            yield Path(self.broadcast(made))
            self.max_over_drivers(0)

    def move_reference(self, share: float, run_dir: Path) -> None:
        """TR-DPO: move the reference by `share` of the way to the policy."""
        policy, reference = self.actor_train, self.reference
        assert reference is not None
        if isinstance(policy, ActorWorker) and isinstance(reference, ActorWorker):
            reference.mix_weights(policy.weights(), share)
            return
        with self.folder_beside(run_dir / "reference") as folder:
            policy.write_weights(folder, "reference")
            reference.mix_weights(folder, share)

    def close(self) -> None:
        self.closing.close()


def needs_ray(config: DPOConfig, *, with_reference: bool) -> bool:
    """Return whether a run uses more than one device, or names a cluster."""
    actor, reference = mappings(config)
    several = len(actor) > 1 or (with_reference and reference != actor)
    return several or config.num_nodes > 1 or config.ray.address is not None


def mappings(config: DPOConfig) -> tuple[list[int], list[int]]:
    return config.actor_train.device_mapping or [0], config.reference.device_mapping or [0]


def launch(
    config: DPOConfig, *, with_reference: bool, supervision: Supervision | None = None
) -> Roles:
    """Start the roles of a run, without their models. Supervised, they may be replaced."""
    actor, reference = config.actor_train, config.reference
    sections = {"actor_train": actor}
    same = (reference.strategy_args, reference.model_path) == (
        actor.strategy_args,
        actor.model_path,
    )
    if with_reference and not same:
        sections["reference"] = reference  # type: ignore[assignment]
    problems = [each for name, role in sections.items() for each in division_problems(name, role)]
    if problems:
        raise ConfigError(problems)
    if started_by_torchrun():
        roles = _under_torchrun(config, with_reference)
    elif needs_ray(config, with_reference=with_reference):
        return _on_ray(config, with_reference, supervision)
    else:
        held = local_cluster("reference", config) if with_reference else None
        policy = local_cluster("actor_train", config)
        policy.set_environment()
        if held:
            held.neighbour = policy
            held.set_environment()
        roles = Roles(policy, held, device_kind(config.platform))
    return _with_watchdog(roles, config, supervision)


def _with_watchdog(roles: Roles, config: DPOConfig, supervision: Supervision | None) -> Roles:
    """In one process only the steps are watched: loading and saving take what disk and network
    take."""
    watchdog = Watchdog(config.timeouts, config.log_dir, roles.drivers, supervision)
    for role in filter(None, (roles.actor_train, roles.reference)):
        watchdog.watch(role, PHASES if roles.drivers > 1 else COMPUTING)
    roles.closing.callback(watchdog.close)
    roles.watchdog = watchdog
    return roles


def _under_torchrun(config: DPOConfig, with_reference: bool) -> Roles:
    actor, reference = mappings(config)
    if with_reference and actor != reference:
        raise ConfigError(
            f"reference.device_mapping is {reference}, actor_train.device_mapping {actor}: under "
            "torchrun each process holds both roles. Leave reference.device_mapping out, or start "
            "without torchrun: Ray places them as configured."
        )
    closing = ExitStack()
    member = join_ranks(config, len(actor), closing)
    kind = "cpu" if member.device == "cpu" else "cuda"
    memory = Ledger(), gather(Room.here(member.rank, kind))
    held = SpmdCluster("reference", config, member, *memory) if with_reference else None
    policy = SpmdCluster("actor_train", config, member, *memory)
    if held:
        held.worker.neighbour = policy.worker
    if member.rank == 0:
        log.info("actor_train: %s", policy.layout.describe())
    return Roles(policy, held, kind, rank=member.rank, drivers=member.world, closing=closing)


def _on_ray(config: DPOConfig, with_reference: bool, supervision: Supervision | None) -> Roles:
    from rather.cluster.resources import ResourceManager

    actor, reference = mappings(config)
    used = [*actor, *(reference if with_reference else [])]
    if config.num_nodes > 1 and config.ray.address is None:
        raise ConfigError(
            f"num_nodes: {config.num_nodes} nodes need a Ray cluster; name it: --address, or "
            "ray.address"
        )
    if config.ray.address is None:
        device_kind(config.platform)  # refuses what this machine lacks before anything starts
    manager = ResourceManager(
        config.num_nodes,
        config.num_gpus_per_node or max(used) + 1,
        address=config.ray.address,
        platform=config.platform,
        timeouts=config.timeouts,
    )
    try:
        return _clusters(config, manager, with_reference, supervision)
    except BaseException:
        manager.close()
        raise


def _clusters(
    config: DPOConfig,
    manager: ResourceManager,
    with_reference: bool,
    supervision: Supervision | None,
) -> Roles:
    """Start the roles on a manager that has no processes yet."""
    from rather.cluster.cluster import Cluster, FrozenReference

    actor, reference = mappings(config)
    ahead = with_reference and not set(actor) & set(reference)
    stays = ahead and not config.sync_ref_model

    def start(cls: type[Cluster], name: str) -> Cluster:
        section = getattr(config, name)
        return cls(name, section.worker_cls, manager, section, pipeline_config=config)

    policy, held = start(Cluster, "actor_train"), None
    if with_reference:
        held = start(FrozenReference if stays else Cluster, "reference")
        held.supervision = supervision
        policy.takes_turns = held.takes_turns = not ahead and actor != reference
        how = "on its own devices, one step ahead" if ahead else "on the policy's devices, in turn"
        log.info("reference: %s", how)

    def restart() -> Roles:
        manager.renew()
        return _clusters(config, manager, with_reference, supervision)

    roles = Roles(policy, held, manager.kind, here=False, runs_ahead=ahead, restart=restart)
    roles.gpu_memory = policy.rooms[0].device
    roles.closing.callback(manager.close)
    return roles
