"""Does the state fit? Weights, gradients and optimizer of each worker against the memory that is there.

From the headers of the files; no weight is read. It is a lower bound: activations, gathered layers and fragments come
on top, so what is refused here cannot run, and what passes may still be too much.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from rather.config.adapters import reference_is_policy
from rather.config.schema import DPOConfig, RoleConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.plan.state import Part, state_of, stored_shapes

GIB = 1 << 30
CGROUPS = {  # limit, use, and the file cache that can be given up, by version
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Room:
    """What a process finds before any model is there: free host memory, and all memory of its GPU (0 without one)."""

    machine: str
    place: int  # the device's number
    free: int
    device: int

    @staticmethod
    def here(place: int, kind: str) -> Room:
        import torch

        total = (
            torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            if kind == "cuda"
            else 0
        )
        return Room(socket.gethostname(), place, free_memory(), total)


@dataclass(frozen=True)
class Need:
    """Bytes that each rank of a role holds; `once`, those of all its ranks if nothing is held twice."""

    device: float
    host: float
    once: float
    told: str  # how they came about


@dataclass
class Ledger:
    """What the roles hold, and where. A role is added before it loads its model."""

    held: dict[str, tuple[Need, Sequence[Room]]] = field(default_factory=dict)

    def add(self, name: str, need: Need | None, rooms: Sequence[Room]) -> None:
        if need is None:
            return
        self.held[name] = (need, rooms)
        if problem := self.shortage():
            raise ConfigError(problem)

    def shortage(self) -> str | None:
        rooms = [room for _, held in self.held.values() for room in held]
        for room in {(room.machine, room.place): room for room in rooms if room.device}.values():
            here = {
                name: need for name, (need, held) in self.held.items() if _same_device(room, held)
            }
            taken = sum(need.device for need in here.values())
            if taken > room.device:
                fewest = ceil(sum(need.once for need in here.values()) / room.device)
                fits = f"Divided by zero3 and fsdp2_infer they need {fewest} such GPUs or more."
                return _sentence(
                    f"GPU {room.place} of {room.machine}", room.device, taken, here, fits
                )
        for machine in {room.machine for room in rooms}:
            workers = {
                name: sum(room.machine == machine for room in held)
                for name, (_, held) in self.held.items()
            }
            taken = sum(self.held[name][0].host * count for name, count in workers.items())
            free = min(room.free for room in rooms if room.machine == machine)
            if taken > free:
                once = sum(self.held[name][0].once for name, count in workers.items() if count)
                fits = f"Held once, divided by zero3 and fsdp2_infer, they are {_gib(once)}."
                here = {
                    f"{count} x {name}": self.held[name][0]
                    for name, count in workers.items()
                    if count
                }
                return _sentence(machine, free, taken, here, fits)
        return None


def need_of(
    config: DPOConfig, role: RoleConfig, kind: str, model: str | None = None
) -> Need | None:
    """Of each rank; None where the model is the policy's, or cannot be looked at from here: loading it will tell."""
    args = role.model_args.of_other_weights() if model else role.model_args
    shapes = stored_shapes(model or role.model_path, args.revision)
    if shapes is None or (not role.trains and reference_is_policy(config)):
        return None
    state, found = state_of(config, role, kind, shapes, args, narrow=True), layout(role)
    own, whole, cut = state.own, state.gathered, state.cut
    on_host = own if found.host or kind == "cpu" else 0.0
    listed = " + ".join(
        f"{part.number:.3g} weights x {_bytes(part, state.shards)} bytes" for part in state.parts
    )
    told = f"{listed}{f' / {cut} by tp and pp' if cut > 1 else ''}"
    if kind == "cpu":
        return Need(0.0, own + whole, state.once, told)
    return Need(own + whole - on_host, on_host, state.once, told)


def _bytes(part: Part, shards: int) -> str:
    each = f"{part.bytes:g}/{shards}" if shards > 1 or part.gathered else f"{part.bytes:g}"
    return f"({each} + {part.gathered:g})" if part.gathered else each


def free_memory() -> int:
    """Bytes of host memory for this process, as its container sees it."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    numbers = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return min([numbers["MemAvailable"] + numbers.get("SwapFree", 0), *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
            own = root / path.lstrip("/")
            folders = [
                own,
                *(parent for parent in own.parents if root in (parent, *parent.parents)),
            ]
            yield from (
                free
                for each in folders
                if (free := free_in_group(each, 1 if controllers else 2)) is not None
            )


def free_in_group(folder: Path, version: int) -> int | None:
    """What a control group leaves of its limit; None without one."""
    limit, use, cache = CGROUPS[version]
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, use))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kept = {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}
    return None if most == "max" else int(most) - int(used) + kept.get(cache, 0)


def _same_device(room: Room, rooms: Iterable[Room]) -> bool:
    return any((room.machine, room.place) == (each.machine, each.place) for each in rooms)


def _sentence(where: str, there: float, taken: float, parts: Mapping[str, Need], fits: str) -> str:
    listing = ", ".join(f"{name} {need.told}" for name, need in parts.items())
    return (
        f"memory: {where} has {_gib(there)}, and weights, gradients and optimizer alone are {_gib(taken)}: {listing}. "
        f"{fits} Use more devices, another strategy_name, or a smaller model."
    )


def _gib(number: float) -> str:
    return f"{number / GIB:.3g} GiB"
