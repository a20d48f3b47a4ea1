"""Where drivers work themselves, a thread watches their calls: one that is not over in time ends the run, exit code 7.

Nothing can be raised in a thread that waits in a collective, so the process ends. Under torchrun all do: the watchdogs
meet in torchrun's store, and one tells what all of them saw. A process that was stopped as a whole and goes on has not
been late.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import wraps
from itertools import chain, repeat
from typing import Any

import torch.distributed as dist

from rather.cluster.deadlines import Limit
from rather.cluster.elastic import come, own_store
from rather.cluster.hang import ANSWER, Rank, hang_error
from rather.cluster.host import Process
from rather.cluster.role import RankInfo
from rather.cluster.stack_snapshot import Look, Pulse
from rather.cluster.supervision import Supervision
from rather.config.schema import DPOConfig
from rather.errors import HangError

LOOK_EVERY = 1.0  # seconds
PATIENCE = 30.0  # seconds for torchrun's store to answer on a busy machine
PAUSE = 5.0  # seconds between two looks that say that this process was stopped
STEPS = {"train_step": "step", "compute_log_probs": "step", "score": "eval"}
PHASES = {
    **STEPS,
    **dict.fromkeys(("initialize", "embedding_rows", "plan"), "start"),
    **dict.fromkeys(("write_state", "write_reference", "finish_writing", "read_state"), "save"),
    **dict.fromkeys(("write_weights", "mix_weights", "save_model"), "save"),
}
DEBUGGERS = ("bdb.py", "pydevd")


class Watchdog:
    """Of this process. Deadlines are as told: a rank also waits for what the first one does alone between steps."""

    def __init__(
        self, config: DPOConfig, member: RankInfo, supervision: Supervision | None
    ) -> None:
        self.config, self.member, self.supervision = config, member, supervision
        self.pulse = Pulse()
        self.limit: Limit | None = None
        self.told = config.timeouts
        self._over = threading.Event()
        self._others: _Others | None = None

    def watch(self, role: Any, phases: Mapping[str, str]) -> None:
        """From now on these calls of the role have deadlines."""
        for method, phase in phases.items():
            if hasattr(role, method):
                setattr(
                    role, method, self._timed(getattr(role, method), f"{role.role}.{method}", phase)
                )

    def start(self) -> None:
        """All processes come here."""
        self._others = _Others(self.member) if self.member.world > 1 else None
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    @contextmanager
    def during(self, call: str, phase: str) -> Iterator[None]:
        with self.pulse.during(call):
            before, self.limit = self.limit, Limit(getattr(self.told, phase), phase)
            try:
                yield
            finally:
                self.limit = before

    def _timed(self, work: Callable[..., Any], call: str, phase: str) -> Callable[..., Any]:
        first = ["first_step"] if phase == "step" else []
        phases = chain(first, repeat("eval" if call == "actor_train.compute_log_probs" else phase))

        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(call, next(phases)):
                return work(*args, **kwargs)

        return timed

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(LOOK_EVERY):
            now = time.monotonic()
            if now - looked > PAUSE:
                self.pulse.since += now - looked
            looked = now
            limit, late = (
                self.limit,
                self.limit is not None and self.pulse.seconds > self.limit.seconds,
            )
            if late or (self._others and self._others.are_late()):
                self._end(limit or Limit(self.told.save, "save"))

    def _end(self, limit: Limit) -> None:
        look = self.pulse.look()
        if any(name in look.stacks for name in DEBUGGERS):
            return
        try:
            if self._others:
                self._others.settle(look, limit, self._tell)
            else:
                self._tell([Rank(look.call, look)], limit)
                print(look.stacks, file=sys.stderr, flush=True)
        except dist.DistError:  # where a process keeps the store, it may be that which stands still
            self._tell([Rank(f"rank {self.member.rank} of {self.member.world}", look)], limit)
        os._exit(HangError.exit_code)

    def _tell(self, ranks: list[Rank], limit: Limit) -> None:
        error = hang_error(ranks, [], limit, self.config.log_dir)
        if self.supervision:
            self.supervision.note("hang", error)
        print(f"rather: {error}", file=sys.stderr, flush=True)


class _Others:
    """The processes that torchrun started with this one."""

    def __init__(self, member: RankInfo) -> None:
        self.rank, self.world, self.store = member.rank, member.world, own_store(PATIENCE)
        self.store.set(f"process {self.rank}", json.dumps(asdict(Process.this())))

    def are_late(self) -> bool:
        """Whether one of them was."""
        with suppress(dist.DistError):
            return bool(self.store.check(["late"]))
        return False

    def settle(self, look: Look, limit: Limit, tell: Callable[[list[Rank], Limit], None]) -> None:
        """Returns when it has been told who holds the others up. Who does not answer is ended by those beside it."""
        self.store.set(f"look {self.rank}", json.dumps(asdict(look)))
        self.store.set("late", "1")
        if self.store.add("tellers", 1) == 1:
            come(self.store, [f"look {rank}" for rank in range(self.world)], ANSWER)
            tell([self._rank(rank, look.call) for rank in range(self.world)], limit)
            self.store.set(
                "code", str(HangError.exit_code)
            )  # also for those who only see a connection break
        come(self.store, ["code"], 2 * ANSWER)
        for rank in range(self.world):
            if not self.store.check([f"look {rank}"]):
                self._process(rank).kill()

    def _rank(self, rank: int, call: str) -> Rank:
        found = self.store.check([f"look {rank}"])
        look = Look(**json.loads(self.store.get(f"look {rank}"))) if found else None
        role, _, method = call.partition(".")
        named = f"{role} " if method else ""
        return Rank(f"{named}rank {rank} of {self.world} (on {self._process(rank).machine})", look)

    def _process(self, rank: int) -> Process:
        return Process(**json.loads(self.store.get(f"process {rank}")))
