"""RayRanks: starts one program on every device of a Ray cluster, watches it, and computes nothing.

Each rank gets the environment that torchrun would give it, and runs the same function. The store at
which ranks meet is in this process, so it outlives them: there they agree on the first cause of a
failure. Nothing is called in a step; once a second this process fetches what the first rank has
logged.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from rather.cluster.health import GRACE, ON_RAY, Cause, Failure, death, first_cause
from rather.cluster.rank_output import pass_on
from rather.cluster.resources import RankCalls, ResourceManager, Seat, names_of
from rather.cluster.supervision import report_first_failure
from rather.errors import RatherError, WorkerError, WorkerLost
from rather.run_folder.control import SAVES, StopRequest
from rather.tracking.run import DrawnProgress

LAST_WORDS = 6 * GRACE  # seconds in which ranks agree on the first cause of a failure
Program = Callable[[StopRequest], int]


class RayRanks:
    """The ranks of a job: those of the policy, then those of a reference apart."""

    def __init__(self, manager: ResourceManager, clusters: Callable[[], Sequence[Any]]) -> None:
        """`clusters` places the processes of all roles, or finds those that are there.

        Roles with equal device mappings share their ranks.
        """
        self.manager, self._clusters = manager, clusters
        self.attempt = 0
        self.progress = DrawnProgress()

    @property
    def seats(self) -> list[Seat]:
        by_mapping = {tuple(each.mapping): each.seats for each in self._clusters()}
        return [seat for seats in by_mapping.values() for seat in seats]

    def restart(self) -> None:
        """Start new processes in the place of those that are lost."""
        self.manager.renew()

    def run(self, program: Program, stop: StopRequest) -> int:
        """Run the program on all ranks; return its exit code, or raise the first cause."""
        seats = self.seats
        store, *place = self.manager.open_store(seats)
        self.attempt += 1
        environments = _environments(seats, place, self.attempt, self.manager.kind)
        running = [
            seat.handle.run.remote(environment, partial(_as_rank, program))
            for seat, environment in zip(seats, environments, strict=True)
        ]
        self.manager.forget_groups()  # ranks have their own
        peers = dist.PrefixStore(f"rather/{self.attempt}", store)  # type: ignore[attr-defined]
        try:
            return self._watch(running, seats, peers, stop)
        except RatherError:
            self.manager.stop()
            raise
        finally:
            self.progress.close()

    def _watch(
        self, running: Sequence[Any], seats: Sequence[Seat], store: Any, stop: StopRequest
    ) -> int:
        calls = RankCalls(self.manager, seats, running)
        codes, failures = calls.results, calls.failures
        sent, deadline = set[int](), float("inf")
        while calls.pending and time.monotonic() < deadline:
            calls.wait()
            self._fetch_output(seats[0], stop)
            self._forward(stop, seats, sent)
            if failures or any(codes.values()):
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
            if failures and _has_cause(store):
                break
        self._fetch_output(seats[0], stop)
        is_over = not (failures or calls.pending or _has_cause(store))
        # If the run was stopped, ranks of a reference apart end with 0 all the same.
        if is_over and set(codes.values()) <= {0, codes[0]}:
            return int(codes[0])
        cause = self._first_cause(store, calls, names_of(seats))
        cause.log_trace()
        raise cause.error

    def _fetch_output(self, seat: Seat, stop: StopRequest) -> None:
        """Log what the first rank has logged; from its first step on a stop saves first."""
        [output] = self.manager.ask([seat], "take_output")
        if output and pass_on(output, self.progress.draw):
            stop.begin_training()

    def _forward(self, stop: StopRequest, seats: Sequence[Seat], sent: set[int]) -> None:
        """Send a signal to all ranks, each once."""
        wanted = stop.signal or (SAVES if stop.save_now else None)
        if wanted is None or wanted in sent:
            return
        stop.save_now = False
        if wanted != SAVES:
            sent.add(wanted)
        self.manager.ask(seats, "request", int(wanted))

    def _first_cause(self, store: Any, calls: RankCalls, names: Sequence[str]) -> Cause:
        """Return why the attempt ends: what the ranks agreed on, unless they only noticed."""
        fields, where = json.loads(store.get("cause")) if _has_cause(store) else (None, "")
        failure = Failure(**fields) if fields else None
        killed = calls.killed()
        if killed and (failure is None or failure.kind == WorkerLost.__name__):
            rank, number = min(killed.items())  # the others could only say that it is gone
            return Cause(Failure.of(WorkerLost(death(number))), names[rank])
        if failure and not (failure.is_echo and calls.failures):  # an echo names who noticed
            return Cause(failure, where)
        if calls.failures:
            return first_cause(calls.failures, names)
        return Cause(
            Failure.of(WorkerError("some ranks ended and others did not, and none says why."))
        )


def _as_rank(program: Program, stop: StopRequest) -> int:
    """Run the program in the process of a rank; of a failure, all ranks find the first cause."""
    return report_first_failure(lambda: program(stop))


def _has_cause(store: Any) -> bool:
    return bool(store.check(["cause"]))


def _environments(
    seats: Sequence[Seat], place: Sequence[Any], attempt: int, kind: str
) -> list[dict[str, str]]:
    """Return what torchrun would set for each rank."""
    near, seen = Counter(seat.node for seat in seats), Counter[str]()
    found = []
    for rank, seat in enumerate(seats):
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(seats)),
                "LOCAL_RANK": str(seen[seat.node]),
                "LOCAL_WORLD_SIZE": str(near[seat.node]),
                "MASTER_ADDR": str(place[0]),
                "MASTER_PORT": str(place[1]),
                "TORCHELASTIC_RUN_ID": "rather",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                ON_RAY: kind,
            }
        )
        seen[seat.node] += 1
    return found
