"""Under torchrun every process fails when one does: the first cause is told once, and all exit alike."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from rather.cluster.elastic import agent_store, come, own_store
from rather.cluster.failure import GRACE, Failure, are_alike, first_cause
from rather.cluster.host import end_with_others
from rather.cluster.spmd import SpmdCluster
from rather.errors import RatherError, WorkerError

START = 5.0  # seconds for torchrun's store to answer; it was there before


def with_one_voice(work: Callable[[], int]) -> int:
    """Runs `work` in one of torchrun's processes, which does not outlive torchrun."""
    end_with_others()
    _refuse_orphans()
    try:
        return work()
    except Exception as error:
        own, role = Failure.of(error), _role_of(error)
        try:
            code = _Failures().settled(own, role)
        except dist.DistError:  # torchrun's store is gone, or not there yet
            code = _tell(own, own.error("", role or "actor_train"))
    raise SystemExit(code)


def _refuse_orphans() -> None:
    """An interrupt may end torchrun before this process could watch it; joining the others would then wait for long."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    try:
        agent_store(START)
    except dist.DistError:
        print("rather: torchrun, which started this process, is gone", file=sys.stderr, flush=True)
        raise SystemExit(WorkerError.exit_code) from None


class _Failures:
    """What the processes tell each other of their end, through torchrun's own store, which outlives them."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = own_store(GRACE)

    def settled(self, own: Failure, role: str | None) -> int:
        """The exit code of all, once it has been told why."""
        self.store.set(str(self.rank), json.dumps([asdict(own), role, socket.gethostname()]))
        if own.is_echo and come(self.store, ["code"], 2 * GRACE):
            return int(self.store.get("code"))
        if self.store.add("speakers", 1) > 1:
            come(self.store, ["code"], 2 * GRACE)
            return int(self.store.get("code"))
        heard = {rank: json.loads(self.store.get(str(rank))) for rank in self._failed()}
        failures = {rank: Failure(**fields) for rank, (fields, _, _) in heard.items()}
        rank = first_cause(failures)
        _, role, host = heard[rank]
        where = self._where(rank, role, host, alike=are_alike(failures, self.world))
        code = _tell(failures[rank], failures[rank].error(where, role or "actor_train"))
        self.store.set("code", str(code))
        return code

    def _failed(self) -> list[int]:
        """Ranks that have failed, after a while in which the others may."""
        come(self.store, [str(rank) for rank in range(self.world)], GRACE)
        return [rank for rank in range(self.world) if self.store.check([str(rank)])]

    def _where(self, rank: int, role: str | None, host: str, *, alike: bool) -> str:
        """Nowhere, where no role was asked and all ranks fail alike, or the first, which does what is done once."""
        if alike or (role is None and rank == 0):
            return f"{role}, all {self.world} ranks" if role else ""
        return f"{role + ' ' if role else ''}rank {rank} of {self.world} (on {host})"


def _tell(failure: Failure, error: RatherError) -> int:
    trace = "" if failure.is_ours else failure.trace
    print(f"{trace}rather: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _role_of(error: BaseException) -> str | None:
    """The role that was asked for what failed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(caller := frame.f_locals.get("self"), SpmdCluster):
            return caller.role
    return None
