"""Memory of workers: whether their state fits before anything is loaded, how much they used, and
where it went when it ran out.

The check before loading reads only the config.json of a model. It is a lower bound: activations, gathered
layers and fragments come on top, so what is refused cannot run, and what passes may be too much.
"""

from __future__ import annotations

import ctypes
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch

from rather.config.schema import LossKeys, RoleConfig
from rather.data.batch import PairBatch
from rather.errors import ConfigError, MemoryShortage
from rather.optim.adamw import local
from rather.optim.optimizer import Optimizer
from rather.parallel.load import cpu_has_bf16
from rather.plan.memory import known_shapes, role_state
from rather.train.rank_trainer import RankTrainer

GIB = 1 << 30
FIXES = 3
CGROUPS = (  # limit, use, and the file cache that can be given up: version 2, version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

# --- before anything is loaded ---


class Room(NamedTuple):
    """What a process finds before any model is there."""

    machine: str
    place: int  # the device's number
    free: int  # bytes of host memory
    device: int  # bytes of its GPU; 0 without one
    kernel: str = ""  # two machines may have one name
    bf16: bool = False  # whether its CPU multiplies such numbers

    @staticmethod
    def here(place: int, kind: str, kernel: str = "") -> Room:
        total = torch.cuda.get_device_properties("cuda").total_memory if kind == "cuda" else 0
        return Room(socket.gethostname(), place, free_memory(), total, kernel, cpu_has_bf16())


class Need(NamedTuple):
    """Bytes of each rank of a role; `once`: of all its ranks if nothing is held twice."""

    device: float
    host: float
    once: float
    arithmetic: str


class Ledger:
    """What the roles hold, and where. A role is added before it loads its model."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[Need, Sequence[Room]]] = {}

    def add(self, name: str, need: Need | None, rooms: Sequence[Room]) -> None:
        if need is None:
            return
        self.held[name] = need, rooms
        # Kernel and name of a place -> bytes there, bytes taken, role.
        places: dict[tuple[str, str], list[tuple[int, float, str]]] = {}
        for role, (each, there) in self.held.items():
            for room in there:
                gpu, host = (room.kernel, f"GPU {room.place} of {room.machine}"), room.machine
                places.setdefault(gpu, []).append((room.device, each.device, role))
                places.setdefault((room.kernel, host), []).append((room.free, each.host, role))
        for (_, place), ranks in places.items():
            has, taken = min(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
            if taken <= has:
                continue
            roles = Counter(role for _, _, role in ranks)
            parts = [
                f"{count} x {role} {self.held[role][0].arithmetic}" for role, count in roles.items()
            ]
            fewest = ceil(sum(self.held[role][0].once for role in roles) / has)
            unit = "GPUs" if place.startswith("GPU ") else "machines"
            raise ConfigError(
                f"memory: {place} has {has / GIB:.3g} GiB, and weights, gradients and optimizer "
                f"alone are {taken / GIB:.3g} GiB: {', '.join(parts)}. Divided by zero3 and "
                f"fsdp2_infer they need {fewest} such {unit} or more. Use more devices, another "
                "strategy_name, or a smaller model."
            )


def need_of(
    keys: LossKeys, role: RoleConfig, kind: str, model: str | None = None, *, narrow: bool = True
) -> Need | None:
    """Return what each rank holds; None if the files of the model are not here.

    `narrow`: with gradients in bfloat16 if they can be, which is the least that may run.
    """
    args = role.model_args.of_other_weights() if model else role.model_args
    shapes = known_shapes(model or role.model_path, args)
    if shapes is None:
        return None
    state = role_state(keys, role, kind, shapes, args, narrow=narrow)
    parts = []
    for part in state.parts:
        each = (sum(part.each) / part.shards + part.gathered) / part.cut
        parts.append(f"{part.number:.3g} weights x {each:.3g} bytes")
    device, host = sum(state.on_device) + state.gathered, state.on_host
    if kind == "cpu":
        device, host = 0.0, device
    return Need(device, host, state.total, " + ".join(parts))


def free_memory() -> int:
    """Return the bytes of host memory that this process can use, as its container sees it."""
    numbers = _kilobytes("/proc/meminfo")
    found = [numbers["MemAvailable:"] + numbers.get("SwapFree:", 0)]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            own = Path("/sys/fs/cgroup" + ("/memory" if controllers else "") + group)
            found += [free for each in (own, *own.parents) for free in free_in_group(each)]
    return min(found)


def free_in_group(folder: Path) -> Iterator[int]:
    """Yield what a control group leaves of its limit, if it has one."""
    for names in CGROUPS:
        with suppress(OSError, ValueError):  # no such group; its limit is "max"
            limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names[:2])
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            yield limit - used + int(dict(line.split() for line in lines).get(names[2], 0))


def _kilobytes(file: str) -> dict[str, int]:
    """Return the lines `name: number kB` of a file in /proc as bytes; none if it is not there."""
    with suppress(OSError):
        lines = map(str.split, Path(file).read_text(encoding="utf-8").splitlines())
        return {line[0]: int(line[1]) << 10 for line in lines if line[-1] == "kB"}
    return {}


# --- what was used ---


class Peak:
    """Measures since its construction: the tensors of a GPU, or the growth of this process."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        if not self._cuda:
            with suppress(OSError, AttributeError):  # not Linux with glibc
                ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again, unnoticed
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._before = _kilobytes("/proc/self/status").get("VmRSS:", 0)

    def begin_training(self) -> None:
        """Do not count what planning has tried."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return max(0, _kilobytes("/proc/self/status").get("VmHWM:", 0) - self._before)


# --- when it ran out ---


def largest(batches: Sequence[PairBatch]) -> int:
    """Return the tokens of the largest micro-batch."""
    return max((len(batch.ids_N) for batch in batches), default=0)


def sentence(error: BaseException) -> str:
    """Return the first line of an error; the others are about the allocator, or Ray's account."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()


def shortage(error: BaseException) -> MemoryShortage:
    return MemoryShortage("\n".join([sentence(error), *getattr(error, "__notes__", ())]))


def bytes_held(trainer: RankTrainer) -> dict[str, float]:
    """Return the bytes of what a rank holds between steps."""
    optimizer = trainer.optimizer
    rows = {"weights": float(sum(local(weight).nbytes for weight in trainer.policy.parameters()))}
    if isinstance(optimizer, Optimizer):  # an engine does not say
        rows["gradients"] = optimizer.gradient_bytes()
        rows["masters and moments"] = optimizer.state_bytes()
    return rows


def explanation(device: str, tokens: int, rows: Mapping[str, float], fixes: Sequence[str]) -> str:
    """Return where the memory of a device goes, and settings that need less.

    `tokens`: of the largest micro-batch; 0 if there is none yet.
    """
    size = f" (the largest micro-batch has {tokens} tokens)" if tokens else ""
    lines = [f"Where the memory of {device} goes{size}:"]
    for name, number in rows.items():
        if number > 0:
            lines.append(f"  {name:26}  {number / GIB:8.3f} GiB")
    return "\n".join([*lines, "Any of these needs less:", *(f"  {fix}" for fix in fixes[:FIXES])])
