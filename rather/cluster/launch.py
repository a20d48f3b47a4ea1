"""Where the roles of a config run: in this process, in processes that torchrun started, or on Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rather.cluster.local import device_kind, local_cluster
from rather.cluster.shares import beside
from rather.cluster.spmd import Memory, SpmdCluster, joined_ranks, largest, said_by_first, started_by_torchrun
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.errors import ConfigError
from rather.model.divisible import division_problems

if TYPE_CHECKING:
    from rather.cluster.cluster import Cluster

log = logging.getLogger(__name__)

Role: TypeAlias = "ActorWorker | SpmdCluster | Cluster"  # the same calls, answered by one process or by many


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
    runs_ahead: bool = False  # the reference has devices of its own
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def told(self, value: Any) -> Any:
        """What the leading driver says here; each driver gets here in the same order."""
        return said_by_first(value) if self.drivers > 1 else value

    def agreed(self, number: int) -> int:
        """The largest number that any driver says."""
        return largest(number, self.kind) if self.drivers > 1 else number

    @contextmanager
    def folder_beside(self, folder: Path) -> Iterator[Path]:
        """An empty folder for what ranks write together, gone when all are done."""
        with beside(folder.absolute()) if self.leads else nullcontext() as made:
            yield Path(self.told(made))
            self.agreed(0)

    def close(self) -> None:
        self.closing.close()


def needs_ray(config: DPOConfig, *, with_reference: bool) -> bool:
    """More than one device, or a cluster by name."""
    actor, reference = mappings(config)
    several = len(actor) > 1 or (with_reference and reference != actor)
    return several or config.num_nodes > 1 or config.ray.address is not None


def mappings(config: DPOConfig) -> tuple[list[int], list[int]]:
    return config.actor_train.device_mapping or [0], config.reference.device_mapping or [0]


def launch(config: DPOConfig, *, with_reference: bool) -> Roles:
    """The roles of a run, started but without their models."""
    actor, reference = config.actor_train, config.reference
    problems = list(division_problems("actor_train", actor))
    if with_reference and (reference.strategy_args, reference.model_path) != (actor.strategy_args, actor.model_path):
        problems += division_problems("reference", reference)
    if problems:
        raise ConfigError(problems)
    if started_by_torchrun():
        return _under_torchrun(config, with_reference)
    if needs_ray(config, with_reference=with_reference):
        return _on_ray(config, with_reference)
    kind = device_kind(config.platform)
    held = local_cluster("reference", config) if with_reference else None
    return Roles(local_cluster("actor_train", config), held, kind, here=True)


def _under_torchrun(config: DPOConfig, with_reference: bool) -> Roles:
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
    if member.rank == 0:
        log.info("actor_train: %s", policy.layout.told())
    return Roles(policy, held, memory.kind, here=True, rank=member.rank, drivers=member.world, closing=closing)


def _on_ray(config: DPOConfig, with_reference: bool) -> Roles:
    from rather.cluster.cluster import Cluster
    from rather.cluster.resources import ResourceManager

    actor, reference = mappings(config)
    used = [*actor, *(reference if with_reference else [])]
    if config.num_nodes > 1 and config.ray.address is None:
        raise ConfigError(f"num_nodes: {config.num_nodes} nodes need a Ray cluster; name it: --address, or ray.address")
    if config.ray.address is None:
        device_kind(config.platform)  # no need to start anything for devices that this machine has not
    roles = [("actor_train", config.actor_train), ("reference", config.reference)][: 2 if with_reference else 1]
    with ExitStack() as opened:
        manager = ResourceManager(
            config.num_nodes,
            config.num_gpus_per_node or max(used) + 1,
            address=config.ray.address,
            platform=config.platform,
            timeouts=config.timeouts,
        )
        opened.callback(manager.close)
        policy, *held = [Cluster(name, role.worker_cls, manager, role, pipeline_config=config) for name, role in roles]
        closing = opened.pop_all()
    ahead = bool(held) and not set(actor) & set(reference)
    for role in (policy, *held):
        role.takes_turns = bool(held) and not ahead and actor != reference
    if held:
        log.info("reference: %s", "on its own devices, one step ahead" if ahead else "on the policy's devices, in turn")
    return Roles(policy, held[0] if held else None, manager.kind, here=False, runs_ahead=ahead, closing=closing)
