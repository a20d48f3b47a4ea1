"""The training loop: steps in order, reference log-probs, one optimizer step, then the hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rather.cluster.launch import Roles
from rather.cluster.role import Role
from rather.config.schema import DPOConfig
from rather.data.batch import Columns
from rather.data.prepare import Prepared
from rather.errors import DiskError
from rather.losses.metrics import Window
from rather.pipeline.eval_prompts import Answers
from rather.pipeline.evaluation import Evaluation, Interrupted
from rather.pipeline.guard import Batches, Guard, OutOfMemoryRetry
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.sanity_checks import (
    check_step_zero,
)
from rather.pipeline.saving import Progress, Saving
from rather.pipeline.steps import Packing, PreparedSteps, Step, StepSource, ahead
from rather.pipeline.timeline import StepTimes, Timeline
from rather.reference.logps import ReferenceLogps
from rather.report.write import LiveReport
from rather.run_folder import control
from rather.run_folder.control import StopRequest
from rather.run_folder.incidents import Incidents
from rather.run_folder.layout import metrics_position
from rather.tracking.run import NoTracker, RunTracker
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

STEPS_AHEAD = 2  # steps that are packed before they are needed
NO_LIMIT = 1 << 40  # tokens of a micro-batch that the caller has packed

Record = dict[str, Any]


class RollBack(Exception):
    """The guard asks to return to a checkpoint because of a step."""

    def __init__(self, step: Step) -> None:
        self.step = step


class TrainingLoop:
    """The loop over given roles and steps, and its hooks. DPOPipeline builds the parts and runs it."""

    config: DPOConfig
    roles: Roles
    run_dir: Path | None  # None: nothing is written
    stop: StopRequest
    tracker: RunTracker | NoTracker
    page: LiveReport
    source: StepSource
    saving: Saving | None = None
    reference_stream: ReferenceStream
    position: Mapping[str, Any] | None  # of the source, after the last step
    data: Prepared
    evaluation: Evaluation
    answers: Answers | None = None
    summary: RunSummary
    _evaluate_given: Callable[[], Record] | None = None
    _on_record: Callable[[Record], None] | None = None
    _export: Callable[[Path], None] | None

    def _build_loop(self, identity: Mapping[str, Any]) -> None:
        """Build the parts of the loop that both ways of construction share."""
        config, roles, source = self.config, self.roles, self.source
        self.packing = Packing(config, roles.kind, roles.here)
        self.timeline = Timeline(in_turn=not roles.runs_ahead)
        self.incidents = Incidents(config.run_dir, silent=self.run_dir is None or not roles.is_main)
        self.retry = OutOfMemoryRetry(self.packing, self.incidents)
        if self.run_dir:
            self.saving = Saving(config, roles, identity, source.total_steps)
        self.guard = Guard(
            config.on_nonfinite, config.max_nonfinite_steps, config.spike, source, self.incidents
        )
        self.progress, self.position = Progress(), None
        self.hooks = (
            self._guard_step,
            self._count_step,
            self._sync_reference,
            self._log_if_due,
            self._evaluate_if_due,
            self._save_if_due,
        )

    @property
    def actor_train(self) -> Role:
        return self.roles.actor_train

    @property
    def reference(self) -> Role | None:
        return self.roles.reference

    @property
    def reference_logps(self) -> ReferenceLogps | None:
        return self.reference_stream.logps

    @property
    def total_steps(self) -> int | None:
        return self.source.total_steps

    @property
    def is_from_config(self) -> bool:
        return isinstance(self.source, PreparedSteps)

    def _train_until_end(self) -> None:
        while True:
            try:
                return self._train()
            except RollBack as request:
                self._roll_back(request.step)

    def _train(self) -> None:
        """The loop: each hook decides itself whether it is due."""
        if self._ends_before_a_step():
            return
        with closing(self.steps()) as packed, closing(self._with_reference(packed)) as steps:
            for step, reference, _ in self.timeline.awaited(steps):
                self.ends = step.is_last
                result = self._train_step(step, reference)
                for hook in self.hooks:
                    hook(step, result)
                if self.ends:
                    return

    def steps(self) -> Generator[Step, None, None]:
        """Yield the steps that are left, packed ahead in a background thread."""
        if self.progress.stopped_early:
            return
        done = self.progress.step
        if self.packing.train_tokens is None:  # planned before the background thread starts
            self.packing.train_tokens = self._plan()
        source = self.timeline.packed(self.source.steps(done, self.position), done)
        with closing(ahead(source, STEPS_AHEAD)) as ready:
            yield from ready

    def _with_reference(self, steps: Iterator[Step]) -> Generator[Any, None, None]:
        return self.reference_stream.with_reference(steps, self.progress.step)

    def _plan(self) -> int:
        """Return the tokens of a training micro-batch, by the memory that both models leave free."""
        largest = int(self.data.train.tokens.max())
        return self.actor_train.plan(largest, self.reference_stream.parking())

    def _train_step(self, step: Step, reference: Columns | None) -> StepResult:
        """Take one optimizer step; if memory runs out, again with smaller micro-batches."""
        limits = self.guard.limits(self.progress, step)

        def work(batches: Batches) -> StepResult:
            with self.timeline.span("actor_train", "train", step.number) as span:
                result = self.actor_train.train_step(batches, reference, limits=limits)
            self.timeline.times.train += span.seconds
            return result

        result = self.retry.train(self.actor_train, step, work)
        if self.is_from_config and step.number == 1 and reference and not result.nonfinite:
            logps = (result.policy, reference["sum"])
            used_cache = self.reference_stream.used_cache
            check_step_zero(self.config, self.roles.kind, step.pairs, *logps, used_cache)
        return result

    # --- hooks, in this order after each step ---

    def _guard_step(self, step: Step, result: StepResult) -> None:
        if not self.guard.accepts(self.progress, step, result):
            raise RollBack(step)

    def _count_step(self, step: Step, result: StepResult) -> None:
        self.progress.step, self.position = step.number, step.position
        self.timeline.finish_step(step)
        # NaN would spoil the means of the whole log line; `skipped_iter` counts these steps.
        sums = dict.fromkeys(result.sums, 0.0) if result.nonfinite else result.sums
        counts = {"pairs": len(step.pairs), "tokens": step.tokens, "skipped": result.skipped}
        self.progress.window.add(sums, **counts)

    def _sync_reference(self, step: Step, result: StepResult) -> None:
        """TR-DPO: move the reference towards the policy."""
        if self.config.sync_ref_model and is_due(step.number, self.config.ref_model_sync_steps):
            self.reference_stream.follow_policy()
            self._forget_reference()

    def _log_if_due(self, step: Step, result: StepResult) -> None:
        if self.ends or is_due(step.number, self.config.logging_steps):
            self._log_training(result)

    def _evaluate_if_due(self, step: Step, result: StepResult) -> None:
        if self.ends or step.ends_epoch or is_due(step.number, self.config.eval_steps):
            self._evaluate(result)
            self.ends = self.ends or self.progress.stopped_early

    def _save_if_due(self, step: Step, result: StepResult) -> None:
        self.reference_stream.keep()
        self.ends = self._is_stopped() or self.ends
        if self.ends or self.stop.saves or is_due(step.number, self.config.save_steps):
            self.save(last=self.ends)

    # --- what hooks do ---

    def _log_training(self, result: StepResult) -> None:
        window = self.progress.window
        record = {**window.means(), "grad_norm": result.grad_norm, "lr": result.lr}
        record |= {"pairs": window.pairs, "tokens": window.tokens}
        if result.zeros_in_grad is not None:
            record["num_zeros_in_grad"] = result.zeros_in_grad
        record["skipped_iter"] = window.skipped
        self._log(record | self.timeline.times.record(window.pairs, window.tokens))
        self.progress.window, self.timeline.times = Window(), StepTimes()
        self.page.log(evaluated=False)

    def _log(self, record: Record) -> None:
        step = self.progress.step
        record = {"step": step, "epoch": self.source.epoch_at(step), **record}
        self.tracker.log(record)
        if self._on_record:
            self._on_record(record)

    def evaluate(self) -> Record:
        """Return the metrics of all evaluation sets; empty if there are none."""
        if not self.is_from_config:
            return self._evaluate_given() if self._evaluate_given else {}
        return self.evaluation.record(self.progress.step)

    def _evaluate(self, result: StepResult | None) -> None:
        """Evaluate, keep the best model, and decide about early stopping.

        An evaluation that a signal interrupts is repeated when the run resumes after `result`.
        """
        config, progress = self.config, self.progress
        if not (
            self._evaluate_given or (self.is_from_config and (self.data.evals or self.answers))
        ):
            return
        try:
            with self.timeline.span("driver", "evaluate", progress.step):
                record = self.evaluate()
                if self.answers:
                    record |= self.answers.record(progress.step, self._is_stopped)
        except Interrupted:
            names = ("grad_norm", "lr", "zeros_in_grad")
            numbers = {name: getattr(result, name) for name in names} if result else None
            progress.unevaluated = numbers
            return
        progress.unevaluated = None
        self._log(record)
        self.page.log(evaluated=True)
        metric, patience = config.metric_for_best_model, config.early_stopping_patience
        judged = config.save_best or patience
        if judged and progress.judge(record, metric, patience) and config.save_best:
            self._save_best()
        if progress.stopped_early and result and progress.window.pairs:
            self._log_training(result)  # what the last log line did not contain

    def _ends_before_a_step(self) -> bool:
        """Do what is due before the next step: an evaluation at step 0, or one that a signal
        interrupted.

        Returns whether the run ends here.
        """
        progress, numbers = self.progress, self.progress.unevaluated
        if self.answers:
            self.answers.forget_unlogged()
        if self.saving and self.guard.needs_checkpoint(progress, self.saving):
            self.save()
        if not self.is_from_config or (progress.step and not numbers):
            return progress.stopped_early
        before = None
        if numbers:
            before = StepResult({}, torch.empty(0, 2), skip_reason=None, **numbers)
        self._evaluate(before)
        stopped, early = self._is_stopped(), progress.stopped_early
        last = early or progress.step == self.total_steps
        due = progress.step > 0 and is_due(progress.step, self.config.save_steps)
        if last or stopped or due:
            self.reference_stream.keep()
            self.save(last=last or stopped)
        return stopped or early

    def _roll_back(self, step: Step) -> None:
        """Return to the newest good checkpoint; the step that caused it is skipped when it comes
        again.
        """
        assert self.saving
        newest, self.progress = self.guard.roll_back(self.saving, self.progress, step)
        self.position = newest.state.get("position")
        self.tracker.go_back(metrics_position(self.config, newest), newest.step)
        self.timeline.times = StepTimes()
        if self.config.sync_ref_model:
            self._forget_reference()

    def _forget_reference(self) -> None:
        """The reference has moved: discard what evaluations know of it."""
        self.evaluation.forget_reference()
        if self.answers:
            self.answers.forget_reference()

    def _is_stopped(self) -> bool:
        """Return whether the run was asked to stop, by a signal to any driver or by `rather stop`."""
        self._read_requests()
        self.stop.agree(self.roles.max_over_drivers(self.stop.asked))
        return self.stop.stops

    def _read_requests(self) -> None:
        if self.run_dir and self.roles.is_main:
            word = control.take_requests(self.run_dir, self.progress.step)
            if word == control.STOP:
                self.stop.end()
            elif word:
                self.stop.save_now = True

    # --- what is kept ---

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint, complete or not at all. The last one is waited for."""
        if not self.saving:
            return
        self.stop.save_now = False
        state: Record = {"progress": asdict(self.progress)}
        if self.position is not None:
            state["position"] = self.position
        with self.timeline.span("driver", "save", self.progress.step):
            self.saving.save(state, self.progress.step, self._sync_files)
            if last:
                self.saving.wait(last=True)
        self._summarize()

    def _sync_files(self) -> int:
        """Write what a checkpoint relies on to the disk; return the length of metrics.jsonl."""
        self.reference_stream.sync()
        return self.tracker.position()

    def _summarize(self) -> None:
        if self.is_from_config:
            self.summary.report(self.progress.step, self.timeline.tally, self.reference_stream)

    def _save_best(self) -> None:
        """If the disk is full, the run continues without this model."""
        assert self._export
        folder = self.config.run_dir / "best_model"
        try:
            self._export(folder)
        except DiskError as error:
            facts = {"folder": str(folder), "reason": str(error)}
            self.incidents.add("missed_save", self.progress.step, **facts)
            log.warning("MISSED SAVE of the best model at step %d: %s", self.progress.step, error)


def is_due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0
