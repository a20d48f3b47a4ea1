"""DPOPipeline: the training loop. Steps in order, reference log-probs, one optimizer step, then the hooks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles, launch
from rather.cluster.role import Role
from rather.cluster.supervision import Supervision
from rather.config.checks import device_problems, missing
from rather.config.schema import DPOConfig
from rather.data.batch import Columns
from rather.data.prepare import Prepared, prepare
from rather.data.template import tokenizer_of
from rather.errors import ConfigError, DataError, DiskError, Ended, HangError, WorkerLost
from rather.losses.metrics import Window
from rather.losses.objective import from_config
from rather.model.model_card import model_card
from rather.pipeline.eval_prompts import Answers
from rather.pipeline.evaluation import Evaluation, Interrupted
from rather.pipeline.guard import Guard
from rather.pipeline.identity import identity_of
from rather.pipeline.oom import Batches, OutOfMemoryRetry
from rather.pipeline.prefetch import ahead
from rather.pipeline.progress import Progress
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.sanity_checks import (
    check_step_zero,
    refuse_foreign_tokens,
    refuse_missing_columns,
)
from rather.pipeline.saving import Saving
from rather.pipeline.steps import Packing, PreparedSteps, Step, StepSource
from rather.pipeline.timeline import StepTimes, Timeline
from rather.reference.logps import ReferenceLogps
from rather.report.write import LiveReport
from rather.run_folder import control
from rather.run_folder.incidents import Incidents
from rather.run_folder.layout import mark_finished, mark_unfinished, metrics_position, trace_file
from rather.run_folder.lock import locked
from rather.run_folder.signals import StopRequest
from rather.tracking import NoTracker, RunTracker, check_installed
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

STEPS_AHEAD = 2  # steps that are packed before they are needed
NO_LIMIT = 1 << 40  # tokens of a micro-batch that the caller has packed

Record = dict[str, Any]


class RollBack(Exception):
    """The guard asks to return to a checkpoint because of a step."""

    def __init__(self, step: Step) -> None:
        self.step = step


class DPOPipeline:
    """Trains to the end, and resumes from the run folder. Built from a config, or by `from_parts`."""

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

    def __init__(self, pipeline_config: DPOConfig) -> None:
        """Start the roles that the config describes, and prepare its data files."""
        self.config = config = pipeline_config
        if problems := [f"{key}: {text}" for key, text, _ in missing(config)]:
            raise ConfigError(problems)
        check_installed(config.trackers)
        self.objective = from_config(config)  # a wrong number should be found before any work
        self.run_dir: Path | None = config.run_dir
        self.progress = Progress()
        self.stop = StopRequest()
        self.supervision = Supervision(
            config, Incidents(config.run_dir).add, lambda: self.progress.step, self._pause
        )
        wanted = self.objective.needs_reference
        self.roles = launch(config, with_reference=wanted, supervision=self.supervision)
        try:
            self._prepare()
            self._build()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_parts(
        cls,
        config: DPOConfig,
        roles: Roles,
        source: StepSource,
        *,
        identity: Mapping[str, Any],
        evaluate: Callable[[], Record] | None = None,
        on_record: Callable[[Record], None] | None = None,
        export: Callable[[Path], None] | None = None,
        run_dir: Path | None = None,
    ) -> DPOPipeline:
        """Build a pipeline over models that are in memory and steps that the caller packs. `run` trains it.

        - `config`: only the settings of the loop are read: logging_steps, eval_steps, save_steps, save_best with
          metric_for_best_model and early_stopping_patience, max_ckpt_to_keep, checkpoint_config, timeouts,
          on_nonfinite, max_nonfinite_steps, spike, resume_from_checkpoint, overwrite, resume.allow, track_with, and
          actor_train.training_args (which checkpoints remember). `output_dir` and `exp_name` are replaced by
          `run_dir`; model and data sections are not read, except that micro-batches that run out of memory are
          packed again by the layout of `actor_train`.
        - `roles`: the models are loaded and stay the caller's: `initialize` and `plan` are never called. The pipeline
          calls train_step, compute_log_probs, forget, numbers, write_state, finish_writing and read_state, on every
          driver. `train_step(step.policy, reference_columns, limits=...)` gets the
          micro-batches of the step as the source packed them, so each driver of a process group may bring pairs of
          its own. With `roles.reference`, `reference.compute_log_probs(step.reference)` gives `reference_columns`;
          nothing is cached.
        - `source`: yields the steps; see StepSource. The run ends after the step with `is_last`, or when early
          stopping ends it.
        - `identity`: what a resumed run must have in common with its checkpoint, by the field names of
          rather.pipeline.identity.GUARDS ("data", "loss", "seed", "global batch", ...). JSON values only.
        - `evaluate`: returns metrics whose names begin with "eval/". Called after steps with `ends_epoch`, after the
          last step, and every eval_steps; not before the first step.
        - `on_record`: called with each training and evaluation record, after it was written to metrics.jsonl.
        - `export`: writes the model to a folder; called on every driver, for save_best and after the last step. None: no
          model is exported.
        - `run_dir`: the folder for metrics.jsonl, incidents.jsonl, health.jsonl and checkpoints. The run resumes from
          there. None: nothing is written, nothing is resumed, nothing is exported, and on_nonfinite=rollback and
          save_best are refused.

        sync_ref_model and eval_prompts are not supported. Signals are left alone. If the run folder holds a finished
        run, `run` returns at once.
        """
        self = cls.__new__(cls)
        if run_dir is not None:
            place = {"output_dir": str(run_dir.parent), "exp_name": run_dir.name}
            config = config.model_copy(update=place)
        self.config, self.roles, self.source, self.run_dir = config, roles, source, run_dir
        self._evaluate_given, self._on_record = evaluate, on_record
        self._export, self.stop = export if run_dir else None, StopRequest()
        self._build_loop(identity)
        if run_dir is None and self.guard.rolls_back:
            raise ConfigError(
                "on_nonfinite, spike.action: rollback needs a folder for checkpoints."
            )
        if config.save_best and not self._export:
            raise ConfigError(
                "save_best: needs a folder for the best model; set one, or leave it out."
            )
        self.packing.train_tokens = NO_LIMIT
        self.reference_stream = ReferenceStream(
            config, roles, self.packing, self.timeline, self.retry
        )
        return self

    def _prepare(self) -> None:
        """Read the pairs of a config's data files."""
        config, roles = self.config, self.roles
        if problems := device_problems(config, roles.kind):
            raise ConfigError(problems)
        if not roles.is_main:
            roles.broadcast(None)  # one driver tokenises; the others find the result in the cache
        self.data = prepare(config)
        if roles.is_main:
            roles.broadcast(None)
        if len(self.data.train) == 0:
            raise DataError("0 pairs to train on: every row was dropped, see the table above.")
        refuse_missing_columns(config, self.objective, self.data)
        self.identity = identity_of(config, self.objective, self.data)
        self.source = PreparedSteps.of(config, self.data)

    def _build(self) -> None:
        """Build everything that depends on the roles; called again when they are replaced."""
        config, roles = self.config, self.roles
        assert isinstance(self.source, PreparedSteps)
        self._build_loop(self.identity)
        self.source = replace(self.source, packing=self.packing)
        self.reference_stream = ReferenceStream(
            config,
            roles,
            self.packing,
            self.timeline,
            self.retry,
            source=self.source,
            objective=self.objective,
        )
        self.evaluation = Evaluation(
            roles.actor_train, self.reference_stream, self.packing, self.retry, self.data.evals
        )
        self.answers = Answers(config, roles) if config.eval_prompts else None
        self._export = self._export_model
        self.summary = RunSummary(config, roles, self.source)

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

    def close(self) -> None:
        """End the processes of the workers. `run` does so itself."""
        self.roles.close()

    # --- a run ---

    def run(self, stop: StopRequest | None = None) -> int:
        """Train, complete the run folder, end all workers, and return the exit code.

        If workers are lost, training resumes from the last checkpoint with new ones. `stop`: the caller handles
        signals and has locked the run folder.
        """
        with closing(self), ExitStack() as stack:
            if stop is None and self.run_dir:
                stack.enter_context(locked(self.config, is_main=self.roles.is_main))
                if self.is_from_config:
                    stop = stack.enter_context(StopRequest())
            self.stop = stop or self.stop
            self.stop.last_saved = lambda: self.saving.last_saved if self.saving else None
            while True:
                try:
                    return self._run()
                except (WorkerLost, HangError) as error:
                    if self.roles.restart is None or self.stop.ends:
                        raise
                    self.supervision.survive(error, "worker_lost", "all workers are started again")
                    if number := self.stop.signal:
                        raise Ended(
                            number, "stopped while workers were restarting; run the command again"
                        ) from error
                self.config = self.supervision.config_to_resume()
                self.roles = self.roles.restart()
                self._build()

    @property
    def is_from_config(self) -> bool:
        return isinstance(self.source, PreparedSteps)

    def _pause(self, seconds: float) -> None:
        """Wait before workers are started again, unless the run is asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.ends and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, control.POLL_SECONDS))
            self._read_requests()

    def _run(self) -> int:
        with closing(self.reference_stream), closing(self.saving) if self.saving else nullcontext():
            newest = self.saving.to_resume() if self.saving else None
            if newest and self.saving and self.saving.is_finished(newest):
                early = newest.state["progress"]["stopped_early"]
                advice = "early stopping ended it" if early else "raise max_steps to train on"
                log.info("%s is finished at step %d; %s", self.run_dir, newest.step, advice)
                return 0
            self._start(newest)
            with self._observers(newest):
                self._train_until_end()
            return self.stop.exit_code

    def _start(self, newest: Checkpoint | None) -> None:
        """Load the models if need be, and the state of a checkpoint."""
        if not self.is_from_config:
            self._restore(newest)
            return
        with_reference = self.roles.broadcast(self.reference_stream.open(newest))
        self.summary.forecast(reference=with_reference)
        self.initialize(newest, with_reference=with_reference)
        self.stop.begin_training()
        self.evaluation.stopped = self._is_stopped
        self.reference_stream.recheck(self.progress.step)
        self.summary.begin(self.tokenizer, self.progress.step)

    def initialize(
        self,
        newest: Checkpoint | None = None,
        model: str | None = None,
        *,
        with_reference: bool = True,
    ) -> None:
        """Load tokenizer and models, then the state of a checkpoint.

        `model` replaces the weights of the policy. The reference is not needed if all its log-probs are cached.
        """
        assert self.total_steps is not None
        self.tokenizer = tokenizer_of(self.config.actor_train)
        self.actor_train.initialize(self.total_steps, model)
        refuse_foreign_tokens(self.config, self.data, self.actor_train)
        if with_reference:
            self.reference_stream.load()
        if self.answers:
            self.answers.begin(self.tokenizer, resumes=newest is not None)
        self._restore(newest)

    def _restore(self, newest: Checkpoint | None) -> None:
        if newest and self.saving:
            self.progress = self.saving.restore(newest)
            self.position = newest.state.get("position")

    @contextmanager
    def _observers(self, newest: Checkpoint | None) -> Iterator[None]:
        """Open what records a run: tracker, timeline and report. They close in this order, the report last."""
        self.tracker: RunTracker | NoTracker = NoTracker()
        writes = self.run_dir is not None and self.roles.is_main
        if writes:
            mark_unfinished(self.config.run_dir)
        wanted = writes and self.is_from_config and self.config.report_html
        with LiveReport(self.config.run_dir, wanted=wanted) as self.page:
            trace = trace_file(self.config, newest) if writes else None
            if writes:
                self.tracker = RunTracker(
                    self.config,
                    total_steps=self.total_steps or 0,
                    start_step=self.progress.step,
                    metrics_position=metrics_position(self.config, newest),
                    quiet=not self.is_from_config,
                )
            with self.tracker, self.timeline.drawn(trace):
                yield
            self._end()

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
        """Do what is due before the next step: an evaluation at step 0, or one that a signal interrupted.

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
        """Return to the newest good checkpoint; the step that caused it is skipped when it comes again."""
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
            if word:
                self.stop.end() if word == control.STOP else self.stop.ask_for_a_save()

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

    def _export_model(self, folder: Path) -> None:
        pairs, with_reference = len(self.data.train), self.reference is not None
        card = model_card(self.config, self.progress.step, pairs, with_reference=with_reference)
        self.actor_train.save_model(folder, self.tokenizer, card)

    def _end(self) -> None:
        """Export the model and mark the run as finished, unless it was stopped."""
        run_dir, step = self.config.run_dir, self.progress.step
        self._summarize()
        self.reference_stream.log_counts()
        if self._is_stopped():
            log.info("Stopped and saved at step %d; run the same command again to resume.", step)
            return
        if self._export:
            self._export(run_dir / "model")
            log.info("The trained model is in %s.", run_dir / "model")
        if self.run_dir and self.roles.is_main:
            mark_finished(run_dir, step)
        if self._is_stopped():
            log.info("The run had finished when it was asked to stop; nothing is left to do.")


def is_due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0
