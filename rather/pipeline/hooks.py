"""What happens around the steps of a run: one hook for each thing.

The loop calls all hooks in the order of its list. Each decides by itself whether it is due.
`hooks_of_run` in rather/pipeline/run.py shows the list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rather.checkpoint.checkpoint import Checkpoint
from rather.config.values import WIN_RATE
from rather.data.shares import PairRows
from rather.errors import DiskError
from rather.losses.metrics import Window
from rather.losses.objective import PairLoss
from rather.pipeline.callbacks import Callbacks
from rather.pipeline.evaluation import Answers, Evaluation, Interrupted
from rather.pipeline.forgetting import Limits, drifts
from rather.pipeline.hook import Hook, Hooks, Record, is_due
from rather.pipeline.progress import RunState
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.requests import Requests
from rather.pipeline.saving import Saving
from rather.pipeline.steps import Packing, Step
from rather.pipeline.timeline import Timeline, Times
from rather.run_folder.layout import Incidents
from rather.tracking.json_lines import MetricsPosition
from rather.tracking.run import NoTracker
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

# Takes the number of steps done and a function that says whether to stop; returns metrics.
Evaluator = Callable[[int, Callable[[], bool]], Record]


# --- after each step, in this order ---


@dataclass
class WritePairLedger(Hook):
    """Adds the log-ratios and gradients of the step's pairs to the ledger."""

    tracker: NoTracker
    objective: PairLoss

    def after_step(self, step: Step, result: StepResult) -> None:
        if result.nonfinite:
            return
        assert isinstance(step.pairs, PairRows)
        assert result.ratios is not None
        assert result.pull is not None
        ratios = result.ratios.numpy().astype("f4")
        pull = result.pull.numpy().astype("f4")
        if not self.objective.needs_reference:
            ratios = ratios / step.pairs.lengths  # log-probs per token
        # The derivative of the pair's loss, times its own weight, by the difference of both
        # log-probs: beta * sigmoid(-beta * margin) for DPO.
        weight = pull * (result.sums["weight"] / 2)
        self.tracker.log_pairs(step.number, step.pairs, ratios, weight)


@dataclass
class CheckFirstStep(Hook):
    """Refuses a run whose policy and reference should be equal at step 1, and are not."""

    check: Callable[..., None]
    stream: ReferenceStream

    def after_step(self, step: Step, result: StepResult) -> None:
        if step.number != 1 or result.nonfinite or not step.reference_logps:
            return
        logps = result.policy, step.reference_logps["sum"]
        is_routed = "router_loss" in result.sums
        self.check(step.facts.length, *logps, self.stream.used_cache, routed=is_routed)


@dataclass
class CountStep(Hook):
    """Counts the step, its pairs and tokens, and its metrics for the next log line."""

    state: RunState
    timeline: Timeline
    weight_decay: float

    def after_step(self, step: Step, result: StepResult) -> None:
        progress = self.state.progress
        progress.step = step.number
        self.state.position = step.position
        self.timeline.finish_step(step, result)
        progress.count(result, self.weight_decay)
        # NaN would spoil the means of the whole log line; `skipped_iter` counts these steps.
        sums = {} if result.nonfinite else result.sums
        counts = {"pairs": len(step.pairs), "tokens": step.tokens, "skipped": result.skipped}
        progress.window.add(sums, **counts)


@dataclass
class MoveReference(Hook):
    """TR-DPO: moves the reference towards the policy every few steps."""

    every: int
    move: Callable[[], None]
    forget_reference: Callable[[], None]  # what evaluations have cached of it

    def after_step(self, step: Step, result: StepResult) -> None:
        if is_due(step.number, self.every):
            self.move()
            self.forget_reference()

    def on_rollback(self, newest: Checkpoint) -> None:
        self.forget_reference()


@dataclass
class LogMetrics(Hook):
    """Logs the means over the steps since the last log line."""

    every: int
    state: RunState
    timeline: Timeline
    epoch_at: Callable[[int], float]
    hooks: Hooks

    def after_step(self, step: Step, result: StepResult) -> None:
        if step.is_last or is_due(step.number, self.every):
            self.log(result)

    def log(self, result: StepResult) -> None:
        window = self.state.progress.window
        means = window.means() or Window(result.sums).means()  # none: those of the last step
        record = {**self.place(), **means, "grad_norm": result.grad_norm, "lr": result.lr}
        record |= {"pairs": window.pairs, "tokens": window.tokens}
        if result.zeros_in_grad is not None:
            record["num_zeros_in_grad"] = result.zeros_in_grad
        record["skipped_iter"] = window.skipped
        record |= self.timeline.window.record(window.pairs, window.tokens)
        self.hooks.call("on_log", record)
        self.state.progress.window = Window()
        self.timeline.window = Times()

    def place(self) -> Record:
        """Return where the run is: the first fields of each record."""
        step = self.state.progress.step
        return {"step": step, "epoch": self.epoch_at(step)}


@dataclass
class Evaluate(Hook):
    """Evaluates, keeps the best model, and decides about early stopping.

    An evaluation that a signal interrupts is repeated when the run resumes.
    """

    evaluators: Sequence[Evaluator]
    every: int | None
    state: RunState
    timeline: Timeline
    requests: Requests
    training_log: LogMetrics
    hooks: Hooks
    # None: evaluations have no influence on the run.
    metric_for_best: str | None = None
    patience: int | None = None
    limits: Limits = field(default_factory=Limits)
    save_best: Callable[[], None] | None = None
    # Only a run that is built from a config evaluates before its first step.
    evaluates_first: bool = False
    evaluation: Evaluation | None = None
    answers: Answers | None = None
    keeps_ledger: bool = False
    tracker: NoTracker = field(default_factory=NoTracker)

    def before_steps(self) -> None:
        if self.answers:
            self.answers.forget_unlogged()
        self.state.began_with_evaluation = False
        progress, numbers = self.state.progress, self.state.progress.unevaluated
        if not self.evaluates_first or (progress.step and not numbers):
            return
        before = None
        if numbers:
            before = StepResult({}, torch.empty(0, 2), skip_reason=None, **numbers)
        self.state.began_with_evaluation = True
        self.evaluate(before)

    def after_step(self, step: Step, result: StepResult) -> None:
        if step.is_last or step.ends_epoch or is_due(step.number, self.every):
            self.evaluate(result)

    def evaluate(self, result: StepResult | None) -> None:
        """Evaluate all sets; `result` is that of the last step, if there is one."""
        if not self.evaluators:
            return
        progress = self.state.progress
        progress.unevaluated = None
        try:
            metrics = self._measure()
        except Interrupted:
            if result:
                names = ("grad_norm", "lr", "zeros_in_grad")
                progress.unevaluated = {name: getattr(result, name) for name in names}
            return
        if not metrics:  # nothing is measured between the first step and the last
            return
        if self.evaluation and self.keeps_ledger:
            for pairs, ratios in self.evaluation.ratios():
                self.tracker.log_pairs(progress.step, pairs, ratios, None)
        self.hooks.call("on_evaluate", {**self.training_log.place(), **metrics})
        if progress.step == 0:
            progress.base |= drifts(metrics)
        if self.metric_for_best:
            problem = self.limits.problem(metrics, progress.base)
            scores = None
            if self.answers and self.metric_for_best.startswith(WIN_RATE):
                scores = self.answers.scores
            is_best = progress.judge(metrics, self.metric_for_best, self.patience, problem, scores)
            if is_best and self.save_best:
                self.save_best()
        if progress.stopped_early and result and progress.window.pairs:
            self.training_log.log(result)  # what the last log line did not contain

    def _measure(self) -> Record:
        progress = self.state.progress
        metrics: Record = {}
        if self.evaluation:
            self.evaluation.running = progress.running
        with self.timeline.span("evaluate"):
            for evaluator in self.evaluators:
                metrics |= evaluator(progress.step, self.requests.poll)
        return metrics


@dataclass
class KeepReferenceLogps(Hook):
    """Stores the reference log-probs of the step in the cache."""

    stream: ReferenceStream

    def after_step(self, step: Step, result: StepResult) -> None:
        self.stream.keep()


@dataclass
class EndRun(Hook):
    """Ends the run after its last step, on request, or if evaluations no longer improve."""

    state: RunState
    requests: Requests
    total_steps: int | None

    def before_steps(self) -> None:
        state = self.state
        state.is_over = state.progress.stopped_early
        if state.began_with_evaluation:  # its interruption, or a request, ends the run
            is_done = state.progress.step == self.total_steps
            state.is_over = self.requests.poll() or is_done or state.is_over

    def after_step(self, step: Step, result: StepResult) -> None:
        is_stopped = self.requests.after_step(result.requests)
        self.state.is_over = is_stopped or step.is_last or self.state.progress.stopped_early


@dataclass
class SaveCheckpoints(Hook):
    """Saves a checkpoint if one is due or requested, and at the end."""

    saving: Saving | None  # None: the run has no folder
    every: int | None
    state: RunState
    packing: Packing
    timeline: Timeline
    requests: Requests
    stream: ReferenceStream
    tracker: NoTracker
    hooks: Hooks

    def before_steps(self) -> None:
        if self.state.began_with_evaluation:
            self.save_if_due()

    def after_step(self, step: Step, result: StepResult) -> None:
        self.save_if_due()

    def save_if_due(self) -> None:
        step, is_over = self.state.progress.step, self.state.is_over
        # Do not answer a request before the first step: there is nothing to save yet.
        is_requested = step > 0 and self.requests.stop.saves
        if is_over or is_requested or is_due(step, self.every):
            self.stream.keep()
            self.save(last=is_over)

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint atomically; if it is the `last`, wait until it is written."""
        if not self.saving:
            return
        self.requests.stop.save_now = False
        progress = self.state.progress
        stored: Record = {"progress": asdict(progress), "micro_batches": self.packing.state()}
        if self.state.position is not None:
            stored["position"] = self.state.position
        with self.timeline.span("save"):
            self.saving.save(stored, progress.step, self._sync_files)
            if last:
                self.saving.wait(last=True)
        self.hooks.call("on_save")

    def _sync_files(self) -> MetricsPosition:
        """Write what a checkpoint relies on to the disk; return the position in metrics.jsonl."""
        if self.stream.logps:
            self.stream.logps.sync()
        return self.tracker.position()


@dataclass
class KeepRollbackTarget(Hook):
    """Saves a checkpoint before the first step, if the run may have to return to it."""

    checkpoints: SaveCheckpoints

    def before_steps(self) -> None:
        saving, progress = self.checkpoints.saving, self.checkpoints.state.progress
        assert saving is not None
        returned_to = [to for to, _ in progress.rollbacks[-1:]]
        if progress.step in returned_to or not saving.has_own:
            self.checkpoints.save()


# --- what follows the run ---


@dataclass
class TrackMetrics(Hook):
    """Sends every record to metrics.jsonl, the trackers, the console and the health watch."""

    tracker: NoTracker
    position_at: Callable[[Checkpoint], MetricsPosition]

    def on_log(self, record: Record) -> None:
        self.tracker.log(record)

    on_evaluate = on_log

    def on_rollback(self, newest: Checkpoint) -> None:
        self.tracker.go_back(self.position_at(newest), newest.step)


@dataclass
class PassOnRecords(Hook):
    """Gives every record to a function of the caller, in each process."""

    receive: Callable[[Record], None]

    def on_log(self, record: Record) -> None:
        self.receive(record)

    on_evaluate = on_log


@dataclass
class WriteSummary(Hook):
    """Writes what the run has taken so far next to each checkpoint."""

    write: Callable[[], None]

    def on_save(self) -> None:
        self.write()


@dataclass
class CallUserCallbacks(Hook):
    """Calls the user's callbacks, in the process that writes the metrics."""

    callbacks: Callbacks
    state: RunState

    def on_train_begin(self) -> None:
        self._call("on_train_begin")

    def on_log(self, record: Record) -> None:
        self._call("on_log", record)

    def on_evaluate(self, record: Record) -> None:
        self._call("on_evaluate", record)

    def on_save(self) -> None:
        self._call("on_save")

    def on_train_end(self) -> None:
        self._call("on_train_end")

    def _call(self, method: str, *arguments: Mapping[str, Any]) -> None:
        self.callbacks.call(method, self.state.progress.step, *arguments)


def save_best_model(
    export: Callable[[Path], object], folder: Path, saving: Saving | None, incidents: Incidents,
    state: RunState,
) -> None:  # fmt: skip
    """Export the best model; if the disk is full, the run continues without it."""
    try:
        export(folder)
        if saving:
            saving.upload_results()
    except DiskError as error:
        step = state.progress.step
        incidents.add("missed_save", step, folder=str(folder), reason=str(error))
        log.warning("MISSED SAVE of the best model at step %d: %s", step, error)
