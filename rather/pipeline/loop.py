"""The training loop: reference log-probs, one optimizer step, and what is due after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles
from rather.cluster.role import Role
from rather.config.run_config import DPOConfig
from rather.data.batch import Columns
from rather.data.prepare import Prepared
from rather.data.shares import PairRows
from rather.errors import DiskError, NonFiniteError
from rather.losses.metrics import Window
from rather.losses.objective import PairLoss
from rather.pipeline.callbacks import NO_CALLBACKS, Callbacks
from rather.pipeline.checks import check_step_zero
from rather.pipeline.evaluation import Answers, Evaluation, Interrupted
from rather.pipeline.guard import FIX, Batches, Guard, OutOfMemoryRetry
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.saving import Progress, Saving
from rather.pipeline.steps import Packing, Step, StepSource, ahead
from rather.pipeline.timeline import Timeline, Times
from rather.registry import LiveReport
from rather.run_folder import control
from rather.run_folder.layout import Incidents, metrics_position
from rather.tracking.json_lines import MetricsPosition
from rather.tracking.run import NoTracker
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

STEPS_AHEAD = 2  # steps that are packed before they are needed

Record = dict[str, Any]
# Takes the number of steps done and a function that says whether to stop; returns metrics.
Evaluator = Callable[[int, Callable[[], bool]], Record]


class TrainingLoop:
    """The loop over given roles and steps. DPOPipeline builds the parts."""

    config: DPOConfig
    roles: Roles
    run_dir: Path | None  # None: nothing is written
    stop: control.StopRequest
    tracker: NoTracker
    page: LiveReport
    source: StepSource
    reference_stream: ReferenceStream
    evaluators: list[Evaluator]
    objective: PairLoss
    # Set only if the run was built from a config.
    data: Prepared
    evaluation: Evaluation | None = None
    answers: Answers | None = None
    summary: RunSummary | None = None
    _on_record: Callable[[Record], None] | None = None
    callbacks: Callbacks = NO_CALLBACKS
    _export_model: Callable[[Path], object]

    def _build_loop(self, identity: Mapping[str, Any]) -> None:
        """Build the parts that both constructors share."""
        config, roles, source = self.config, self.roles, self.source
        self.keeps_ledger = config.pair_ledger
        kind = self.objective.baseline_kind
        self.packing = Packing(config, roles.kind, baseline=kind)
        self.timeline = Timeline(in_turn=not roles.runs_ahead)
        self.incidents = Incidents(config.run_dir, silent=self.run_dir is None or not roles.is_main)
        self.retry = OutOfMemoryRetry(self.packing, roles, self.incidents)
        self.eval_every = config.interval("eval_steps", source.total_steps)
        self.save_every = config.interval("save_steps", source.total_steps)
        self.saving = Saving(config, roles, identity, source.total_steps) if self.run_dir else None
        self.guard = Guard(
            config.on_nonfinite, config.max_nonfinite_steps, config.spike, source, self.incidents
        )
        self.progress = Progress()
        self.position: Mapping[str, Any] | None = None  # of `source`, after the last step
        self.changes: Mapping[str, float] = {}  # of the weights, as the export found them

    @property
    def actor_train(self) -> Role:
        return self.roles.actor_train

    @property
    def reference(self) -> Role | None:
        return self.roles.reference

    @property
    def total_steps(self) -> int | None:
        return self.source.total_steps

    def _train(self) -> Step | None:
        """Train to the end; return a step only if it makes the run roll back."""
        if self._ends_before_a_step():
            return None
        stream = self.reference_stream
        with closing(self.steps()) as packed, closing(stream.with_reference(packed)) as steps:
            for step, reference in self.timeline.awaited(steps):
                result = self._train_step(step, reference)
                if not self.guard.accepts(self.progress, step, result):
                    return step
                if self._ends_after(step, result):
                    break
        return None

    def steps(self) -> Generator[Step, None, None]:
        """Yield the steps that are left, packed ahead in a background thread."""
        if self.progress.stopped_early:
            return
        if "train" not in self.packing.tokens:  # planned once both models are loaded
            largest = int(self.data.train.tokens.max())
            parking = self.reference_stream.parking()
            self.packing.set_train_tokens(self.actor_train.plan(largest, parking))
        done = self.progress.step
        named = map(self._pack, self.source.steps(done, self.position))
        source = self.timeline.packed(named, done)
        with closing(ahead(source, STEPS_AHEAD)) as ready:
            yield from ready

    def _pack(self, step: Step) -> Step:
        """Pack what the roles of this process will take of a step."""
        self.actor_train.pack(step.policy)
        if step.probe:
            self.actor_train.pack(step.probe.policy)
        if self.reference:
            self.reference.pack(step.reference)
            self.reference_stream.prepare(step)
        if self.keeps_ledger and isinstance(step.pairs, PairRows):
            step.pairs.read_numbers()
        return step

    def _train_step(self, step: Step, reference: Columns | None) -> StepResult:
        """Take one optimizer step; if memory runs out, retry with smaller micro-batches."""
        limits, running = self.guard.limits(self.progress, step), self.progress.running
        if step.probe and reference:
            with self.timeline.span("actor_train", "train", step.number):
                ask = self.actor_train.compute_log_probs
                probed = self.retry.run("actor_train", step.probe, ask)
            reference, running = self.objective.with_baseline(probed, reference, running)

        def work(batches: Batches) -> StepResult:
            with self.timeline.span("actor_train", "train", step.number):
                return self.actor_train.train_step(batches, reference, limits=limits)

        result = self.retry.run("train", step, work)
        if self.summary and self.keeps_ledger and not result.nonfinite:
            assert isinstance(step.pairs, PairRows)
            assert result.ratios is not None
            assert result.pull is not None
            ratios, pull = (each.numpy().astype("f4") for each in (result.ratios, result.pull))
            if not self.objective.needs_reference:
                ratios = ratios / step.pairs.lengths  # log-probs per token
            # The derivative of the pair's loss, times its own weight, by the difference of both
            # log-probs: beta * sigmoid(-beta * margin) for DPO.
            weight = pull * (result.sums["weight"] / 2)
            self.tracker.log_pairs(step.number, step.pairs, ratios, weight)
        if not result.skipped:
            self.progress.running = running
        if self.summary and step.number == 1 and reference and not result.nonfinite:
            lengths = step.facts.length
            used_cache = self.reference_stream.used_cache
            logps = (lengths, result.policy, reference["sum"])
            routed = "router_loss" in result.sums
            check_step_zero(self.config, self.roles.kind, *logps, used_cache, routed=routed)
        return result

    def _ends_after(self, step: Step, result: StepResult) -> bool:
        """Count a step, do what is due after it, and return whether the run ends."""
        config, number, ends = self.config, step.number, step.is_last
        self.progress.step, self.position = number, step.position
        self.timeline.finish_step(step, result)
        self.progress.count(result, config.actor_train.training_args.weight_decay)
        # NaN would spoil the means of the whole log line; `skipped_iter` counts these steps.
        sums = {} if result.nonfinite else result.sums
        counts = {"pairs": len(step.pairs), "tokens": step.tokens, "skipped": result.skipped}
        self.progress.window.add(sums, **counts)
        if config.sync_ref_model and is_due(number, config.ref_model_sync_steps):  # TR-DPO
            self.roles.move_reference(config.ref_model_mixup_alpha, config.run_dir)
            self._forget_reference()
        if ends or is_due(number, config.logging_steps):
            self._log_training(result)
        if ends or step.ends_epoch or is_due(number, self.eval_every):
            self._evaluate(result)
        self.reference_stream.keep()
        return self._ends_or_saves(ends)

    def _ends_or_saves(self, ends: bool) -> bool:
        """Return whether the run ends; save if so, or if a checkpoint is due or requested."""
        step, ends = self.progress.step, self._is_stopped() or ends or self.progress.stopped_early
        # A request that came before the first step is answered after it: step 0 is no progress.
        if ends or (step and self.stop.saves) or is_due(step, self.save_every):
            self.reference_stream.keep()
            self.save(last=ends)
        return ends

    def _log_training(self, result: StepResult) -> None:
        window = self.progress.window
        means = window.means() or Window(result.sums).means()  # none: those of the last step
        record = {**means, "grad_norm": result.grad_norm, "lr": result.lr}
        record |= {"pairs": window.pairs, "tokens": window.tokens}
        if result.zeros_in_grad is not None:
            record["num_zeros_in_grad"] = result.zeros_in_grad
        record["skipped_iter"] = window.skipped
        times = self.timeline.window.record(window.pairs, window.tokens)
        self._log(record | times, "on_log")
        self.progress.window, self.timeline.window = Window(), Times()
        self.page.log(evaluated=False)

    def _log(self, record: Record, method: str) -> None:
        """Log a record, and call a method of the callbacks with it."""
        step = self.progress.step
        record = {"step": step, "epoch": self.source.epoch_at(step), **record}
        self.tracker.log(record)
        if self._on_record:
            self._on_record(record)
        self.callbacks.call(method, step, record)

    def _evaluate(self, result: StepResult | None) -> None:
        """Evaluate, keep the best model, and decide about early stopping.

        An evaluation that a signal interrupts is repeated when the run resumes after `result`.
        """
        config, progress, record = self.config, self.progress, Record()
        if not self.evaluators:
            return
        try:
            if self.evaluation:
                self.evaluation.running = progress.running
            with self.timeline.span("driver", "evaluate", progress.step):
                for evaluate in self.evaluators:
                    record |= evaluate(progress.step, self._is_stopped)
        except Interrupted:
            names = ("grad_norm", "lr", "zeros_in_grad")
            numbers = {name: getattr(result, name) for name in names} if result else None
            progress.unevaluated = numbers
            return
        progress.unevaluated = None
        if self.evaluation and self.keeps_ledger:
            for pairs, ratios in self.evaluation.ratios():
                self.tracker.log_pairs(progress.step, pairs, ratios, None)
        self._log(record, "on_evaluate")
        self.page.log(evaluated=True)
        metric, patience = config.metric_for_best_model, config.early_stopping_patience
        tracks_best = config.save_best or patience
        if tracks_best and progress.judge(record, metric, patience) and config.save_best:
            self._save_best()
        if progress.stopped_early and result and progress.window.pairs:
            self._log_training(result)  # what the last log line did not contain

    def _ends_before_a_step(self) -> bool:
        """Do what is due before the next step, and return whether the run ends here.

        This may be a checkpoint to roll back to, and an initial or interrupted evaluation.
        """
        progress, numbers = self.progress, self.progress.unevaluated
        if self.answers:
            self.answers.forget_unlogged()
        if self.saving and self.guard.rolls_back:
            just_rolled_back = progress.step in (to for to, _ in progress.rollbacks[-1:])
            if just_rolled_back or not self.saving.has_own:
                self.save()
        if not self.summary or (progress.step and not numbers):
            return progress.stopped_early
        before = None
        if numbers:
            before = StepResult({}, torch.empty(0, 2), skip_reason=None, **numbers)
        self._evaluate(before)
        return self._ends_or_saves(progress.step == self.total_steps)

    def _roll_back(self, step: Step) -> None:
        """Return to the newest good checkpoint. `step` is skipped when it comes again."""
        assert self.saving
        newest, before = self.saving.newest(), self.progress.rollbacks
        if newest is None or newest.step in (to for to, _ in before):
            raise NonFiniteError(
                f"step {step.number}: cannot roll back: there is no good checkpoint, or the run "
                f"already rolled back to the newest one. {FIX}"
            )
        self.incidents.add("rollback", step.number, to=newest.step)
        text = "step %d: rolling back to step %d; step %d will be skipped when it comes again"
        log.warning(text, step.number, newest.step, step.number)
        self._restore(newest)
        self.progress.rollbacks = [*before, [newest.step, step.number]]
        self.tracker.go_back(metrics_position(self.config, newest), newest.step)
        self.timeline.window = Times()
        if self.config.sync_ref_model:
            self._forget_reference()

    def _restore(self, newest: Checkpoint | None) -> None:
        if newest and self.saving:
            self.progress = self.saving.restore(newest)
            self.position = newest.state.get("position")
            self.packing.restore(newest.state.get("micro_batches", {}))

    def _forget_reference(self) -> None:
        """Discard what evaluations have cached of the reference, which has moved."""
        if self.evaluation:
            self.evaluation.known.clear()
        if self.answers:
            self.answers.known = None

    def _is_stopped(self) -> bool:
        """Return whether the run was asked to stop: by a signal to any driver, or `rather stop`."""
        self._read_requests()
        self.stop.agree(self.roles.max_over_drivers(self.stop.asked))
        return self.stop.stops

    def _read_requests(self) -> None:
        if self.run_dir and self.roles.is_main:
            request = control.take_requests(self.run_dir, self.progress.step)
            if request == control.STOP:
                self.stop.end()
            elif request:
                self.stop.save_now = True

    # --- saving ---

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint atomically; if it is the `last`, wait until it is written."""
        if not self.saving:
            return
        self.stop.save_now = False
        state: Record = {
            "progress": asdict(self.progress),
            "micro_batches": self.packing.state(),
        }
        if self.position is not None:
            state["position"] = self.position
        with self.timeline.span("driver", "save", self.progress.step):
            self.saving.save(state, self.progress.step, self._sync_files)
            if last:
                self.saving.wait(last=True)
        self._summarize()
        self.callbacks.call("on_save", self.progress.step)

    def _sync_files(self) -> MetricsPosition:
        """Write what a checkpoint relies on to the disk; return the position in metrics.jsonl."""
        if self.reference_stream.logps:
            self.reference_stream.logps.sync()
        return self.tracker.position()

    def _summarize(self) -> None:
        if self.summary:
            self.summary.report(self.outcome(), self.timeline, self.reference_stream)

    def outcome(self) -> Record:
        """Return what the run has changed so far, as rather.tracking.outcome describes it."""
        return {**self.progress.outcome(), **self.changes}

    def _save_best(self) -> None:
        """Export the best model; if the disk is full, the run continues without it."""
        folder = self.config.run_dir / "best_model"
        try:
            self._export_model(folder)
            if self.saving:
                self.saving.upload_results()
        except DiskError as error:
            facts = {"folder": str(folder), "reason": str(error)}
            self.incidents.add("missed_save", self.progress.step, **facts)
            log.warning("MISSED SAVE of the best model at step %d: %s", self.progress.step, error)


def is_due(step: int, every: int | None) -> bool:
    return bool(step and every and step % every == 0)
