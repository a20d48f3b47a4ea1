"""Does the state fit? Weights, gradients and optimizer of each worker against the memory that is
there.

From config.json of the model; no weight is read. It is a lower bound: activations, gathered layers
and fragments come on top, so what is refused here cannot run, and what passes may still be too
much.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import torch

from rather.config.schema import DPOConfig, RoleConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.plan.memory import known_shapes, role_state

GIB = 1 << 30
CGROUPS = {  # limit, use, and the file cache that can be given up, by version
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Room:
    """What a process finds before any model is there."""

    machine: str
    place: int  # the device's number
    free: int  # bytes of host memory
    device: int  # bytes of its GPU; 0 without one

    @staticmethod
    def here(place: int, kind: str) -> Room:
        total = torch.cuda.get_device_properties("cuda").total_memory if kind == "cuda" else 0
        return Room(socket.gethostname(), place, free_memory(), total)


@dataclass(frozen=True)
class Need:
    """Bytes that each rank of a role holds; `once`, those of all its ranks if nothing is held
    twice."""

    device: float
    host: float
    once: float
    arithmetic: str


@dataclass
class Ledger:
    """What the roles hold, and where. A role is added before it loads its model."""

    held: dict[str, tuple[Need, Sequence[Room]]] = field(default_factory=dict)

    def add(self, name: str, need: Need | None, rooms: Sequence[Room]) -> None:
        if need is None:
            return
        self.held[name] = (need, rooms)
        every = [room for _, held in self.held.values() for room in held]
        for room in every:
            self._check_gpu(room)
        for machine in {room.machine for room in every}:
            self._check_host(machine, min(each.free for each in every if each.machine == machine))

    def _check_gpu(self, room: Room) -> None:
        place = (room.machine, room.place)
        here = {
            name: need
            for name, (need, held) in self.held.items()
            if place in [(each.machine, each.place) for each in held]
        }
        taken = sum(need.device for need in here.values())
        if room.device and taken > room.device:
            fewest = ceil(sum(need.once for need in here.values()) / room.device)
            fits = f"Divided by zero3 and fsdp2_infer they need {fewest} such GPUs or more."
            raise _refusal(f"GPU {room.place} of {room.machine}", room.device, taken, here, fits)

    def _check_host(self, machine: str, free: int) -> None:
        here: dict[str, Need] = {}
        taken = 0.0
        for name, (need, held) in self.held.items():
            if count := sum(room.machine == machine for room in held):
                here[f"{count} x {name}"] = need
                taken += need.host * count
        if taken > free:
            once = sum(need.once for need in here.values()) / GIB
            fits = f"Held once, divided by zero3 and fsdp2_infer, they are {once:.3g} GiB."
            raise _refusal(machine, free, taken, here, fits)


def _refusal(
    where: str, there: int, taken: float, roles: Mapping[str, Need], fits: str
) -> ConfigError:
    listing = ", ".join(f"{name} {need.arithmetic}" for name, need in roles.items())
    return ConfigError(
        f"memory: {where} has {there / GIB:.3g} GiB, and weights, gradients and optimizer alone "
        f"are {taken / GIB:.3g} GiB: {listing}. {fits} Use more devices, another strategy_name, or "
        "a smaller model."
    )


def need_of(
    config: DPOConfig, role: RoleConfig, kind: str, model: str | None = None
) -> Need | None:
    """Return what each rank holds; None if the model is the policy's, or its files cannot be read
    from here."""
    args = role.model_args.of_other_weights() if model else role.model_args
    shapes = known_shapes(model or role.model_path, args)
    if shapes is None or (not role.trains and config.reference_is_policy):
        return None
    state = role_state(config, role, kind, shapes, args, narrow=True)
    parts = []
    for part in state.parts:
        each = f"{sum(part.each):g}"
        each += f"/{state.shards}" if state.shards > 1 or part.gathered else ""
        each = f"({each} + {part.gathered:g})" if part.gathered else each
        parts.append(f"{part.number:.3g} weights x {each} bytes")
    arithmetic = " + ".join(parts) + (f" / {state.cut} by tp and pp" if state.cut > 1 else "")
    total = state.own + state.gathered
    on_host = total if kind == "cpu" else state.own if layout(role).host else 0.0
    return Need(total - on_host, on_host, state.total, arithmetic)


def free_memory() -> int:
    """Return the bytes of host memory that this process can use, as its container sees it."""
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
    """Return what a control group leaves of its limit; None without one."""
    limit, use, cache = CGROUPS[version]
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, use))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kept = {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}
    return None if most == "max" else int(most) - int(used) + kept.get(cache, 0)


# --- what was used ---


class Peak:
    """Measures since its construction: the tensors of a GPU, or the growth of this process."""

    def __init__(self, device: str) -> None:
        self._cuda, self._before = device.startswith("cuda"), 0
        if not self._cuda:
            with suppress(OSError, AttributeError):  # not Linux with glibc
                ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again, unnoticed
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self._before = _status("VmRSS")

    def begin_training(self) -> None:
        """Do not count what planning has tried."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    """Return bytes from /proc; 0 if the system has none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
