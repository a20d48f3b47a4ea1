"""`torchrun -m rather train CONFIG`: every process runs the loop on its own share; rank 0 tracks and writes.

All processes take the same steps, because each computes them from the same config, pairs and seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rather import faults
from rather.cluster.local import device_kind, worker_class
from rather.cluster.oom_report import shortage
from rather.cluster.preflight import Ledger, Room, need_of
from rather.cluster.role import RankInfo
from rather.cluster.shares import beside, places, shares
from rather.config.schema import DPOConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.errors import ConfigError, DiskError
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import StepResult

T = TypeVar("T")


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def joined_ranks(config: DPOConfig, devices: int, closing: ExitStack) -> RankInfo:
    """Meets the other processes; their number must be that of the devices in device_mapping."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != devices:
        raise ConfigError(
            f"actor_train.device_mapping names {devices} devices, and torchrun started {world} processes; "
            f"set actor_train.device_mapping=0-{world - 1}, or --nproc-per-node={devices}"
        )
    kind = device_kind(config.platform)
    device = f"cuda:{local}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=60 + config.timeouts.longest)  # the watchdog comes first
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout)
    closing.callback(dist.destroy_process_group)
    faults.arm(config.run_dir, "driver", rank)
    return RankInfo(rank, world, device)


class Memory:
    """Of all ranks, and what the roles hold of it. Collective."""

    def __init__(self, member: RankInfo) -> None:
        self.kind = "cpu" if member.device == "cpu" else "cuda"
        self.ledger = Ledger()
        self.rooms = gathered(Room.here(member.rank, self.kind))


class SpmdCluster:
    """The calls of a cluster, made by all processes at once: each does its share, and all get the whole answer."""

    def __init__(self, name: str, config: DPOConfig, member: RankInfo, memory: Memory) -> None:
        self.role, self.config, self.member, self.memory = name, config, member, memory
        self.worker_config = config.actor_train if name == "actor_train" else config.reference
        self.layout = layout(self.worker_config)
        self.worker = worker_class(self.worker_config.worker_cls, f"{name}.worker_cls")(
            config, name, member
        )

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        need = need_of(self.config, self.worker_config, self.memory.kind, model)
        self.memory.ledger.add(self.role, need, self.memory.rooms)
        self.worker.initialize(total_steps, model)

    def embedding_rows(self) -> int:
        return self.worker.embedding_rows()

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        budget = torch.tensor(self.worker.plan(largest_pair), device=self.member.device)
        dist.all_reduce(budget, dist.ReduceOp.MIN)
        return int(budget)

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        *,
        limits: StepLimits | None = None,
    ) -> StepResult:
        with _not_repeated():
            return self.worker.train_step(
                self._own(batches), reference, PairFacts.of_step(batches), limits
            )

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        with _not_repeated():
            return self.worker.compute_log_probs(self._own(batches), places(batches))

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return self.worker.score(facts, policy, reference)

    def park(self) -> bool:
        return False

    def forget(self) -> None:
        self.worker.forget()

    def peak_memory(self) -> int:
        """Of this rank."""
        return self.worker.peak_memory()

    def numbers(self) -> dict[str, Any]:
        return self.worker.numbers()

    def write_state(self, folder: Path) -> None:
        self.worker.write_state(folder)

    def write_reference(self, folder: Path) -> None:
        self.worker.write_reference(folder)

    def finish_writing(self) -> None:
        self.worker.finish_writing()

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        self.worker.read_state(path, numbers)

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        return _union(self.worker.write_weights(folder, group))

    def mix_weights(self, weights: Path, share: float) -> None:
        self.worker.mix_weights(weights, share)
        dist.barrier()

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None:
        """All ranks write what they hold, and the first makes the model of it, a tensor at a time."""
        with beside(folder) if self.member.rank == 0 else nullcontext() as made:
            pieces = said_by_first(made)
            refusals = gathered(refusal(lambda: self.worker.write_weights(pieces, "model")))
            if self.member.rank == 0 and not any(refusals):
                refusals = [
                    refusal(lambda: self.worker.export(pieces, "model", tokenizer, folder, card))
                ]
            if told := said_by_first(next(filter(None, refusals), "")):
                raise DiskError(told)

    def _own(self, batches: Sequence[PairBatch]) -> list[PairBatch]:
        return shares(batches, self.layout.dp)[self.layout.dp_rank(self.member.rank)]


@contextmanager
def _not_repeated() -> Iterator[None]:
    """If one rank runs out of memory, the others wait in a collective: repeating its call would not help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise shortage(error) from error


def refusal(work: Callable[[], Any]) -> str:
    """Why the disk does not take what `work` writes, for all ranks to hear before one goes on; else nothing."""
    try:
        work()
    except DiskError as error:
        return str(error)
    return ""


def said_by_first(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def largest(number: int, kind: str) -> int:
    held = torch.tensor(number, device=kind)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def _union(written: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """What all ranks have written; none goes on before."""
    return {name: facts for each in gathered(written) for name, facts in each.items()}


def gathered(value: T) -> list[T]:
    """Of all ranks, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
