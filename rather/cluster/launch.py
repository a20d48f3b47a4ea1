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
        if isinstance(policy, ActorWorker) and isinstance(reference, ActorWorker):
            reference.mix_weights(policy.trainer.weights(), share)
            return
        with shared_folder(run_dir / "reference") as folder:
            policy.write_weights(folder, "reference")
            reference.mix_weights(folder, share)
            self.max_over_drivers(0)  # all have read it

    def close(self) -> None:
        self.closing.close()


def mappings(config: DPOConfig) -> tuple[list[int], list[int]]:
    return config.actor_train.devices, config.reference.devices


def launch(
    config: DPOConfig, *, with_reference: bool, supervision: Supervision | None = None
) -> Roles:
    """Return the roles of this process, without their models; on Ray, start the ranks."""
    names = ["actor_train", *(["reference"] if with_reference else [])]
    found = (each for name in names for each in model_problems(name, getattr(config, name)))
    if problems := list(found):
        raise ConfigError(problems)
    actor, reference = mappings(config)
    if started_as_rank():
        roles = _of_rank(config, names)
    elif (
        config.num_nodes * len(actor) > 1
        or config.ray.address is not None
        or (with_reference and reference != actor)
    ):
        return _on_ray(config, with_reference=with_reference)
    else:
        kind = device_kind(config.platform)
        member = RankInfo(device="cpu") if kind == "cpu" else RankInfo()
        roles = Roles(*_workers(config, names, member), kind)
    processes = roles.drivers + (len(reference) if roles.apart else 0)
    if ON_RAY in os.environ:
        supervision = None  # the process that starts the ranks writes down why they ended
    roles.watchdog = Watchdog(config.timeouts, config.log_dir, processes, supervision)
    roles.closing.callback(roles.watchdog.close)
    for role in filter(None, (roles.actor_train, roles.reference)):
        # In one process only the steps are watched: loading and saving take what disk and network
        # take.
        roles.watchdog.watch(role, PHASES if processes > 1 else STEPS)
    return roles


def _workers(
    config: DPOConfig, names: list[str], member: RankInfo
) -> tuple[ActorWorker, ActorWorker | None]:
    """Return the workers of both roles in this process; they may share a model."""
    workers = {name: make_worker(name, config, member) for name in names}
    for worker in workers.values():
        worker.set_environment()
    policy, reference = workers["actor_train"], workers.get("reference")
    if reference:
        reference.neighbour = policy
    return policy, reference


def _of_rank(config: DPOConfig, names: list[str]) -> Roles:
    """Return the roles of a process that was started as a rank, if it is one of the policy's.

    A rank of a reference on other devices follows the policy until its end, and then exits.
    """
    actor, reference = mappings(config)
    apart = "reference" in names and actor != reference
    takes_turns = apart and bool(set(actor) & set(reference))
    sizes = {"actor_train": len(actor)} | ({"reference": len(reference)} if apart else {})
    closing = ExitStack()
    member, store = join_ranks(config, sizes, closing)
    kind = "cpu" if member.device == "cpu" else "cuda"
    peers = Peers(PATIENCE)
    bridge = None
    if apart:
        place = role_of(peers.rank, sizes)
        peers.write("place", place)
        if member.rank == 0:
            bridge = Bridge(store, POLICY if place[0] == "actor_train" else REFERENCE)
        if place[0] == "reference":
            with closing:
                follow(config, member, kind, bridge, peers.world, takes_turns=takes_turns)
            raise SystemExit(0)
    held: Role | None
    policy, held = _workers(config, names if not apart else ["actor_train"], member)
    policy.takes_turns = takes_turns
    if apart:
        held = distant = ReferenceApart(config, kind, bridge)
        closing.callback(distant.close)
        if bridge:
            how = (
                "the policy's devices, in turn"
                if takes_turns
                else "its own devices, one step ahead"
            )
            log.info("reference: %s; on %s", held.layout.describe(), how)
    if member.rank == 0:
        log.info("actor_train: %s", layout(config.actor_train).describe())
    return Roles(
        policy,
        held,
        kind,
        rank=member.rank,
        drivers=member.world,
        one_machine=peers.on_one_machine,
        apart=apart,
        runs_ahead=apart and not takes_turns,
        closing=closing,
    )


def _on_ray(config: DPOConfig, *, with_reference: bool) -> Roles:
    from rather.cluster.cluster import Cluster
    from rather.cluster.resources import ResourceManager

    actor, reference = mappings(config)
    if config.ray.address is None:
        device_kind(config.platform)  # refuses what this machine lacks before anything starts
        if config.num_nodes > 1:
            raise ConfigError(
                f"num_nodes: {config.num_nodes} nodes need a Ray cluster; name it: --address, or "
                "ray.address"
            )
    manager = ResourceManager(
        config.num_nodes,
        config.num_gpus_per_node or max([*actor, *(reference if with_reference else [])]) + 1,
        address=config.ray.address,
        platform=config.platform,
        timeouts=config.timeouts,
    )
    names = ["actor_train", *(["reference"] if with_reference else [])]

    def clusters() -> list[Any]:
        given: Any = {"pipeline_config": config}
        return [Cluster(name, None, manager, getattr(config, name), **given) for name in names]

    try:
        made = clusters()
    except BaseException:
        manager.close()
        raise
    held = made[1] if with_reference else None
    roles = Roles(made[0], held, manager.kind, ranks=RayRanks(manager, clusters))
    roles.closing.callback(manager.close)
    return roles
