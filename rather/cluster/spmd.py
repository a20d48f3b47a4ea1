"""`torchrun -m rather train CONFIG`: every process runs the loop on its own share; rank 0 tracks
and writes.

All processes take the same steps, because each computes them from the same config, pairs and seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rather.cluster.host import backend_of
from rather.cluster.local import device_kind, worker_class
from rather.cluster.oom_report import shortage
from rather.cluster.preflight import Ledger, Room
from rather.cluster.ranks import RoleOnRanks, folder_next_to, shares
from rather.cluster.role import RankInfo
from rather.config.schema import DPOConfig
from rather.data.batch import PairBatch
from rather.errors import ConfigError, DiskError

T = TypeVar("T")


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def join_ranks(config: DPOConfig, devices: int, closing: ExitStack) -> RankInfo:
    """Join the other processes; device_mapping must name as many devices."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != devices:
        raise ConfigError(
            f"actor_train.device_mapping names {devices} devices, and torchrun started {world} "
            f"processes; set actor_train.device_mapping=0-{world - 1}, or "
            f"--nproc-per-node={devices}"
        )
    kind = device_kind(config.platform)
    device = f"cuda:{local}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=60 + config.timeouts.longest)  # the watchdog comes first
    dist.init_process_group(backend_of(kind), timeout=timeout)
    closing.callback(dist.destroy_process_group)
    return RankInfo(rank, world, device)


class SpmdCluster(RoleOnRanks):
    """A role whose calls all processes make at once: each does its share, and all get the whole
    answer."""

    def __init__(
        self, name: str, config: DPOConfig, member: RankInfo, ledger: Ledger, rooms: Sequence[Room]
    ) -> None:
        kind = "cpu" if member.device == "cpu" else "cuda"
        super().__init__(name, config, kind, ledger)
        self.member, self.rooms = member, rooms
        cls = worker_class(self.worker_config.worker_cls, f"{name}.worker_cls")
        self.worker = cls(config, name, member)

    def _run(
        self,
        method: str,
        *args: Any,
        batches: Sequence[PairBatch] = (),
        one: bool = False,
        exchange: bool = False,
    ) -> list[Any]:
        if batches:
            own = shares(batches, self.layout.dp)[self.layout.dp_rank(self.member.rank)]
            args = (own, *args)
        work, value, problem = getattr(self.worker, method), None, ""
        try:
            if not exchange:
                return [work(*args)]
            if not one or self.member.rank == 0:
                value = work(*args)
        except torch.OutOfMemoryError as error:
            # The others wait for this rank in a collective: repeating the call would not help.
            raise shortage(error) from error
        except DiskError as error:  # all ranks must raise it, or some would wait for this one
            problem = str(error)
        values, problems = zip(*gather((value, problem)), strict=True)
        if any(problems):
            raise DiskError(next(filter(None, problems)))
        return list(values)

    @contextmanager
    def _shared_folder(self, folder: Path) -> Iterator[Path]:
        with folder_next_to(folder) if self.member.rank == 0 else nullcontext() as made:
            yield broadcast(made)


def broadcast(value: Any) -> Any:
    """Return the first rank's value on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def max_over_ranks(number: int, kind: str) -> int:
    held = torch.tensor(number, device=kind)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
