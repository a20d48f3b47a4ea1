"""DPOPipeline: builds the parts of a run from a config, or takes given ones, and runs the training
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles, launch
from rather.cluster.supervision import Supervision
from rather.config.checks import device_problems, missing
from rather.config.schema import DPOConfig
from rather.data.prepare import prepare
from rather.data.template import tokenizer_of
from rather.errors import ConfigError, DataError, Ended, HangError, WorkerLost
from rather.losses.objective import from_config
from rather.model.export import model_card
from rather.pipeline.eval_prompts import Answers
from rather.pipeline.evaluation import Evaluation
from rather.pipeline.identity import identity_of
from rather.pipeline.loop import NO_LIMIT, Record, TrainingLoop
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.sanity_checks import (
    refuse_foreign_tokens,
    refuse_missing_columns,
)
from rather.pipeline.saving import Progress
from rather.pipeline.steps import PreparedSteps, StepSource
from rather.report.write import LiveReport
from rather.run_folder import control
from rather.run_folder.control import StopRequest
from rather.run_folder.incidents import Incidents
from rather.run_folder.layout import (
    locked,
    mark_finished,
    mark_unfinished,
    metrics_position,
    trace_file,
)
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import check_installed

log = logging.getLogger(__name__)


class DPOPipeline(TrainingLoop):
    """Trains to the end, and resumes from the run folder. Built from a config, or by `from_parts`."""

    def __init__(self, pipeline_config: DPOConfig) -> None:
        """Start the roles that the config describes, and prepare its data files."""
        self.config = config = pipeline_config
        if problems := [f"{key}: {text}" for key, text in missing(config)]:
            raise ConfigError(problems)
        check_installed(config.trackers)
        self.objective = from_config(config)  # a wrong number should be found before any work
        self.run_dir = config.run_dir
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
        """Build a pipeline over models that are in memory and steps that the caller packs. `run`
        trains it.

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

        sync_ref_model and eval_prompts are not supported. Signals are left alone. If the run folder
        holds a finished run, `run` returns at once.
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

    def close(self) -> None:
        """End the processes of the workers. `run` does so itself."""
        self.roles.close()

    # --- a run ---

    def run(self, stop: StopRequest | None = None) -> int:
        """Train, complete the run folder, end all workers, and return the exit code.

        If workers are lost, training resumes from the last checkpoint with new ones. `stop`: the
        caller handles signals and has locked the run folder.
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
                    if self.roles.restart is None or self.stop.signal:
                        raise
                    self.supervision.survive(error, "worker_lost", "all workers are started again")
                    if number := self.stop.signal:
                        raise Ended(
                            number, "stopped while workers were restarting; run the command again"
                        ) from error
                self.config = self.supervision.config_to_resume()
                self.roles = self.roles.restart()
                self._build()

    def _pause(self, seconds: float) -> None:
        """Wait before workers are started again, unless the run is asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.signal and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, control.POLL_SECONDS))
            self._read_requests()

    def _run(self) -> int:
        with closing(self.reference_stream), closing(self.saving) if self.saving else nullcontext():
            newest = self.saving.to_resume() if self.saving else None
            if newest and self.saving and self.saving.is_finished(newest):
                early = newest.state["progress"]["stopped_early"]
                advice = "early stopping ended it" if early else "raise max_steps to train on"
                log.info("%s is finished at step %d; %s", self.run_dir, newest.step, advice)
                if not self.is_from_config:  # the caller uses the model afterwards
                    self._restore(newest)
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
        """Open what records a run: tracker, timeline and report. They close in this order, the
        report last.
        """
        self.tracker = NoTracker()
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
