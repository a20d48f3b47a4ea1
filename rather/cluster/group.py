"""The process group of a rank: how its role finds the others, and what they do together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rather.cluster.health import ON_RAY, set_environment
from rather.cluster.links import interface_to, join_group, use_interface_to
from rather.config.schema import MachineKeys, RoleConfig
from rather.errors import ConfigError, DiskError
from rather.parallel.load import device_of
from rather.parallel.mesh import gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class RankInfo:
    """The rank of a worker among `world`, and its device (None: the first of device_mapping)."""

    rank: int = 0
    world: int = 1
    device: str | None = None
    near: int = 1  # how many of them share this machine


def device_kind(platform: str) -> str:
    """Return the kind of this machine's devices: cpu or cuda."""
    if platform == "cuda" and not torch.cuda.is_available():
        raise ConfigError("platform: cuda, but this machine has no GPU that PyTorch can use")
    return "cuda" if platform != "cpu" and torch.cuda.is_available() else "cpu"


def started_as_rank() -> bool:
    """Return whether torchrun or Ray started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join_ranks(
    machine: MachineKeys, roles: Mapping[str, RoleConfig], closing: ExitStack
) -> tuple[RankInfo, Any]:
    """Join the process group of one role, or of all if `roles` are not apart.

    `roles` are those with processes of their own, in the order of torchrun's ranks. On Ray, a rank
    without others has no group. Returns the place in the group, and the store of all ranks if
    roles are apart.
    """
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    near = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    _refuse_other_number(world, roles)
    role, own_rank, size = role_of(rank, roles)
    on_ray, section = os.environ.get(ON_RAY), roles[role]
    kind = on_ray or device_kind(machine.platform)
    per_node = None if near == world else machine.num_gpus_per_node or near
    device = "cpu"
    if kind == "cuda":  # on Ray a process sees no other one
        device = "cuda:0" if on_ray else device_of(section, own_rank, per_node)
    set_environment(machine.envs(section))
    # Longer than any deadline of the watchdog, so that the watchdog reports a hang first.
    timeout, place = timedelta(seconds=60 + machine.timeouts.longest), {}
    store = _store_of_attempt(timeout, closing, is_apart=len(roles) > 1)
    if store:
        # Each role counts its own ranks from 0, in a group that does not know the other one.
        prefixed = dist.PrefixStore(role, store)  # type: ignore[attr-defined]
        place = {"store": prefixed, "rank": own_rank, "world_size": size}
    use_interface_to(_address_of_peers(is_one_machine=near == world))
    if size > 1 or (len(roles) == 1 and not on_ray):
        join_group(kind, device, timeout, **place)
        closing.callback(dist.destroy_process_group)
    elif kind == "cuda":
        torch.cuda.set_device(device)
    return RankInfo(own_rank, size, device, min(near, size)), store


def _refuse_other_number(world: int, roles: Mapping[str, RoleConfig]) -> None:
    """Refuse another number of processes than the roles have devices."""
    devices = sum(len(section.devices) for section in roles.values())
    if world == devices:
        return
    if len(roles) > 1:
        raise ConfigError(
            f"actor_train and reference have {devices} devices together, and torchrun started "
            f"{world} processes; set --nproc-per-node={devices}"
        )
    raise ConfigError(
        f"actor_train.device_mapping names {devices} devices, and torchrun started {world} "
        f"processes; set actor_train.device_mapping=0-{world - 1}, or "
        f"--nproc-per-node={devices}"
    )


def _address_of_peers(*, is_one_machine: bool) -> str:
    """Return an address whose route leads to the other ranks."""
    if is_one_machine:
        return "127.0.0.1"
    address = os.environ["MASTER_ADDR"]
    is_own_name = interface_to(address) == "lo"  # as a machine resolves its own name
    return "192.0.2.1" if is_own_name else address  # of no machine: its route leads outside


def _store_of_attempt(timeout: timedelta, closing: ExitStack, *, is_apart: bool) -> Any:
    """Return a store of this attempt; None if torch's own meeting place will do."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not is_apart and attempt == "0":
        return None
    store = next(rendezvous("env://", timeout=timeout))[0]
    closing.callback(lambda _: None, store)  # kept: the first process may be its server
    # torchrun --max-restarts keeps its store, with the addresses of processes that are gone.
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]


def role_of(rank: int, roles: Mapping[str, RoleConfig]) -> tuple[str, int, int]:
    """Return the role of one of torchrun's ranks, its rank in that role, and the role's ranks."""
    for role, section in roles.items():
        size = len(section.devices)
        if rank < size:
            return role, rank, size
        rank -= size
    raise AssertionError(rank)


# --- together ---


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the first rank's value on all ranks; alone there is nobody to tell."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def on_every_rank(work: Callable[[], T]) -> list[T | None]:
    """Return what `work` returns on each rank, once all have done it.

    A DiskError of one rank is raised by all: the others would wait for that rank.
    """
    value, problem = None, ""
    try:
        value = work()
    except DiskError as error:
        problem = str(error)
    values, problems = zip(*gather_objects((value, problem)), strict=True)
    if any(problems):
        raise DiskError(next(filter(None, problems)))
    return list(values)


@contextmanager
def shared_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder` that all ranks can write to, then remove it.

    Under torchrun all processes call this. If the folder cannot be made, all of them raise the
    error: one that alone goes on, as after a missed save, would leave the others waiting.
    """
    made = folder.absolute().with_name(f".pieces-{folder.name}")
    is_main, failed = not dist.is_initialized() or dist.get_rank() == 0, None
    try:
        if is_main:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
    except OSError as error:
        failed = error
    try:
        if dist.is_initialized():
            made, failed = broadcast((made, failed))
        if failed:
            raise failed
        yield made
    finally:
        if is_main:
            shutil.rmtree(made, ignore_errors=True)
