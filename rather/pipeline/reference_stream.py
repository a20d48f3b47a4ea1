"""Reference log-probs for each step: from the cache, or computed in turn with training or ahead.

Under torchrun the main driver reads the cache and asks for the rest; the others compute along.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles
from rather.config.schema import DPOConfig
from rather.data.batch import Columns, PairBatch, TokenPair
from rather.losses.objective import PairLoss
from rather.model.budget import PARKING_PAYS
from rather.parallel.load import compute_dtype
from rather.pipeline.guard import OutOfMemoryRetry
from rather.pipeline.sanity_checks import ROUNDING, refuse_foreign_tokens
from rather.pipeline.steps import (
    EVALUATION_CHUNK,
    Packing,
    PreparedSteps,
    ReferenceStep,
    Step,
    ahead,
)
from rather.pipeline.timeline import Timeline
from rather.reference.logps import ReferenceLogps
from rather.run_folder.layout import reference_log

log = logging.getLogger(__name__)

MANY_PAIRS = 100_000  # to look for them in the cache takes seconds (20 us each)


class ReferenceStream:
    """Attaches reference log-probs to the steps of a run; None if the loss has no reference.

    With `logps` the log-probs are cached: under torchrun the main driver reads and writes the
    cache, and the other drivers compute along with it. Without, every driver computes the log-probs
    of its own steps.
    """

    def __init__(
        self,
        config: DPOConfig,
        roles: Roles,
        packing: Packing,
        timeline: Timeline,
        retry: OutOfMemoryRetry,
        *,
        source: PreparedSteps | None = None,
        objective: PairLoss | None = None,
    ) -> None:
        self.config, self.roles, self.packing = config, roles, packing
        self.timeline, self.retry = timeline, retry
        self.logps: ReferenceLogps | None = None
        self._follows = False  # computes what the main driver asks for
        self._loaded = True
        self._turn = threading.Lock()  # prefetching and evaluation both ask the reference
        if source and objective:
            self._loaded, self.source = False, source
            self._follows = roles.reference is not None and not roles.is_main
            if roles.reference and roles.is_main:
                self.logps = ReferenceLogps(config, objective, self._ask)
                if not roles.here:
                    self.logps.device = "cpu"  # log-probs come from other processes

    # --- before the first step ---

    def open(self, newest: Checkpoint | None) -> bool:
        """Read the known log-probs; return whether the run needs the model of the reference."""
        known = self.logps
        if known is None:
            return False
        known.open(reference_log(self.config, newest))
        if self.config.reference.cache.recheck or self.config.eval_prompts or known.is_empty:
            return True
        data, rows = self.source.data, self.source.rows_after(newest.step if newest else 0)
        if len(rows) > MANY_PAIRS:
            log.info("reference: looking for %d pairs in %s", len(rows), known.folder)
        for dataset, wanted in [
            (data.train, rows),
            *((held, np.arange(len(held))) for held in data.evals.values()),
        ]:
            for first in range(0, len(wanted), EVALUATION_CHUNK):
                if not known.knows(dataset.take(wanted[first : first + EVALUATION_CHUNK])):
                    return True
        log.info(
            "reference: %s holds the log-probs of all pairs; the model is not loaded", known.folder
        )
        return False

    def load(self) -> None:
        """Load the model, if the loss has a reference."""
        if self.roles.reference:
            self.roles.reference.initialize(self.source.total_steps)
            refuse_foreign_tokens(self.config, self.source.data, self.roles.reference)
            self._loaded = True

    def parking(self) -> Callable[[], bool] | None:
        """Return what moves the model to the host, if that is allowed and steps are long enough."""
        config, reference = self.config, self.roles.reference
        if not self._loaded or config.reference.offload != "auto" or config.sync_ref_model:
            return None
        batches = self.packing.without_gradients(self.source.pairs_after(0), config.reference)
        pays = sum(batch.real_tokens for batch in batches) > PARKING_PAYS
        return reference.park if reference and pays else None

    def recheck(self, step: int) -> None:
        """Compare the known log-probs of some pairs, drawn by the seed, with the model."""
        count, role = self.config.reference.cache.recheck, self.config.reference
        if not (count and self.roles.reference):
            return
        if self.logps is None:
            self._compute_until_broadcast()
            return
        if pairs := self._known_pairs(self.logps, step, count):
            tolerance = ROUNDING[compute_dtype(role.model_args, self.roles.kind)]
            self.logps.recheck(pairs, self.packing.without_gradients(pairs, role), tolerance)
        self.roles.broadcast(None)

    def _known_pairs(self, known: ReferenceLogps, step: int, count: int) -> list[TokenPair]:
        rows = np.random.default_rng(self.config.seed).permutation(self.source.rows_after(step))
        pairs: list[TokenPair] = []
        for first in range(0, len(rows), EVALUATION_CHUNK):
            taken = self.source.data.train.take(rows[first : first + EVALUATION_CHUNK])
            pairs += [pair for pair in taken if known.knows([pair])]
            if len(pairs) >= count:
                break
        return pairs[:count]

    # --- step by step ---

    def with_reference(
        self, steps: Iterable[Step], done: int
    ) -> Generator[ReferenceStep, None, None]:
        """Yield each step after the first `done` with the reference log-probs of its pairs.

        On devices of its own the reference works one step ahead, but never past a step after which
        it moves.
        """
        if not self.roles.runs_ahead:
            yield from map(self._answer, steps)
            return
        every = self.config.ref_model_sync_steps if self.config.sync_ref_model else None
        remaining, until_it_moves = iter(steps), every and every - done % every
        while True:
            group = (self._answer(step) for step in islice(remaining, until_it_moves))
            count = 0
            with closing(ahead(group, 1)) as ready:
                for count, answered in enumerate(ready, 1):  # noqa: B007 - counts what came
                    yield answered
            if not count:
                return
            until_it_moves = every

    def columns(self, step: Step) -> Columns | None:
        """Return the reference log-probs of a step's pairs."""
        if self.roles.reference is None:
            return None
        if self._follows:
            return self._compute_until_broadcast()
        work = partial(self.logps.columns, step.pairs) if self.logps else self._compute
        with self._turn:
            columns = self.retry.without_gradients(self.roles.reference, step, work)
            if self.logps:
                self.roles.broadcast(dict(columns))
            return columns

    def keep(self) -> None:
        """Store the log-probs of a step. A reference that runs ahead has already done so."""
        if self.logps and not self.roles.runs_ahead:
            self.logps.keep()

    def follow_policy(self) -> None:
        """TR-DPO: move the reference towards the policy."""
        self.roles.move_reference(self.config.ref_model_mixup_alpha, self.config.run_dir)

    def _answer(self, step: Step) -> ReferenceStep:
        with self.timeline.span("reference", "log-probs", step.number) as span:
            columns = self.columns(step)
            if self.logps and self.roles.runs_ahead:
                with self._turn:  # a step's log-probs are stored before the next one asks
                    self.logps.keep()
        return ReferenceStep(step, columns, span.seconds)

    def _ask(self, batches: Sequence[PairBatch]) -> Columns:
        self.roles.broadcast(batches)
        return self._compute(batches)

    def _compute(self, batches: Sequence[PairBatch]) -> Columns:
        assert self.roles.reference is not None
        if not self._loaded:  # an entry that was there at the start can no longer be read
            self.load()
        columns = self.roles.reference.compute_log_probs(batches)
        return columns

    def _compute_until_broadcast(self) -> Columns | None:
        while isinstance(said := self.roles.broadcast(None), list):
            self._compute(said)
        found: Columns | None = said
        return found

    # --- files and numbers ---

    def sync(self) -> None:
        """Write the log-probs of all steps to the disk, for a checkpoint relies on them."""
        if self.logps:
            self.logps.sync()

    @property
    def used_cache(self) -> Path | None:
        """Where log-probs of this run came from that it did not compute."""
        return self.logps.folder if self.logps and self.logps.counts.pairs_from_cache else None

    def report(self) -> dict[str, Any] | None:
        return self.logps.report() if self.logps else None

    def log_counts(self) -> None:
        if self.logps:
            counts = self.logps.counts
            numbers = (counts.pairs_from_cache, counts.pairs_computed, counts.forwards)
            log.info(
                "reference log-probs: %d pairs from the cache, %d computed in %d forwards", *numbers
            )

    def close(self) -> None:
        if self.logps:
            self.logps.close()
