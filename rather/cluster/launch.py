"""Where the roles of a config run: in this process, on ranks of torchrun, or on those of Ray."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rather.cluster.bridge import POLICY, REFERENCE, Bridge, ReferenceApart, follow
from rather.cluster.group import (
    RankInfo,
    broadcast,
    device_kind,
    join_ranks,
    role_of,
    shared_folder,
    started_as_rank,
)
from rather.cluster.health import ON_RAY, PHASES, STEPS
from rather.cluster.ray_ranks import RayRanks
from rather.cluster.supervision import PATIENCE, Peers, Supervision, Watchdog
from rather.cluster.worker import ActorWorker, make_worker
from rather.config.run_config import DPOConfig
from rather.config.schema import RoleConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.model.sizes import model_problems
from rather.parallel.mesh import max_over_ranks

log = logging.getLogger(__name__)

Role = ActorWorker | ReferenceApart


@dataclass
class Roles:
    """Policy and reference of one rank. `close` leaves nothing behind.

    Every rank runs the same program: the main one decides what is not a function of config, pairs
    and seed, writes, and broadcasts. On Ray, the process that starts the ranks has `ranks`, and its
    roles are the Clusters that scripts can call.
    """

    actor_train: ActorWorker
    reference: Role | None
    kind: str  # of the devices: cpu or cuda
    rank: int = 0  # of the policy
    drivers: int = 1  # the policy's ranks
    one_machine: bool = True
    apart: bool = False  # the reference has processes of its own
    runs_ahead: bool = False  # it has devices of its own, too
    closing: ExitStack = field(default_factory=ExitStack)
    ranks: RayRanks | None = None  # run the program; this process only starts them
    watchdog: Watchdog | None = None  # of this process

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any, phase: str = "save") -> Any:
        """Return the main driver's value; each driver calls this in the same order.

        `phase` limits the wait for what the main driver does meanwhile.
        """
        with self.during("broadcast", phase):
            return broadcast(value) if self.drivers > 1 else value

    def broadcast_numbers(self, numbers: Tensor) -> None:
        """Fill a tensor on the host with the main driver's numbers: one collective, no pickle."""
        if self.drivers > 1:
            with self.during("broadcast_numbers", "save"):
                dist.broadcast(numbers, src=0)

    def max_over_drivers(self, number: int) -> int:
        if self.drivers == 1:
            return number
        with self.during("max_over_drivers", "save"):
            return max_over_ranks(number, self.kind)

    def during(self, call: str, phase: str) -> AbstractContextManager[None]:
        """Limit a call that other drivers wait for; one process may take its time."""
        if self.watchdog is None or self.drivers == 1:
            return nullcontext()
        return self.watchdog.during(call, phase)

    def watch(self) -> None:
        """End this process if one of its calls misses its deadline: for commands."""
        if self.watchdog:
            self.watchdog.start()

    def move_reference(self, share: float, run_dir: Path) -> None:
        """TR-DPO: move the reference by `share` of the way to the policy."""
        policy, reference = self.actor_train, self.reference
        assert reference is not None
        # Of several ranks each may hold other parts of the two models.
        if self.drivers == 1 and isinstance(reference, ActorWorker):
            reference.mix_weights(policy.trainer.weights(), share)
            return
        with shared_folder(run_dir / "reference") as folder:
            policy.write_weights(folder, "reference")
            reference.mix_weights(folder, share)
            self.max_over_drivers(0)  # all have read it

    def close(self) -> None:
        self.closing.close()


def launch(
    config: DPOConfig, *, with_reference: bool, supervision: Supervision | None = None
) -> Roles:
    """Return the roles of this process, without their models; on Ray, start the ranks."""
    return Launcher(config, with_reference=with_reference).launch(supervision)


class Launcher:
    """Starts the roles of a config: in this process, as one of several ranks, or on Ray."""

    def __init__(self, config: DPOConfig, *, with_reference: bool) -> None:
        self.config = config
        self.sections: dict[str, RoleConfig] = {"actor_train": config.actor_train}
        if with_reference:
            self.sections["reference"] = config.reference
        self.is_apart = with_reference and not config.shares_devices
        overlap = set(config.actor_train.devices) & set(config.reference.devices)
        self.takes_turns = self.is_apart and bool(overlap)

    def launch(self, supervision: Supervision | None) -> Roles:
        problems: list[str] = []
        for name, section in self.sections.items():
            problems += model_problems(name, section)
        if problems:
            raise ConfigError(problems)
        if started_as_rank():
            roles = self._as_rank()
        elif self.needs_ray:
            return self._on_ray()
        else:
            kind = device_kind(self.config.platform)
            member = RankInfo(device="cpu") if kind == "cpu" else RankInfo()
            roles = Roles(*self._workers(member), kind)
        self._watch(roles, supervision)
        return roles

    @property
    def needs_ray(self) -> bool:
        config = self.config
        has_several = config.num_nodes * len(config.actor_train.devices) > 1
        return has_several or config.ray.address is not None or self.is_apart

    def _watch(self, roles: Roles, supervision: Supervision | None) -> None:
        """Give the calls of this process their deadlines."""
        config = self.config
        processes = roles.drivers + (len(config.reference.devices) if roles.apart else 0)
        if ON_RAY in os.environ:
            supervision = None  # the process that starts the ranks writes down why they ended
        roles.watchdog = Watchdog(config.timeouts, config.log_dir, processes, supervision)
        roles.closing.callback(roles.watchdog.close)
        for role in filter(None, (roles.actor_train, roles.reference)):
            # In one process only the steps are watched: loading and saving take what disk and
            # network take.
            roles.watchdog.watch(role, PHASES if processes > 1 else STEPS)

    def _workers(self, member: RankInfo) -> tuple[ActorWorker, ActorWorker | None]:
        """Return the workers of this process; policy and reference may share a model."""
        here = ["actor_train"] if self.is_apart else list(self.sections)
        workers = {name: make_worker(name, self.config, member) for name in here}
        for worker in workers.values():
            worker.set_environment()
        policy, reference = workers["actor_train"], workers.get("reference")
        policy.takes_turns = self.takes_turns
        if reference:
            reference.neighbour = policy
        return policy, reference

    def _as_rank(self) -> Roles:
        """Return the roles of a process that was started as a rank, if it is one of the policy's.

        A rank of a reference on other devices follows the policy until its end, and then exits.
        """
        groups = self.sections if self.is_apart else {"actor_train": self.config.actor_train}
        closing = ExitStack()
        member, store = join_ranks(self.config, groups, closing)
        kind = "cpu" if member.device == "cpu" else "cuda"
        peers = Peers(PATIENCE)
        bridge = None
        if self.is_apart:
            place = role_of(peers.rank, groups)
            peers.write("place", place)
            if member.rank == 0:
                bridge = Bridge(store, POLICY if place[0] == "actor_train" else REFERENCE)
            if place[0] == "reference":
                with closing:
                    self._follow(member, kind, bridge, peers.world)
                raise SystemExit(0)
        reference: Role | None
        policy, reference = self._workers(member)
        if self.is_apart:
            reference = self._reference_apart(kind, bridge)
            closing.callback(reference.close)
        if member.rank == 0:
            log.info("actor_train: %s", layout(self.config.actor_train).describe())
        return Roles(
            policy,
            reference,
            kind,
            rank=member.rank,
            drivers=member.world,
            one_machine=peers.on_one_machine,
            apart=self.is_apart,
            runs_ahead=self.is_apart and not self.takes_turns,
            closing=closing,
        )

    def _reference_apart(self, kind: str, bridge: Bridge | None) -> ReferenceApart:
        config = self.config
        shared_dir = config.run_dir if config.sync_ref_model else None
        reference = ReferenceApart(config.reference, kind, bridge, shared_dir)
        if bridge:
            how = "its own devices, one step ahead"
            if self.takes_turns:
                how = "the policy's devices, in turn"
            log.info("reference: %s; on %s", reference.layout.describe(), how)
        return reference

    def _follow(self, member: RankInfo, kind: str, bridge: Bridge | None, world: int) -> None:
        """Be a rank of the reference; `world` counts the ranks of both roles."""
        worker = make_worker("reference", self.config, member)
        worker.takes_turns = self.takes_turns
        watchdog = Watchdog(self.config.timeouts, self.config.log_dir, world, None)
        follow(worker, kind, bridge, watchdog)

    def _on_ray(self) -> Roles:
        from rather.cluster.cluster import Cluster
        from rather.cluster.resources import ResourceManager

        config = self.config
        if config.ray.address is None:
            device_kind(config.platform)  # refuses what this machine lacks before anything starts
            if config.num_nodes > 1:
                raise ConfigError(
                    f"num_nodes: {config.num_nodes} nodes need a Ray cluster; name it: --address, "
                    "or ray.address"
                )
        last_device = max(max(section.devices) for section in self.sections.values())
        manager = ResourceManager(
            config.num_nodes,
            config.num_gpus_per_node or last_device + 1,
            address=config.ray.address,
            platform=config.platform,
            timeouts=config.timeouts,
        )

        def make_clusters() -> list[Any]:
            options: Any = {"pipeline_config": config}
            return [
                Cluster(name, None, manager, section, **options)
                for name, section in self.sections.items()
            ]

        try:
            clusters = make_clusters()
        except BaseException:
            manager.close()
            raise
        reference = clusters[1] if len(clusters) > 1 else None
        ranks = RayRanks(manager, make_clusters)
        roles = Roles(clusters[0], reference, manager.kind, ranks=ranks)
        roles.closing.callback(manager.close)
        return roles
