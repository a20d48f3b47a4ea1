"""Run: resumes, trains and records the end of one run over given roles and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Role, Roles
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError, DataError, HangError, NonFiniteError, WorkerLost
from rather.losses.objective import from_config
from rather.pipeline.callbacks import Callback, Callbacks, RunView
from rather.pipeline.forgetting import Limits
from rather.pipeline.hook import Hook, Hooks, Record
from rather.pipeline.hooks import (
    CallUserCallbacks,
    CountStep,
    EndRun,
    Evaluate,
    Evaluator,
    KeepReferenceLogps,
    KeepRollbackTarget,
    LogMetrics,
    PassOnRecords,
    SaveCheckpoints,
    TrackMetrics,
)
from rather.pipeline.loop import RunParts, TrainingLoop
from rather.pipeline.progress import Progress, RunState
from rather.pipeline.saving import TOTAL_STEPS, Saving
from rather.pipeline.steps import NO_LIMIT, StepSource
from rather.plan.forecast import checkpoint_bytes
from rather.plan.memory import known_shapes
from rather.run_folder import control
from rather.run_folder.layout import RunFolder, mark_finished, mark_unfinished
from rather.tracking.health.watch import record_end
from rather.tracking.outcome import outcome_text
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import TrackedRun

log = logging.getLogger(__name__)


class Run:
    """A run over models in memory and steps that the caller packs. `run` trains it.

    No model is loaded or exported. DPOPipeline adds that.
    """

    def __init__(
        self,
        config: DPOConfig,
        roles: Roles,
        source: StepSource,
        *,
        identity: Mapping[str, Any],
        evaluate: Callable[[], Record] | None = None,
        on_record: Callable[[Record], None] | None = None,
        callbacks: Sequence[Callback] = (),
        run_dir: Path | None = None,
    ) -> None:
        """Build the parts of a run.

        - `config`: only settings of the loop are read, such as logging_steps, save_steps and
          on_nonfinite. `run_dir` replaces output_dir and exp_name. Model and data sections are not
          read, except to repack micro-batches that run out of memory.
        - `roles`: the models are loaded and belong to the caller: `initialize` and `plan` are never
          called. `train_step` gets the micro-batches as the source packed them, so each driver of a
          process group may supply its own pairs. Reference log-probs are not cached.
        - `source`: yields the steps. The run ends after the step with `is_last`, or earlier.
        - `identity`: what must match between a resumed run and its checkpoint, by the field names
          of rather.pipeline.checks.GUARDS ("data", "loss", "seed", ...). JSON values only.
        - `evaluate`: returns metrics, which get the prefix "eval/". Called after steps with
          `ends_epoch`, after the last step, and every eval_steps; not before the first step.
        - `on_record`: called with each record, after it was written to metrics.jsonl.
        - `callbacks`: called at points of the run.
        - `run_dir`: the folder for metrics, incidents and checkpoints. The run resumes from there;
          a finished run returns immediately. None: nothing is written or resumed.

        save_best, sync_ref_model and eval_prompts are not supported. No signal handlers are
        installed.
        """
        if run_dir is not None:
            place = {"output_dir": str(run_dir.parent), "exp_name": run_dir.name}
            config = config.model_copy(update=place)
        if config.save_best:
            raise ConfigError("save_best: only a run that is built from a config exports models.")
        self.config, self.roles, self.run_dir = config, roles, run_dir
        self.folder = RunFolder.of(config)
        self.stop = control.StopRequest()
        self.evaluators: list[Evaluator] = []
        if evaluate:
            self.evaluators.append(
                lambda *_: {f"eval/{name}": value for name, value in evaluate().items()}
            )
        self.callbacks, self.on_record = list(callbacks), on_record
        self.state = RunState()
        self.parts = RunParts.build(
            config,
            roles,
            source,
            from_config(config),
            self.state,
            saving=self._saving_of(source, identity) if run_dir else None,
            run_dir=run_dir,
            stop=self.stop,
        )
        if run_dir is None and self.parts.guard.rolls_back:
            raise ConfigError("on_nonfinite, spike.action: rollback needs an output folder.")
        self.parts.packing.tokens["train"] = NO_LIMIT

    def _saving_of(self, source: StepSource, identity: Mapping[str, Any]) -> Saving:
        config, actor = self.config, self.config.actor_train
        shapes = None
        if actor.model_args.model_name_or_path:  # else the model came in memory
            shapes = known_shapes(actor.model_path, actor.model_args)
        schedule = {
            TOTAL_STEPS: source.total_steps,
            **actor.training_args.model_dump(mode="json"),
            "max_grad_norm": config.max_grad_norm,
            "dtype": actor.model_args.dtype,
        }
        return Saving(
            self.folder,
            config,
            self.roles,
            identity,
            schedule,
            moves_reference=config.sync_ref_model,
            store=config.checkpoint_store,
            first_bytes=checkpoint_bytes(actor.model_args, config.precision, shapes or {}),
            deadline=config.timeouts.save,
        )

    @property
    def actor_train(self) -> ActorWorker:
        return self.roles.actor_train

    @property
    def reference(self) -> Role | None:
        return self.roles.reference

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def total_steps(self) -> int | None:
        return self.parts.source.total_steps

    @property
    def saving(self) -> Saving | None:
        return self.parts.saving

    def close(self) -> None:
        """End the worker processes. `run` does this itself."""
        self.roles.close()

    def run(self) -> int:
        """Train, complete the run folder, end all workers, and return the exit code."""
        with closing(self), ExitStack() as stack:
            if self.run_dir:
                stack.enter_context(self.folder.locked(is_main=self.roles.is_main))
            code = self._resume_and_train()
            if self.saving and (problem := self.saving.upload_problem()):
                log.warning("%s", problem)
            return code

    def _resume_and_train(self) -> int:
        parts, saving = self.parts, self.saving
        with closing(parts.reference_stream), closing(saving) if saving else nullcontext():
            newest = saving.to_resume() if saving else None
            if newest and saving and saving.is_finished(newest):
                self._report_finished(newest, saving)
                self._open_finished(newest)
                return 0
            self._start(newest)
            writes = self.run_dir is not None and self.roles.is_main
            if writes:
                mark_unfinished(self.config.run_dir)
            with ExitStack() as stack:
                followers = self._followers(stack, writes=writes)
                tracker = self._tracker(newest) if writes else NoTracker()
                try:
                    parts.timeline.restart()
                    with tracker:
                        TrainingLoop(parts, self._hooks(tracker, followers)).train()
                    self._end()
                except Exception as error:
                    if not isinstance(error, WorkerLost | HangError):  # `run` may start it again
                        self._report_outcome(error)
                    raise
            return self.stop.exit_code

    def _tracker(self, newest: Checkpoint | None, *, quiet: bool = True) -> RunTracker:
        return RunTracker(
            TrackedRun(self.config),
            total_steps=self.total_steps or 0,
            start_step=self.progress.step,
            metrics_position=self.folder.metrics_position(newest),
            quiet=quiet,
        )

    def _hooks(self, tracker: NoTracker, followers: Sequence[Hook]) -> Hooks:
        """Return the hooks of the run: first those that act after a step, in this order."""
        config, parts, state = self.config, self.parts, self.state
        total_steps, hooks = self.total_steps, Hooks()
        training_log = LogMetrics(
            config.logging_steps, state, parts.timeline, parts.source.epoch_at, hooks
        )
        checkpoints = SaveCheckpoints(
            parts.saving,
            config.interval("save_steps", total_steps),
            state,
            parts.packing,
            parts.timeline,
            parts.requests,
            parts.reference_stream,
            tracker,
            hooks,
        )
        hooks += self._first_hooks(tracker)
        hooks.append(parts.guard)
        if parts.saving and parts.guard.rolls_back:
            hooks.append(KeepRollbackTarget(checkpoints))
        weight_decay = config.actor_train.training_args.weight_decay
        hooks.append(CountStep(state, parts.timeline, weight_decay))
        hooks += self._reference_hooks()
        hooks += [
            training_log,
            self._evaluate_hook(training_log, tracker),
            KeepReferenceLogps(parts.reference_stream),
            EndRun(state, parts.requests, total_steps),
            checkpoints,
            TrackMetrics(tracker, self.folder.metrics_position),
        ]
        if self.on_record:
            hooks.append(PassOnRecords(self.on_record))
        hooks += followers
        if self.roles.is_main:
            view = RunView(self.run_dir, total_steps, self.stop)
            hooks.append(CallUserCallbacks(Callbacks(self.callbacks, view), state))
        return hooks

    def _evaluate_hook(self, training_log: LogMetrics, tracker: NoTracker) -> Evaluate:
        config, parts = self.config, self.parts
        tracks_best = config.save_best or config.early_stopping_patience
        return Evaluate(
            self.evaluators,
            config.interval("eval_steps", self.total_steps),
            self.state,
            parts.timeline,
            parts.requests,
            training_log,
            training_log.hooks,
            metric_for_best=config.metric_for_best_model if tracks_best else None,
            patience=config.early_stopping_patience,
            limits=Limits(config.drift_limit, config.forgetting_limit),
            tracker=tracker,
        )

    # --- what DPOPipeline adds ---

    def _first_hooks(self, tracker: NoTracker) -> list[Hook]:
        """Return what comes before the guard."""
        return []

    def _reference_hooks(self) -> list[Hook]:
        """Return what moves the reference."""
        return []

    def _followers(self, stack: ExitStack, *, writes: bool) -> list[Hook]:
        """Return hooks that follow the run and change nothing in it; the stack closes them."""
        return []

    def _open_finished(self, newest: Checkpoint) -> None:
        """Load a finished run: the caller uses the model afterwards."""
        self.parts.restore(newest)

    def _start(self, newest: Checkpoint | None) -> None:
        self.parts.restore(newest)

    def _export_result(self) -> None:
        """Export the trained model."""

    def _summarize(self) -> None:
        """Write what the run has taken so far."""

    def _log_next_commands(self) -> None:
        """Say what a user can do with the result."""

    # --- the end ---

    def _end(self) -> None:
        """Export the model and mark the run as finished, unless it was stopped."""
        step, requests = self.progress.step, self.parts.requests
        self._summarize()
        if requests.poll():
            log.info("Stopped and saved at step %d; run the same command again to resume.", step)
            return
        self.progress.refuse_no_update()
        self._export_result()
        self._report_outcome()
        self._log_next_commands()
        if self.run_dir and self.roles.is_main:
            mark_finished(self.run_dir, step)
        if requests.poll():
            log.info("The run had finished when it was asked to stop; nothing is left to do.")

    def outcome(self) -> Record:
        """Return what the run has changed so far, as rather.tracking.outcome describes it."""
        return self.progress.outcome()

    def _report_outcome(self, error: Exception | None = None) -> None:
        """Log what the run has changed; add it to report.json, and problems to health.jsonl."""
        outcome = self.outcome()
        log.info("Outcome: %s.", outcome_text(outcome))
        if self.run_dir and self.roles.is_main:
            record_end(self.run_dir, outcome, error)
        if error is None or isinstance(error, NonFiniteError | DataError):  # workers still answer
            self._summarize()

    def _report_finished(self, newest: Checkpoint, saving: Saving) -> None:
        """Log what ended a finished run, and settings that differ now and have no effect on it."""
        before, limit = newest.state["progress"], self.config.max_steps
        key = "max_steps" if limit and newest.step >= limit else "num_train_epochs"
        advice = f"{key} ended it; raise {key} to continue, or choose another exp_name"
        if before["stopped_early"]:
            metric = self.config.metric_for_best_model
            advice = Progress.of(before, 0).stop_reason(metric)
        log.info("%s is finished at step %d; %s", self.run_dir, newest.step, advice)
        changes = saving.schedule_changes(newest).items()
        if changes:
            listed = "; ".join(f"{key} was {then} and is now {now}" for key, (then, now) in changes)
            text = "%s: it was trained with other settings and is not trained again: %s"
            log.warning(text, self.run_dir, listed)
