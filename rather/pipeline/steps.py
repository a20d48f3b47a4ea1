"""The steps of a run: which pairs each of them takes, and how they are packed for the two roles."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rather.config.schema import DPOConfig, RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, TokenPair
from rather.data.pack import pack
from rather.data.prepare import Prepared
from rather.data.sampler import Order
from rather.errors import DataError
from rather.model.budget import LADDER, TOKENS

log = logging.getLogger(__name__)

EVALUATION_CHUNK = 256  # pairs taken from disk at a time


@dataclass(frozen=True)
class Step:
    """The pairs of one optimizer step (or of a chunk of an evaluation set), packed for each role."""

    pairs: Sequence[TokenPair]
    policy: Sequence[PairBatch]
    reference: Sequence[PairBatch]
    number: int = 0  # of the optimizer step, starting at 1
    is_last: bool = False  # the run ends after this step
    ends_epoch: bool = False  # an evaluation is due after this step
    position: Mapping[str, Any] | None = None  # stored in checkpoints; see StepSource.steps

    @property
    def tokens(self) -> int:
        return sum(pair.tokens for pair in self.pairs)


class ReferenceStep(NamedTuple):
    """A step with the reference log-probs of its pairs, and the seconds that these took."""

    step: Step
    reference: Columns | None
    seconds: float


class StepSource(Protocol):
    """Where the steps of a run come from."""

    @property
    def total_steps(self) -> int | None:
        """The number of steps, or None if only `Step.is_last` marks the end."""

    def steps(self, done: int, position: Mapping[str, Any] | None) -> Iterator[Step]:
        """Yield the steps after the first `done`, numbered from `done + 1`, in order.

        `position` is the `Step.position` of step `done` as a checkpoint stored it (JSON values only), or None if that
        step had none. The pipeline iterates in a background thread, a few steps ahead of training, so this must not
        call a collective. It is called again, with an earlier step, when a run rolls back.
        """

    def epoch_at(self, step: int) -> float:
        """Return how many epochs `step` finished steps are, for the metrics."""

    def describe_pairs(self, step: Step, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return file and row (or whatever identifies a pair) of some pairs of a step, for
        incidents.jsonl.
        """


@dataclass(frozen=True)
class PreparedSteps:
    """The steps of a run over tokenised data files: a StepSource. Each step is a pure function of
    its number.
    """

    data: Prepared
    order: Order
    total_steps: int
    packing: Packing | None = None  # known once the roles have started

    @staticmethod
    def of(config: DPOConfig, data: Prepared) -> PreparedSteps:
        groups = data.train.groups if config.group_responses else None
        order = Order(tuple(data.train.parts), config.global_batch(), config.data_seed, groups)
        pairs = order.pairs_in(0)
        if pairs == 0:
            raise DataError("actor_train.data_args.weights leave 0 pairs of each file; raise them.")
        if pairs < order.batch:
            log.warning(
                "There are fewer pairs (%d) than a step takes (%d): each epoch is one small step.",
                pairs,
                order.batch,
            )
        epochs = config.actor_train.training_args.num_train_epochs
        return PreparedSteps(data, order, order.steps(epochs, config.max_steps or math.inf))

    def steps(self, done: int, position: Mapping[str, Any] | None = None) -> Iterator[Step]:
        assert self.packing is not None
        for number in range(done + 1, self.total_steps + 1):
            yield replace(
                self.packing.to_train(self.pairs_after(number - 1), number),
                is_last=number == self.total_steps,
                ends_epoch=self.order.ends_epoch(number),
            )

    def pairs_after(self, steps: int) -> Sequence[TokenPair]:
        """Return the pairs of the step that follows `steps` finished ones."""
        return self.data.train.take(self.order.step(steps))

    def rows_after(self, step: int) -> NDArray[np.int64]:
        """Return the training pairs that the remaining steps visit."""
        visited = np.zeros(len(self.data.train), bool)
        for number in range(step, self.total_steps):
            visited[self.order.step(number)] = True
        return np.flatnonzero(visited)

    def epoch_at(self, step: int) -> float:
        return round(self.order.epoch_at(step), 4)

    def describe_pairs(self, step: Step, places: Sequence[int]) -> list[dict[str, Any]]:
        train, files = self.data.train, self.data.report["train"]["files"]
        rows = self.order.step(step.number - 1)
        sources, numbers = train.column("source")[rows], train.column("number")[rows]
        described = []
        for place in places:
            own = {"id": step.pairs[place].id} if step.pairs[place].id else {}
            file = files[sources[place]]
            described.append({**own, "file": file["path"], file["unit"]: int(numbers[place])})
        return described


@dataclass
class Packing:
    """Packs pairs into micro-batches, by the layout and the sizes of each role."""

    config: DPOConfig
    kind: str  # of the devices: cpu or cuda
    here: bool  # the devices belong to this process
    train_tokens: int | None = None  # of a micro-batch with gradients; lowered when memory runs out
    without_gradients_tokens: dict[str, int] = field(default_factory=dict)  # by role, likewise

    def to_train(self, pairs: Sequence[TokenPair], number: int) -> Step:
        assert self.train_tokens is not None
        return self._step(pairs, self.policy(pairs, self.train_tokens), number)

    def to_evaluate(self, pairs: Sequence[TokenPair], number: int = 0) -> Step:
        batches = self.without_gradients(pairs, self.config.actor_train)
        return self._step(pairs, batches, number)

    def policy(self, pairs: Sequence[TokenPair], budget: int) -> list[PairBatch]:
        """Return micro-batches of up to `budget` tokens, to train on."""
        bins = layout(self.config.actor_train).bins
        return pack(pairs, budget, ladder=LADDER[self.kind], ranks=bins)

    def most_tokens(self, role: RoleConfig) -> int:
        """Return the size of a micro-batch without gradients: twice the tokens of training fit."""
        name = "actor_train" if role.trains else "reference"
        configured = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[self.kind]
        return self.without_gradients_tokens.get(name, configured)

    def without_gradients(
        self, pairs: Sequence[TokenPair], role: RoleConfig, budget: int | None = None
    ) -> list[PairBatch]:
        most, ladder = budget or self.most_tokens(role), LADDER[self.kind]
        return pack(pairs, most, role.infer_batch_size, ladder=ladder, ranks=layout(role).bins)

    def _step(self, pairs: Sequence[TokenPair], policy: list[PairBatch], number: int) -> Step:
        reference = self.without_gradients(pairs, self.config.reference)
        if self.here:
            policy, reference = (
                [b.pin_memory() for b in batches] for batches in (policy, reference)
            )
        return Step(pairs, policy, reference, number)


T = TypeVar("T")


class _Ended:
    """The last item of the thread: there are no more, or an error ended it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Yield the same items, made in a thread, at most `depth` of them before they are taken.

    An exception of the thread is raised where its item was expected. The thread ends when the
    iterator is exhausted or closed.
    """
    ready: SimpleQueue[T | _Ended] = SimpleQueue()
    room, closed = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        ended = _Ended()
        try:
            source = iter(items)
            while room.acquire() and not closed.is_set():
                ready.put(next(source))
        except StopIteration:
            pass
        except BaseException as error:  # raised where the item is taken
            ended = _Ended(error)
        ready.put(ended)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _Ended):
            room.release()
            yield item
        if item.error:
            raise item.error
    finally:
        closed.set()
        room.release()
        thread.join()
