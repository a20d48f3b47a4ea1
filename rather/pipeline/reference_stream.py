"""Reference log-probs for each step: from the cache, or computed in turn with training or ahead.

Under torchrun the main driver reads the cache and asks for the rest; the others compute along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.arithmetic import ceil_div
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.bridge import ReferenceApart
from rather.cluster.launch import Roles
from rather.config.schema import ReferenceConfig
from rather.data.batch import Columns, PairBatch
from rather.data.shares import Batches
from rather.losses.objective import PairLoss
from rather.model.budget import PARKING_PAYS
from rather.pipeline.checks import refuse_foreign_tokens
from rather.pipeline.guard import OutOfMemoryRetry
from rather.pipeline.steps import PreparedSteps, Step, chunks
from rather.pipeline.timeline import Timeline
from rather.reference.logps import ReferenceLogps, Request, needed_columns
from rather.run_folder.layout import RunFolder

log = logging.getLogger(__name__)


# What the main driver sends about the pairs of a step: their log-probs, or which of them all
# drivers compute now, with or without their shared tokens.
VALUES, COMPUTE, COMPUTE_SHARED = 0.0, 1.0, 2.0


class ReferenceStream:
    """Attaches reference log-probs to the steps of a run; None if the loss has no reference.

    Those of data files are cached: under torchrun the main driver reads and writes the cache, and
    the other drivers compute along with it. Without, every driver computes the log-probs of its own
    steps.
    """

    def __init__(
        self,
        section: ReferenceConfig,
        roles: Roles,
        timeline: Timeline,
        retry: OutOfMemoryRetry,
        *,
        moves_every: int | None = None,
    ) -> None:
        """`moves_every`: the steps between two moves of the reference (TR-DPO)."""
        self.section, self.roles, self.timeline, self.retry = section, roles, timeline, retry
        self.moves_every = moves_every
        self.logps: ReferenceLogps | None = None
        self._loaded, self._follows = True, False

    def use_cache(
        self,
        source: PreparedSteps,
        objective: PairLoss,
        open_logps: Callable[..., ReferenceLogps],
    ) -> None:
        """Take the steps of data files, whose log-probs are cached.

        `open_logps` is ReferenceLogps with all arguments but those of the model.
        """
        self.source, self._names = source, needed_columns(objective)
        self._loaded, self._follows = False, not self.roles.is_main
        reference = self.roles.reference
        if reference and self.roles.is_main:
            place: Any = {"device": reference.device, "kind": self.roles.kind}
            self.logps = open_logps(self._ask_model, **place)
            if not self.roles.apart:
                self.logps.announce = self._announce

    # --- before the first step ---

    def open(self, folder: RunFolder, newest: Checkpoint | None, *, answers: bool) -> bool:
        """Read the known log-probs; return whether the run needs the model of the reference.

        It does if the model `answers` prompts.
        """
        known = self.logps
        if known is None:
            return False
        known.open(folder.reference_log(newest))
        if answers or known.is_empty:
            return True
        data, rows = self.source.data, self.source.rows_after(newest.step if newest else 0)
        wanted = chain(chunks(data.train, rows), *map(chunks, data.evals.values()))
        if not all(map(known.knows, wanted)):
            return True
        text = "reference: %s holds the log-probs of all %s; the model is not loaded"
        log.info(text, known.folder, self.source.unit)
        return False

    def load(self) -> None:
        """Load the model, if the loss has a reference."""
        if self.roles.reference:
            self.roles.reference.open_pairs(self.source.pairs)
            self.roles.reference.initialize(self.source.total_steps)
            if self.roles.is_main:
                refuse_foreign_tokens(self.source.data, self.roles.reference)
            self._loaded = True

    def parking(self) -> Callable[[], bool] | None:
        """Return what moves the model to the host, if that is allowed and steps are long enough."""
        reference = self.roles.reference
        if not self._loaded or self.section.offload != "auto" or self.moves_every:
            return None
        batches = self.retry.packing.pack(self.source.step_pairs(1), "reference")
        pays = sum(batch.real_tokens for batch in batches) > PARKING_PAYS
        return reference.park if reference and pays else None

    # --- step by step ---

    def with_reference(self, steps: Iterator[Step]) -> Generator[Step, None, None]:
        """Yield each step with the reference log-probs of its pairs.

        On its own devices the reference works one step ahead, unless it moves in between.
        """
        if self._follows or not self.roles.runs_ahead:
            yield from map(self._answer, steps)
            return
        reference = self.roles.reference
        asked: _Asked | None = None  # the step before, which is not trained yet
        every = self.moves_every
        try:
            for step in steps:
                answered = asked and self._answer_of(asked)
                if answered and every and (step.number - 1) % every == 0:
                    yield answered  # the reference moves before the next question
                    answered = None
                asked = _Asked(self, step)
                if answered:
                    yield answered
            if asked:
                yield self._answer_of(asked)
        finally:
            if isinstance(reference, ReferenceApart):
                reference.drop_questions()

    def prepare(self, step: Step) -> None:
        """Do what can be done in a thread before the log-probs of a step are needed."""
        if self.logps:
            self.logps.prepare(step.pairs)

    def columns(self, step: Step) -> Columns | None:
        """Return the reference log-probs of a step's pairs."""
        if self.roles.reference is None:
            return None
        if self._follows:
            assert isinstance(step.reference, Batches)
            return self._compute_until_known(step.reference)
        return self._send(_Asked(self, step).wait())

    def ask(self, batches: Any) -> Callable[[], Columns]:
        """Ask for the log-probs of micro-batches; what is returned waits for them."""
        return self.logps.ask(batches) if self.logps else self._ask_model(batches)

    def _send(self, columns: Columns) -> Columns:
        """Send the columns to other drivers, in the thread that trains: all send in one order."""
        if self.logps and self.roles.drivers > 1:  # whose processes have other devices
            message = self._message(len(columns["sum"]))
            message[1:] = torch.cat([columns[name].cpu().flatten() for name in self._names])
            self.roles.broadcast_numbers(message)
        return columns

    def _message(self, pairs: int, kind: float = VALUES) -> Tensor:
        """Return a message about so many pairs: its kind, and room for each log-prob."""
        message = torch.zeros(1 + 2 * pairs * len(self._names), dtype=torch.float64)
        message[0] = kind
        return message

    def _announce(self, request: Request, pairs: int) -> None:
        """Ask the other drivers to compute along; `wanted` has fewer bytes than values."""
        message = self._message(pairs, COMPUTE_SHARED if request.shared else COMPUTE)
        wanted = np.frombuffer(request.wanted, np.uint8)
        message[1 : 1 + len(wanted)] = torch.from_numpy(wanted.astype(np.float64))
        self.roles.broadcast_numbers(message)

    def keep(self) -> None:
        """Store the log-probs of a step. A reference that runs ahead has already done so."""
        if self.logps and not self.roles.runs_ahead:
            self.logps.keep()

    def _answer(self, step: Step) -> Step:
        with self.timeline.span("reference"):
            return replace(step, reference_logps=self.columns(step))

    def _answer_of(self, asked: _Asked) -> Step:
        """Wait for the log-probs of a step that was asked for ahead."""
        columns, reference = asked.wait(), self.roles.reference
        if self.logps:  # a step's log-probs are stored before the next question
            self.logps.keep()
        assert isinstance(reference, ReferenceApart)
        self.timeline.spend("reference", reference.take_seconds())
        return replace(asked.step, reference_logps=self._send(columns))

    def _ask_model(self, batches: Sequence[PairBatch]) -> Callable[[], Columns]:
        reference = self.roles.reference
        assert reference is not None
        if not self._loaded:  # an entry that was there at the start can no longer be read
            self.load()
        if self.roles.runs_ahead and isinstance(reference, ReferenceApart):
            return partial(reference.await_log_probs, reference.ask_log_probs(batches))
        columns = reference.compute_log_probs(batches)
        return lambda: columns

    def _compute_until_known(self, batches: Batches) -> Columns:
        """Compute along with the main driver until it sends the log-probs of these pairs."""
        pairs = len(batches.pairs)
        while True:
            message = self._message(pairs)
            self.roles.broadcast_numbers(message)
            if message[0] == VALUES:
                columns = message[1:].view(len(self._names), pairs, 2)
                return dict(zip(self._names, columns, strict=True))
            wanted = message[1 : 1 + ceil_div(pairs, 8)].numpy().astype(np.uint8).tobytes()
            request = Request(wanted, shared=bool(message[0] == COMPUTE_SHARED))
            self._ask_model(request.of(batches))

    # --- files and numbers ---

    @property
    def used_cache(self) -> Path | None:
        """Return where log-probs of this run came from that it did not compute."""
        return self.logps.folder if self.logps and self.logps.counts.pairs_from_cache else None

    def close(self) -> None:
        if self.logps:
            self.logps.close()


class _Asked:
    """The reference log-probs of a step, on their way if the reference works ahead."""

    def __init__(self, stream: ReferenceStream, step: Step) -> None:
        self.step, self._stream = step, stream
        self._first = stream.ask(step.reference) if stream.roles.runs_ahead else None

    def wait(self) -> Columns:
        return self._stream.retry.run("reference", self.step, self._work)

    def _work(self, batches: Sequence[PairBatch]) -> Columns:
        """Return the answer; if memory ran out, ask again for smaller micro-batches."""
        answer, self._first = self._first or self._stream.ask(batches), None
        return answer()
