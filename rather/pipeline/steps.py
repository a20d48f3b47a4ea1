"""The steps of a run: which pairs each of them takes, and how these are packed for the two roles."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    number: int = 0  # of the optimizer step, from 1

    @property
    def tokens(self) -> int:
        return sum(pair.tokens for pair in self.pairs)


class Answered(NamedTuple):
    """A step with the reference log-probs of its pairs, and the seconds that these took."""

    step: Step
    reference: Columns | None
    seconds: float


@dataclass(frozen=True)
class Course:
    """The pairs of a run, and the order in which its steps visit them."""

    data: Prepared
    order: Order
    total_steps: int

    @staticmethod
    def of(config: DPOConfig, data: Prepared) -> Course:
        groups = data.train.groups if config.group_responses else None
        order = Order(tuple(data.train.parts), config.global_batch(), config.data_seed, groups)
        pairs = order.pairs_in(0)
        if pairs == 0:
            raise DataError(
                "actor_train.data_args.weights: they leave 0 pairs of each file; raise them."
            )
        if pairs < order.batch:
            log.warning(
                "%d pairs are fewer than one step takes (%d): each epoch is one small step",
                pairs,
                order.batch,
            )
        epochs, limit = (
            config.actor_train.training_args.num_train_epochs,
            config.max_steps or math.inf,
        )
        return Course(data, order, order.steps(epochs, limit))

    def pairs_after(self, steps: int) -> Sequence[TokenPair]:
        """Those of the step that comes after so many."""
        return self.data.train.take(self.order.step(steps))

    def rows_after(self, step: int) -> NDArray[np.int64]:
        """Training pairs of the steps that are left."""
        visited = np.zeros(len(self.data.train), bool)
        for number in range(step, self.total_steps):
            visited[self.order.step(number)] = True
        return np.flatnonzero(visited)

    def epoch_at(self, step: int) -> float:
        return round(self.order.epoch_at(step), 4)


@dataclass(frozen=True)
class Packing:
    """Pairs -> micro-batches, by the layout and the sizes of each role and the kind of its devices."""

    config: DPOConfig
    kind: str  # of the devices: cpu or cuda
    here: bool  # the devices are those of this process
    without_gradients_tokens: dict[str, int] = field(
        default_factory=dict
    )  # by role, where memory has set a limit

    def to_train(self, pairs: Sequence[TokenPair], budget: int, number: int) -> Step:
        return self._step(pairs, self.policy(pairs, budget), number)

    def to_evaluate(self, pairs: Sequence[TokenPair]) -> Step:
        return self._step(pairs, self.without_gradients(pairs, self.config.actor_train))

    def policy(self, pairs: Sequence[TokenPair], budget: int) -> list[PairBatch]:
        """With gradients, in micro-batches of up to `budget` tokens."""
        return pack(
            pairs, budget, ladder=LADDER[self.kind], ranks=layout(self.config.actor_train).bins
        )

    def most_tokens(self, role: RoleConfig) -> int:
        """Of a micro-batch without activations to keep: twice the tokens of training fit."""
        name = "actor_train" if role.trains else "reference"
        told = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[self.kind]
        return self.without_gradients_tokens.get(name, told)

    def without_gradients(
        self, pairs: Sequence[TokenPair], role: RoleConfig, budget: int | None = None
    ) -> list[PairBatch]:
        budget = budget or self.most_tokens(role)
        return pack(
            pairs, budget, role.infer_batch_size, ladder=LADDER[self.kind], ranks=layout(role).bins
        )

    def _step(self, pairs: Sequence[TokenPair], policy: list[PairBatch], number: int = 0) -> Step:
        reference = self.without_gradients(pairs, self.config.reference)
        if self.here:
            policy, reference = (
                [batch.pinned() for batch in batches] for batches in (policy, reference)
            )
        return Step(pairs, policy, reference, number)
