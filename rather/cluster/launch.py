"""Where the roles of a config run: in this process, in processes that torchrun started, or on Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.local import device_kind, local_cluster
from rather.cluster.role import RankInfo, Role
from rather.cluster.shares import beside
from rather.cluster.spmd import (
    Memory,
    SpmdCluster,
    joined_ranks,
    largest,
    said_by_first,
    started_by_torchrun,
)
from rather.cluster.supervision import Supervision
from rather.cluster.watchdog import PHASES, STEPS, Watchdog
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.errors import ConfigError
from rather.model.divisible import division_problems

if TYPE_CHECKING:
    from rather.cluster.cluster import Cluster
    from rather.cluster.resources import ResourceManager

log = logging.getLogger(__name__)


@dataclass
class Roles:
    """Policy and reference, wherever they are. `close` leaves nothing behind.

    Under torchrun every process is a driver: the first one leads, decides and writes, and the others are told.
    """

    actor_train: Role
    reference: Role | None
    kind: str  # of the devices: cpu or cuda
    here: bool  # in this process, whose device the driver may use
    rank: int = 0  # of this driver
    drivers: int = 1
    gpu_memory: int = 0  # bytes of the GPU of a worker on Ray
    runs_ahead: bool = False  # the reference has devices of its own
    closing: ExitStack = field(default_factory=ExitStack)
    restart: Callable[[], Roles] | None = (
        None  # the same roles in new processes, where those can be replaced
    )
    watchdog: Watchdog | None = None  # of this process, where its own calls may stand still

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """What the leading driver says here; each driver gets here in the same order."""
        with self._waiting("broadcast"):
            return said_by_first(value) if self.drivers > 1 else value

    def max_over_drivers(self, number: int) -> int:
        """The largest number that any driver says."""
        with self._waiting("max_over_drivers"):
            return largest(number, self.kind) if self.drivers > 1 else number

    def _waiting(self, call: str) -> AbstractContextManager[None]:
        """For what the leading driver does alone, such as preparing data or looking through a cache."""
        return self.watchdog.during(call, "save") if self.watchdog else nullcontext()

    def watch(self) -> None:
        """From now on calls in this process that do not end before their deadline end the process: for commands."""
        if self.watchdog:
            self.watchdog.start()

    @contextmanager
    def folder_beside(self, folder: Path) -> Iterator[Path]:
        """An empty folder for what ranks write together, gone when all are done."""
        with beside(folder.absolute()) if self.is_main else nullcontext() as made:
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
    """More than one device, or a cluster by name."""
    actor, reference = mappings(config)
    several = len(actor) > 1 or (with_reference and reference != actor)
    return several or config.num_nodes > 1 or config.ray.address is not None


def mappings(config: DPOConfig) -> tuple[list[int], list[int]]:
    return config.actor_train.device_mapping or [0], config.reference.device_mapping or [0]


def launch(
    config: DPOConfig, *, with_reference: bool, supervision: Supervision | None = None
) -> Roles:
    """The roles of a run, started but without their models. Supervised, they may be replaced."""
    actor, reference = config.actor_train, config.reference
    problems = list(division_problems("actor_train", actor))
    if with_reference and (reference.strategy_args, reference.model_path) != (
        actor.strategy_args,
        actor.model_path,
    ):
        problems += division_problems("reference", reference)
    if problems:
        raise ConfigError(problems)
    if started_by_torchrun():
        return _under_torchrun(config, with_reference, supervision)
    if needs_ray(config, with_reference=with_reference):
        return _on_ray(config, with_reference, supervision)
    kind = device_kind(config.platform)
    held = local_cluster("reference", config) if with_reference else None
    policy, closing = local_cluster("actor_train", config), ExitStack()
    policy.set_environment()
    if held:
        held.neighbour = policy
        held.set_environment()
    watchdog = _watchdog(config, RankInfo(), supervision, (policy, held), closing)
    return Roles(policy, held, kind, here=True, closing=closing, watchdog=watchdog)


def _watchdog(
    config: DPOConfig,
    member: RankInfo,
    supervision: Supervision | None,
    roles: Sequence[Role | None],
    closing: ExitStack,
) -> Watchdog:
    """Of one process only the steps are watched: loading and saving take what disk and network take."""
    watchdog = Watchdog(config, member, supervision)
    for role in filter(None, roles):
        watchdog.watch(role, PHASES if member.world > 1 else STEPS)
    closing.callback(watchdog.close)
    return watchdog


def _under_torchrun(
    config: DPOConfig, with_reference: bool, supervision: Supervision | None
) -> Roles:
    actor, reference = mappings(config)
    if with_reference and actor != reference:
        raise ConfigError(
            f"reference.device_mapping is {reference}, actor_train.device_mapping {actor}: under torchrun each process "
            "holds both roles. Leave reference.device_mapping out, or start without torchrun: Ray places them as told."
        )
    closing = ExitStack()
    member = joined_ranks(config, len(actor), closing)
    memory = Memory(member)
    held = SpmdCluster("reference", config, member, memory) if with_reference else None
    policy = SpmdCluster("actor_train", config, member, memory)
    if held:
        held.worker.neighbour = policy.worker
    if member.rank == 0:
        log.info("actor_train: %s", policy.layout.told())
    watchdog = _watchdog(config, member, supervision, (policy, held), closing)
    roles = Roles(
        policy,
        held,
        memory.kind,
        here=True,
        rank=member.rank,
        drivers=member.world,
        closing=closing,
    )
    roles.watchdog = watchdog
    return roles


def _on_ray(config: DPOConfig, with_reference: bool, supervision: Supervision | None) -> Roles:
    from rather.cluster.resources import ResourceManager

    actor, reference = mappings(config)
    used = [*actor, *(reference if with_reference else [])]
    if config.num_nodes > 1 and config.ray.address is None:
        raise ConfigError(
            f"num_nodes: {config.num_nodes} nodes need a Ray cluster; name it: --address, or ray.address"
        )
    if config.ray.address is None:
        device_kind(
            config.platform
        )  # no need to start anything for devices that this machine has not
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
    """The roles on a manager that has no processes yet."""
    from rather.cluster.cluster import Cluster, FrozenReference

    actor, reference = mappings(config)
    ahead = with_reference and not set(actor) & set(reference)
    stays = ahead and not config.sync_ref_model
    policy = Cluster(
        "actor_train",
        config.actor_train.worker_cls,
        manager,
        config.actor_train,
        pipeline_config=config,
    )
    held: Cluster | None = None
    if with_reference:
        cls = FrozenReference if stays else Cluster
        held = cls(
            "reference",
            config.reference.worker_cls,
            manager,
            config.reference,
            pipeline_config=config,
        )
        held.supervision = supervision
        policy.takes_turns = held.takes_turns = not ahead and actor != reference
        log.info(
            "reference: %s",
            "on its own devices, one step ahead" if ahead else "on the policy's devices, in turn",
        )

    def restart() -> Roles:
        manager.renew()
        return _clusters(config, manager, with_reference, supervision)

    closing = ExitStack()
    closing.callback(manager.close)
    return Roles(
        policy,
        held,
        manager.kind,
        here=False,
        gpu_memory=policy.seats[0].room.device,
        runs_ahead=ahead,
        closing=closing,
        restart=restart,
    )
