"""Workers that misbehave on purpose."""

from __future__ import annotations

import gc
import os
import pdb
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rather.cluster.memory import largest
from rather.cluster.worker import ActorWorker
from rather.data.batch import Columns, PairBatch
from rather.errors import DataError, NonFiniteError
from rather.pipeline import guard
from rather.run_folder.control import StopRequest
from tests.at_step import AtStep

SLOW = 0.6  # seconds of a slow reference, many times those of its pairs


class SlowReference(ActorWorker):
    """Keeps its caller waiting."""

    def compute_log_probs(self, *args: Any) -> Columns:
        threading.Event().wait(SLOW)
        return super().compute_log_probs(*args)


class SlowPolicy(ActorWorker):
    """As slow as the reference."""

    def train_step(self, *args: Any) -> Any:
        threading.Event().wait(SLOW)
        return super().train_step(*args)


class Breaks(ActorWorker):
    """Fails where a test says: RATHER_TEST_BREAK is `what`, and only the last rank does it."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        what, last = os.environ["RATHER_TEST_BREAK"], self.member.rank == self.member.world - 1
        if last and what == "raise":
            raise ValueError("boom")
        if last and what == "nonfinite":
            raise NonFiniteError("the loss is not finite")
        if what == "warn":
            self.log.warning("all say this")
            self.log.warning("only rank %d says this", self.member.rank)
            self.log.info("info of rank %d", self.member.rank)
        if last and what == "die":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
        if last and what == "hang":
            threading.Event().wait()
        if self.member.world > 1 and what != "none":
            dist.all_reduce(torch.ones(1))  # waits for the one that fails


class BreaksLater(AtStep):
    """The third step fails, on the last rank."""

    def before(self, step: int) -> None:
        if step == 3 and self.is_last:
            raise ValueError("boom at step 3")


class SmallDevice(ActorWorker):
    """Has memory for micro-batches of sixty tokens; they may be that small in its process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        guard.SMALLEST_BUDGET = 8

    def train_step(self, batches: Sequence[PairBatch], *args: Any) -> Any:
        self._hold(batches)
        return super().train_step(batches, *args)

    def compute_log_probs(self, batches: Sequence[PairBatch], *args: Any) -> Columns:
        self._hold(batches)
        return super().compute_log_probs(batches, *args)

    def _hold(self, batches: Sequence[PairBatch]) -> None:
        if (tokens := largest(batches)) > 60:
            error = torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines."
            )
            error.add_note(self.explain_memory(tokens))
            raise error


class FindsBadData(AtStep):
    """The second step cannot use its pairs."""

    def before(self, step: int) -> None:
        if step == 2:
            raise DataError("pair 7 has no token that is scored")


def stand_still(how: str, rank: int, world: int) -> None:
    """The last rank holds the others up: it sleeps, is stopped, or waits for something that nobody
    else does."""
    last = rank == world - 1
    if last and how == "sleep":
        threading.Event().wait()
    if last and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if last and how == "mismatch":
        dist.recv(torch.ones(1), src=0)
    if how != "none":
        dist.all_reduce(torch.ones(1))


class StandsStill(ActorWorker):
    """As RATHER_TEST_HANG says, with no model."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        stand_still(os.environ["RATHER_TEST_HANG"], self.member.rank, self.member.world)


class StopsOnce(AtStep):
    """Before the third step the last rank is stopped, unless torchrun has started it again."""

    def before(self, step: int) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and step == 3 and self.is_last:
            os.kill(os.getpid(), signal.SIGSTOP)


class SleepsLater(AtStep):
    """The third step never ends."""

    def before(self, step: int) -> None:
        if step == 3:
            threading.Event().wait()


class Paused(AtStep):
    """The second step is looked at with a debugger, which RATHER_TEST_KEYS tells to go on; at the
    third all stops."""

    def before(self, step: int) -> None:
        if step == 2:
            keys = Path(os.environ["RATHER_TEST_KEYS"])
            with keys.open() as typed, keys.with_name("screen").open("w") as screen:
                pdb.Pdb(stdin=typed, stdout=screen, nosigint=True, readrc=False).set_trace()
                screen.flush()
        if step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


class DiesOnce(ActorWorker):
    """Is killed in the third step, unless an earlier start was."""

    steps = 0

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        self.steps += 1
        mark = Path(os.environ["RATHER_TEST_ONCE"])
        if self.steps == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_log_probs(batches)


class AsksDriver(ActorWorker):
    """The driver gets SIGTERM in the call that RATHER_TEST_CALL names: role, method, number."""

    calls = 0

    def train_step(self, *args: Any) -> Any:
        self._ask("train_step")
        return super().train_step(*args)

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        self._ask("compute_log_probs")
        return super().compute_log_probs(batches)

    def _ask(self, method: str) -> None:
        role, called, number = os.environ["RATHER_TEST_CALL"].split()
        mark = Path(os.environ["RATHER_TEST_ONCE"])
        self.calls += (self.role, method) == (role, called)
        if self.calls == int(number) and not mark.exists():
            mark.touch()
            os.kill(int(os.environ["RATHER_TEST_DRIVER"]), signal.SIGTERM)
            requests = [each for each in gc.get_objects() if isinstance(each, StopRequest)]
            while not any(request.signal for request in requests):  # it comes within a second
                threading.Event().wait(0.05)
