"""Where the roles of a config run: in this process, under torchrun, or on Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rather.cluster.bridge import POLICY, REFERENCE, Bridge, ReferenceApart, follow
from rather.cluster.health import COMPUTED, PHASES
from rather.cluster.host import Process
from rather.cluster.memory import Ledger, Room
from rather.cluster.role import (
    Role,
    RoleOnRanks,
    SpmdCluster,
    broadcast,
    device_kind,
    join_ranks,
    role_of,
    shared_folder,
    started_by_torchrun,
)
from rather.cluster.supervision import PATIENCE, Peers, Supervision, Watchdog
from rather.cluster.worker import ActorWorker, RankInfo, make_worker
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.model.sizes import model_problems
from rather.parallel.mesh import gather_objects, max_over_ranks

if TYPE_CHECKING:
    from rather.cluster.ray_ranks import RayRanks

log = logging.getLogger(__name__)


@dataclass
class Roles:
    """Policy and reference, wherever they are. `close` leaves nothing behind.

    Under torchrun every process is a driver: the main one decides, writes and broadcasts.
    """

    actor_train: Role
    reference: Role | None
    kind: str  # of the devices: cpu or cuda
    here: bool = True  # in this process, whose device the driver may use
    rank: int = 0  # of this driver
    drivers: int = 1
    gpu_memory: int = 0  # bytes of the GPU of a worker on Ray
    apart: bool = False  # the reference has processes of its own
    runs_ahead: bool = False  # it has devices of its own, too
    closing: ExitStack = field(default_factory=ExitStack)
    restart: Callable[[], Roles] | None = None  # makes the same roles in new processes, on Ray
    ranks: RayRanks | None = None  # run the whole program, and this process only starts them
    watchdog: Watchdog | None = None  # of this process

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the main driver's value; each driver calls this in the same order."""
        with self._waiting("broadcast"):
            return broadcast(value) if self.drivers > 1 else value

    def max_over_drivers(self, number: int) -> int:
        if self.drivers == 1:
            return number
        with self._waiting("max_over_drivers"):
            return max_over_ranks(number, self.kind)

    def _waiting(self, call: str) -> AbstractContextManager[None]:
        """Limit the wait for what the main driver does alone, such as preparing data."""
        return self.watchdog.during(call, "save") if self.watchdog else nullcontext()

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
    """Start the roles of a run, without their models. Supervised, they may be replaced."""
    names = ["actor_train", *(["reference"] if with_reference else [])]
    found = (each for name in names for each in model_problems(name, getattr(config, name)))
    if problems := list(found):
        raise ConfigError(problems)
    actor, reference = mappings(config)
    if started_by_torchrun():
        roles = _under_torchrun(config, names)
    elif (
        config.num_nodes * len(actor) > 1
        or config.ray.address is not None
        or (with_reference and reference != actor)
    ):
        return _on_ray(config, with_reference, supervision)
    else:
        kind = device_kind(config.platform)
        member = RankInfo(device="cpu") if kind == "cpu" else RankInfo()
        workers = {name: make_worker(name, config, member) for name in names}
        for worker in workers.values():
            worker.set_environment()
        held = workers.get("reference")
        if held:
            held.neighbour = workers["actor_train"]
        roles = Roles(workers["actor_train"], held, kind)
    processes = roles.drivers + (len(reference) if roles.apart else 0)
    roles.watchdog = Watchdog(config.timeouts, config.log_dir, processes, supervision)
    roles.closing.callback(roles.watchdog.closed.set)
    for role in filter(None, (roles.actor_train, roles.reference)):
        # In one process only the steps are watched: loading and saving take what disk and network
        # take.
        roles.watchdog.watch(role, PHASES if processes > 1 else (*COMPUTED, "score"))
    return roles


def _under_torchrun(config: DPOConfig, names: list[str]) -> Roles:
    """Return the roles of a process that torchrun started, if it is one of the policy's.

    A process of a reference on other devices serves the policy until its end, and then exits.
    """
    actor, reference = mappings(config)
    apart = "reference" in names and actor != reference
    takes_turns = apart and bool(set(actor) & set(reference))
    sizes = {"actor_train": len(actor)} | ({"reference": len(reference)} if apart else {})
    closing = ExitStack()
    member, store = join_ranks(config, sizes, closing)
    kind = "cpu" if member.device == "cpu" else "cuda"
    if apart:
        peers = Peers(PATIENCE)
        peers.write("place", place := role_of(peers.rank, sizes))
        bridge = None
        if member.rank == 0:
            bridge = Bridge(store, POLICY if place[0] == "actor_train" else REFERENCE)
        if place[0] == "reference":
            with closing:
                follow(config, member, kind, bridge, peers.world, takes_turns=takes_turns)
            raise SystemExit(0)
    memory = Ledger(), gather_objects(Room.here(member.rank, kind, Process.this().kernel))
    policy = SpmdCluster("actor_train", config, member, *memory)
    policy.takes_turns = takes_turns
    held: RoleOnRanks | None = None
    if apart:
        held = distant = ReferenceApart(config, kind, memory[0], bridge)
        closing.callback(distant.close)
        if bridge:
            how = (
                "the policy's devices, in turn"
                if takes_turns
                else "its own devices, one step ahead"
            )
            log.info("reference: %s; on %s", held.layout.describe(), how)
    elif "reference" in names:
        held = shared = SpmdCluster("reference", config, member, *memory)
        shared.worker.neighbour = policy.worker
    if member.rank == 0:
        log.info("actor_train: %s", policy.layout.describe())
    place_of_driver: Any = {"rank": member.rank, "drivers": member.world, "closing": closing}
    return Roles(
        policy, held, kind, apart=apart, runs_ahead=apart and not takes_turns, **place_of_driver
    )


def _on_ray(config: DPOConfig, with_reference: bool, supervision: Supervision | None) -> Roles:
    from rather.cluster.cluster import Cluster, FrozenReference
    from rather.cluster.ray_ranks import RayRanks
    from rather.cluster.resources import ResourceManager

    actor, reference = mappings(config)
    ahead = with_reference and not set(actor) & set(reference)
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

    def start() -> Roles:
        """Start the roles on the manager, which has no processes yet."""
        policy = Cluster("actor_train", None, manager, config.actor_train, pipeline_config=config)
        held: Cluster | None = None
        if with_reference:
            cls = FrozenReference if ahead and not config.sync_ref_model else Cluster
            held = cls("reference", None, manager, config.reference, pipeline_config=config)
            held.supervision = supervision
            policy.takes_turns = held.takes_turns = not (ahead or config.shares_devices)
            place = "its own devices, one step ahead" if ahead else "the policy's devices, in turn"
            log.info("reference: on %s", place)
        roles = Roles(policy, held, manager.kind, here=False, runs_ahead=ahead, restart=restart)
        roles.apart = with_reference and reference != actor
        roles.gpu_memory = policy.rooms[0].device
        if config.ray.one_program:
            held_mapping = [reference] if with_reference else []
            roles.ranks = RayRanks(manager, [actor, *held_mapping])
        roles.closing.callback(manager.close)
        return roles

    def restart() -> Roles:
        manager.renew()
        return start()

    try:
        return start()
    except BaseException:
        manager.close()
        raise
