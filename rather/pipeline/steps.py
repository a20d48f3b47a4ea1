"""The steps of a run: which pairs each of them takes, and how they are packed for the two roles."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rather.config.run_config import DPOConfig
from rather.config.schema import ActorConfig, RoleConfig, TrainingArgs
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared
from rather.data.sampler import Order
from rather.data.shares import TRAIN, Batches, PairRows, RunPairs
from rather.errors import DataError
from rather.model.budget import LADDER, TOKENS
from rather.optim.optimizer import warmup_of

log = logging.getLogger(__name__)

T = TypeVar("T")
EVALUATION_CHUNK = 256  # pairs taken from disk at a time
NO_LIMIT = 1 << 40  # tokens of a micro-batch that the caller has packed


@dataclass(frozen=True)
class Step:
    """The pairs of one optimizer step (or a chunk of an evaluation set), packed for each role."""

    pairs: Sequence[TokenPair]
    policy: Sequence[PairBatch]  # Batches, which are packed when they are needed, or given ones
    reference: Sequence[PairBatch]
    number: int = 0  # of the optimizer step, starting at 1
    is_last: bool = False  # the run ends after this step
    ends_epoch: bool = False  # an evaluation is due after this step
    position: Mapping[str, Any] | None = None  # stored in checkpoints; see StepSource.steps
    probe: Step | None = None  # what the baseline of the step is computed from, if there is one
    reference_logps: Columns | None = None  # attached by the ReferenceStream

    @property
    def facts(self) -> PairFacts:
        """What is known about the pairs that the policy trains on."""
        if isinstance(self.policy, Batches):
            return PairFacts.of_pairs(self.policy.own_pairs())
        return PairFacts.of_step(self.policy)

    @property
    def tokens(self) -> int:
        if isinstance(self.pairs, PairRows):
            return self.pairs.tokens
        return sum(pair.tokens for pair in self.pairs)


class StepSource(Protocol):
    """Where the steps of a run come from."""

    @property
    def total_steps(self) -> int | None:
        """The number of steps, or None if only `Step.is_last` marks the end."""

    def steps(self, done: int, position: Mapping[str, Any] | None) -> Iterator[Step]:
        """Yield the steps after the first `done`, numbered from `done + 1`, in order.

        `position` is the `Step.position` of step `done` as a checkpoint stored it (JSON values
        only), or None if that step had none. The pipeline iterates in a background thread, a few
        steps ahead of training, so this must not call a collective. It is called again, with an
        earlier step, when a run rolls back.
        """

    def epoch_at(self, step: int) -> float:
        """Return how many epochs `step` finished steps are, for the metrics."""

    def describe_pairs(self, step: Step, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return what identifies some pairs of a step, for incidents.jsonl."""


@dataclass
class PreparedSteps:
    """The steps of a run over tokenised data files. Each is a pure function of its number."""

    data: Prepared
    order: Order
    total_steps: int
    unit: str = "pairs"
    packing: Packing | None = None  # set once the roles have started

    @staticmethod
    def of(config: DPOConfig, data: Prepared) -> PreparedSteps:
        groups = data.train.groups if config.group_responses else None
        order = Order(tuple(data.train.parts), config.global_batch(), config.data_seed, groups)
        pairs = order.pairs_in(0)
        if pairs == 0:
            raise DataError("actor_train.data_args.weights leave 0 pairs of each file; raise them.")
        if pairs < order.batch:
            text = "There are fewer %s (%d) than a step takes (%d): each epoch is one small step."
            log.warning(text, config.unit, pairs, order.batch)
        epochs = config.actor_train.training_args.num_train_epochs
        total_steps = order.steps(epochs, config.max_steps or math.inf)
        return PreparedSteps(data, order, total_steps, config.unit)

    def steps(self, done: int, position: Mapping[str, Any] | None = None) -> Iterator[Step]:
        assert self.packing is not None
        for number in range(done + 1, self.total_steps + 1):
            self._epoch_at(number)
            yield replace(
                self.packing.step(self.step_pairs(number), number, "train"),
                is_last=number == self.total_steps,
                ends_epoch=self.order.ends_epoch(number),
            )

    @cached_property
    def pairs(self) -> RunPairs:
        """All pairs of the run, by the names of their sets."""
        evals = {f"eval/{name}": dataset for name, dataset in self.data.evals.items()}
        return RunPairs({TRAIN: self.data.train, **evals}, self.order)

    def step_pairs(self, number: int) -> PairRows:
        return PairRows(TRAIN, number, self.pairs)

    def rows_after(self, step: int) -> NDArray[np.int64]:
        """Return the training pairs that the remaining steps visit."""
        visited = np.zeros(len(self.data.train), bool)
        for number in range(step, self.total_steps):
            visited[self.order.step(number)] = True
        return np.flatnonzero(visited)

    def epoch_at(self, step: int) -> float:
        return round(self._epoch_at(step), 4)

    @cached_property
    def _epoch_at(self) -> Callable[[int], float]:
        return lru_cache(self.order.epoch_at)  # called as steps are made, then when they are logged

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


def log_length(args: TrainingArgs, max_steps: int | None, total_steps: int) -> None:
    """Log that the epochs end a run before max_steps, or that its warm-up is shortened."""
    if max_steps and total_steps < max_steps:
        log.warning(
            "max_steps: %d cannot be reached: num_train_epochs (%g) ends the run after %d steps",
            *(max_steps, args.num_train_epochs, total_steps),
        )
    if args.warmup_steps > total_steps:
        log.warning(
            "warmup_steps: %d is more than the %d steps of this run; warming up for %d of them "
            "instead",
            *(args.warmup_steps, total_steps, warmup_of(args, total_steps)),
        )


# What micro-batches are for: training, or log-probs of the policy or of the reference.
Use = Literal["train", "actor_train", "reference"]


@dataclass
class Packing:
    """Packs pairs into micro-batches, by the layout and the sizes of each role."""

    actor: ActorConfig
    reference: RoleConfig
    kind: str  # of the devices: cpu or cuda
    tokens: dict[Use, int] = field(default_factory=dict)  # lowered when memory runs out
    baseline: str | None = None  # the objective's baseline_kind
    limits: dict[Use, int] = field(default_factory=dict)  # what fitted before a resume
    at_end: bool = False  # a reward model reads the last token of an answer

    def __post_init__(self) -> None:
        default = 2 * TOKENS[self.kind]  # without gradients twice the tokens fit
        self.tokens["actor_train"] = self.configured["actor_train"] or default
        self.tokens["reference"] = self.configured["reference"] or default

    @cached_property
    def configured(self) -> dict[Use, int | None]:
        return {
            "train": self.actor.max_tokens_per_microbatch_in_train,
            "actor_train": self.actor.max_tokens_per_microbatch_in_infer,
            "reference": self.reference.max_tokens_per_microbatch_in_infer,
        }

    def set_train_tokens(self, planned: int) -> None:
        """Use the planned size for training, or that of the resumed run if it is smaller."""
        self.tokens["train"] = min(planned, self.limits.get("train", planned))
        if self.tokens["train"] < planned:
            text = "micro-batches have up to %d tokens, as before the resume (%d would fit now)"
            log.info(text, self.tokens["train"], planned)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the sizes that fit, and those of the config."""
        return {"tokens": dict(self.tokens), "configured": dict(self.configured)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Use no larger micro-batches than the run of a checkpoint: they would round differently.

        A size that was changed in the config since then is free. Older checkpoints store no sizes.
        """
        then = saved.get("configured", {})
        for use, tokens in saved.get("tokens", {}).items():
            if then.get(use) != self.configured[use]:
                continue
            self.limits[use] = tokens
            if use in self.tokens:  # else it is planned later
                self.tokens[use] = min(tokens, self.tokens[use])

    def pack(self, pairs: Sequence[TokenPair], use: Use, budget: int | None = None) -> Batches:
        """Return micro-batches of up to `budget` tokens; by default what is known to fit."""
        role = self.reference if use == "reference" else self.actor
        most_pairs = None if use == "train" else role.infer_batch_size
        budget, ladder = budget or self.tokens[use], LADDER[self.kind]
        side = "chosen" if use == "train" and self.baseline == "kl" else None
        return Batches(pairs, budget, most_pairs, ladder, layout(role).bins, side, self.at_end)

    def step(self, pairs: Sequence[TokenPair], number: int, use: Use = "actor_train") -> Step:
        """Name the micro-batches of both roles: for the policy to train on, or to evaluate."""
        probe = None
        if use == "train" and self.baseline:
            side = "rejected" if self.baseline == "kl" else "chosen"
            probe = Step(pairs, replace(self.pack(pairs, "actor_train"), side=side), (), number)
        policy, reference = self.pack(pairs, use), self.pack(pairs, "reference")
        return Step(pairs, policy, reference, number, probe=probe)


def chunks(
    dataset: PairDataset, rows: Sequence[int] | NDArray[np.int64] | None = None
) -> Iterator[Sequence[TokenPair]]:
    """Yield all pairs of a dataset, or those of some rows, a few at a time."""
    rows = range(len(dataset)) if rows is None else rows
    for first in range(0, len(rows), EVALUATION_CHUNK):
        yield dataset.take(rows[first : first + EVALUATION_CHUNK])


def ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Yield the same items, made in a thread, at most `depth` of them before they are taken.

    An exception of the thread is raised where its item was expected. The thread ends when the
    iterator is exhausted or closed.
    """
    ready: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
    room, closed = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        try:
            source = iter(items)
            while room.acquire() and not closed.is_set():
                ready.put((next(source),))
        except BaseException as error:  # also the StopIteration that ends the items
            ready.put(error)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while isinstance(item := ready.get(), tuple):
            room.release()
            yield item[0]
        if not isinstance(item, StopIteration):
            raise item
    finally:
        closed.set()
        room.release()
        thread.join()
