"""The training loop: for each step its reference log-probs, one update, and the hooks."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles
from rather.config.run_config import DPOConfig
from rather.data.shares import PairRows
from rather.errors import NonFiniteError
from rather.losses.objective import PairLoss
from rather.pipeline.guard import FIX, Batches, Guard, OutOfMemoryRetry, RollBack
from rather.pipeline.hook import Hooks
from rather.pipeline.progress import RunState
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.requests import Requests
from rather.pipeline.saving import Saving
from rather.pipeline.steps import Packing, PreparedSteps, Step, StepSource, ahead
from rather.pipeline.timeline import Timeline, Times
from rather.reference.logps import ReferenceLogps
from rather.run_folder.control import StopRequest
from rather.run_folder.layout import Incidents
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

STEPS_AHEAD = 2  # steps that are packed before they are needed


@dataclass
class RunParts:
    """What a run works with. It is built again when the roles are replaced."""

    roles: Roles
    source: StepSource
    objective: PairLoss
    packing: Packing
    timeline: Timeline
    incidents: Incidents
    retry: OutOfMemoryRetry
    guard: Guard
    reference_stream: ReferenceStream
    requests: Requests
    saving: Saving | None  # None: nothing is written
    state: RunState
    keeps_ledger: bool

    @staticmethod
    def build(
        config: DPOConfig,
        roles: Roles,
        source: StepSource,
        objective: PairLoss,
        state: RunState,
        *,
        saving: Saving | None,
        run_dir: Path | None,
        stop: StopRequest,
    ) -> RunParts:
        """Build the parts. Only steps from data files have cached reference log-probs."""
        packing = Packing(
            config.actor_train,
            config.reference,
            roles.kind,
            baseline=objective.baseline_kind,
            at_end=config.task == "reward",
        )
        timeline = Timeline(in_turn=not roles.runs_ahead)
        incidents = Incidents(config.run_dir, silent=run_dir is None or not roles.is_main)
        retry = OutOfMemoryRetry(packing, roles, incidents)
        every = config.ref_model_sync_steps if config.sync_ref_model else None
        stream = ReferenceStream(config.reference, roles, timeline, retry, moves_every=every)
        if isinstance(source, PreparedSteps):
            source.packing = packing
            stream.use_cache(source, objective, partial(ReferenceLogps, config, objective))
        requests = Requests(run_dir, roles, state, stop)
        if roles.drivers > 1:
            roles.actor_train.read_requests = requests.flags
        return RunParts(
            roles=roles,
            source=source,
            objective=objective,
            packing=packing,
            timeline=timeline,
            incidents=incidents,
            retry=retry,
            guard=Guard(
                config.on_nonfinite,
                config.max_nonfinite_steps,
                config.spike,
                source,
                incidents,
                state,
            ),
            reference_stream=stream,
            requests=requests,
            saving=saving,
            state=state,
            keeps_ledger=config.pair_ledger and isinstance(source, PreparedSteps),
        )

    def restore(self, newest: Checkpoint | None) -> None:
        """Load the state of a checkpoint, if there is one."""
        if newest and self.saving:
            self.state.progress = self.saving.restore(newest)
            self.state.position = newest.state.get("position")
            self.packing.restore(newest.state.get("micro_batches", {}))


class TrainingLoop:
    """Trains to the end: each step, then all hooks in their order."""

    def __init__(self, parts: RunParts, hooks: Hooks | None = None) -> None:
        self.parts, self.hooks = parts, hooks or Hooks()

    def train(self) -> None:
        """Train until a hook ends the run. A rollback continues from the last checkpoint."""
        self.hooks.call("on_train_begin")
        while True:
            try:
                self._train_to_the_end()
                break
            except RollBack as request:
                step = request.step
            # Outside the except block: the exception no longer keeps the failed step alive.
            self._roll_back(step)
        self.hooks.call("on_train_end")

    def _train_to_the_end(self) -> None:
        parts = self.parts
        self.hooks.call("before_steps")
        if self._is_over():
            return
        with (
            closing(self.packed_steps()) as packed,
            closing(parts.reference_stream.with_reference(packed)) as steps,
        ):
            for step in parts.timeline.awaited(steps):
                result = self.train_step(step)
                self.hooks.call("after_step", step, result)
                if self._is_over():
                    break

    def _is_over(self) -> bool:
        return self.parts.state.is_over  # set by a hook

    def packed_steps(self) -> Generator[Step, None, None]:
        """Yield the steps that are left, packed ahead in a background thread."""
        parts, source = self.parts, self.parts.source
        if "train" not in parts.packing.tokens:  # planned once both models are loaded
            assert isinstance(source, PreparedSteps)
            largest = int(source.data.train.tokens.max())
            parking = parts.reference_stream.parking()
            parts.packing.set_train_tokens(parts.roles.actor_train.plan(largest, parking))
        done = parts.state.progress.step
        named = map(self._pack, source.steps(done, parts.state.position))
        with closing(ahead(named, STEPS_AHEAD)) as ready:
            yield from ready

    def _pack(self, step: Step) -> Step:
        """Pack what the roles of this process will take of a step."""
        roles = self.parts.roles
        roles.actor_train.pack(step.policy)
        if step.probe:
            roles.actor_train.pack(step.probe.policy)
        if roles.reference:
            roles.reference.pack(step.reference)
            self.parts.reference_stream.prepare(step)
        if self.parts.keeps_ledger:
            assert isinstance(step.pairs, PairRows)
            step.pairs.read_numbers()
        return step

    def train_step(self, step: Step) -> StepResult:
        """Take one optimizer step; if memory runs out, retry with smaller micro-batches."""
        parts, policy = self.parts, self.parts.roles.actor_train
        progress, reference = parts.state.progress, step.reference_logps
        limits, running = parts.guard.limits(step), progress.running
        if step.probe and reference:
            with parts.timeline.span("train"):
                probed = parts.retry.run("actor_train", step.probe, policy.compute_log_probs)
            reference, running = parts.objective.with_baseline(probed, reference, running)

        def work(batches: Batches) -> StepResult:
            with parts.timeline.span("train"):
                return policy.train_step(batches, reference, limits)

        result = parts.retry.run("train", step, work)
        if not result.skipped:
            progress.running = running
        return result

    def _roll_back(self, step: int) -> None:
        """Return to the newest good checkpoint. `step` is skipped when it comes again."""
        parts, rollbacks = self.parts, self.parts.state.progress.rollbacks
        assert parts.saving
        newest = parts.saving.newest()
        if newest is None or newest.step in (to for to, _ in rollbacks):
            raise NonFiniteError(
                f"step {step}: cannot roll back: there is no good checkpoint, or the run "
                f"already rolled back to the newest one. {FIX}"
            )
        parts.incidents.add("rollback", step, to=newest.step)
        text = "step %d: rolling back to step %d; step %d will be skipped when it comes again"
        log.warning(text, step, newest.step, step)
        parts.restore(newest)
        parts.state.progress.rollbacks = [*rollbacks, [newest.step, step]]
        parts.timeline.window = Times()
        self.hooks.call("on_rollback", newest)
