"""DPOPipeline: builds the parts of a run from a config, or takes given ones, and trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import Roles, launch
from rather.cluster.supervision import Supervision
from rather.config.checks import device_problems, missing
from rather.config.run_config import DPOConfig
from rather.data.hub import refuse_unknown_model
from rather.data.prepare import prepare
from rather.data.template import tokenizer_of
from rather.data.trial import try_own_formats
from rather.errors import (
    ConfigError,
    DataError,
    DiskError,
    Ended,
    HangError,
    NonFiniteError,
    WorkerLost,
    counted,
)
from rather.losses.objective import Running, from_config
from rather.losses.own import METRICS
from rather.losses.trial import try_own_losses, try_own_metrics
from rather.model.export import model_card
from rather.pipeline.callbacks import Callback, Callbacks, RunView, registered_callbacks
from rather.pipeline.checks import (
    identity_of,
    refuse_foreign_tokens,
    refuse_missing_columns,
    refuse_other_bases,
)
from rather.pipeline.evaluation import Answers, Evaluation
from rather.pipeline.loop import Record, TrainingLoop
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.saving import Progress, Saving
from rather.pipeline.steps import NO_LIMIT, PreparedSteps, StepSource, log_length
from rather.registry import tool
from rather.run_folder import control
from rather.run_folder.layout import (
    RESULTS,
    Incidents,
    locked,
    mark_finished,
    mark_unfinished,
    metrics_position,
    trace_file,
    with_rounding_of_run,
)
from rather.tracking.health import record_end
from rather.tracking.outcome import outcome_text
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import check_installed

log = logging.getLogger(__name__)


class DPOPipeline(TrainingLoop):
    """Trains to the end, and resumes from the run folder. Built from a config or `from_parts`."""

    def __init__(self, pipeline_config: DPOConfig) -> None:
        """Start the roles that the config describes, and prepare its data files."""
        self.config = config = with_rounding_of_run(pipeline_config)
        if problems := [f"{key}: {text}" for key, text in missing(config)]:
            raise ConfigError(problems)
        for role in config.roles.values():
            refuse_unknown_model(role.model_path, role.model_args.revision)
        check_installed(config.trackers)
        self.objective = from_config(config)  # reports a wrong number before any work
        try_own_losses(self.objective)
        try_own_metrics(METRICS, with_reference=self.objective.needs_reference)
        try_own_formats(config)
        self._given_callbacks = registered_callbacks()
        self.run_dir, self.progress, self.stop = config.run_dir, Progress(), control.StopRequest()
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
        callbacks: Sequence[Callback] = (),
        run_dir: Path | None = None,
    ) -> DPOPipeline:
        """Build a pipeline over models in memory and steps that the caller packs. `run` trains it.

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

        No model is exported. save_best, sync_ref_model and eval_prompts are not supported. No
        signal handlers are installed.
        """
        self = cls.__new__(cls)
        if run_dir is not None:
            place = {"output_dir": str(run_dir.parent), "exp_name": run_dir.name}
            config = config.model_copy(update=place)
        self.config, self.roles, self.source, self.run_dir = config, roles, source, run_dir
        self.objective, self.evaluators = from_config(config), []
        if evaluate:
            self.evaluators.append(
                lambda *_: {f"eval/{name}": value for name, value in evaluate().items()}
            )
        self._on_record, self.stop = on_record, control.StopRequest()
        self._given_callbacks = list(callbacks)
        self._build_loop(identity)
        if run_dir is None and self.guard.rolls_back:
            raise ConfigError("on_nonfinite, spike.action: rollback needs an output folder.")
        if config.save_best:
            raise ConfigError("save_best: only a run that is built from a config exports models.")
        self.packing.tokens["train"] = NO_LIMIT
        self.reference_stream = ReferenceStream(config, roles, self.timeline, self.retry)
        return self

    def _prepare(self) -> None:
        """Read the pairs of a config's data files."""
        config, roles = self.config, self.roles
        if problems := device_problems(config, roles.kind):
            raise ConfigError(problems)
        if roles.is_main:
            refuse_other_bases(config)
        else:
            roles.broadcast(None)  # one driver tokenises; the others find the result in the cache
        self.data = prepare(config)
        if roles.is_main:
            roles.broadcast(None)
        if len(self.data.train) == 0:
            raise DataError(
                f"0 {config.unit} to train on: every row was dropped, see the table above."
            )
        refuse_missing_columns(config, self.objective, self.data)
        if self.objective.baseline_kind == "kl":
            self.data = self.data.with_partners(config.data_seed, config.sequence_length)
        # Only the main driver reads it, and it hashes the weights.
        self.identity = identity_of(config, self.objective, self.data) if roles.is_main else {}
        self.source = source = PreparedSteps.of(config, self.data)
        args = config.actor_train.training_args
        log_length(args, config.max_steps, source.total_steps, config.parity)

    def _build(self) -> None:
        """Build everything that depends on the roles; called again when they are replaced."""
        config, roles, source = self.config, self.roles, self.source
        assert isinstance(source, PreparedSteps)
        self._build_loop(self.identity)
        source.packing = self.packing
        self.reference_stream = ReferenceStream(
            config, roles, self.timeline, self.retry, source, self.objective
        )
        self.evaluation = Evaluation(
            roles.actor_train,
            self.reference_stream,
            self.retry,
            self.data.evals,
            source.pairs,
            self.objective,
            metrics=METRICS,
        )
        self.evaluators = [self.evaluation.record] if self.data.evals else []
        if config.eval_prompts:
            self.answers = Answers(config, roles)
            self.evaluators.append(self.answers.record)
        self.summary = RunSummary(config, roles, source)

    def close(self) -> None:
        """End the worker processes. `run` does this itself."""
        self.roles.close()

    def evaluate(self) -> Record:
        """Return the metrics of all evaluation sets; empty if there are none."""
        assert self.evaluation is not None
        return self.evaluation.record(self.progress.step, lambda: False)

    # --- a run ---

    def run(self, stop: control.StopRequest | None = None) -> int:
        """Train, complete the run folder, end all workers, and return the exit code.

        If workers are lost, training resumes from the last checkpoint with new ones. If `stop`
        is given, the caller handles signals and has locked the run folder.
        """
        with closing(self), ExitStack() as stack:
            if stop is None and self.run_dir:
                stack.enter_context(locked(self.config, is_main=self.roles.is_main))
                if self.summary:
                    stop = stack.enter_context(control.StopRequest())
            self.stop = stop or self.stop
            self.stop.last_saved = lambda: self.saving.last_saved if self.saving else None
            while True:
                try:
                    code = self._run()
                    if problem := self.saving.upload_problem() if self.saving else "":
                        if code == 0 and self.summary:
                            raise DiskError(problem)
                        log.warning("%s", problem)
                    return code
                except (WorkerLost, HangError) as error:
                    is_stopped = self.stop.signal is not None
                    if self.roles.restart is None or is_stopped:
                        raise
                    self.supervision.survive(error, "worker_lost", "all workers are started again")
                    if number := self.stop.signal:
                        text = "stopped while workers were restarting; run the command again"
                        raise Ended(number, text) from error
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
                self._report_finished(newest, self.saving)
                if not self.summary:  # the caller uses the model afterwards
                    self._restore(newest)
                return 0
            self._start(newest)
            config, writes = self.config, self.run_dir is not None and self.roles.is_main
            if writes:
                mark_unfinished(config.run_dir)
            wanted = writes and self.summary and config.report_html
            with tool("live_report")(config.run_dir, wanted=wanted) as self.page:
                trace, self.tracker = None, NoTracker()
                if writes:
                    trace = trace_file(config, newest)
                    self.tracker = RunTracker(
                        config,
                        total_steps=self.total_steps or 0,
                        start_step=self.progress.step,
                        metrics_position=metrics_position(config, newest),
                        quiet=not self.summary,
                    )
                try:
                    if self.roles.is_main:
                        view = RunView(self.run_dir, self.total_steps, self.stop)
                        self.callbacks = Callbacks(self._given_callbacks, view)
                    with self.tracker, self.timeline.drawn(trace):
                        self.callbacks.call("on_train_begin", self.progress.step)
                        while step := self._train():
                            self._roll_back(step)
                        self.callbacks.call("on_train_end", self.progress.step)
                    self._end()
                except Exception as error:
                    if not isinstance(error, WorkerLost | HangError):  # `run` may start it again
                        self._report_outcome(error)
                    raise
            return self.stop.exit_code

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

    def _start(self, newest: Checkpoint | None) -> None:
        """Load the models, unless the caller has, and the state of a checkpoint."""
        if not self.summary:
            self._restore(newest)
            return
        with_reference = self.roles.broadcast(self.reference_stream.open(newest))
        self.summary.forecast(reference=with_reference)
        self.initialize(newest, with_reference=with_reference)
        self.stop.begin_training()
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

        `model` replaces the weights of the policy. The reference is not needed if all its
        log-probs are cached.
        """
        assert self.total_steps is not None
        self.tokenizer = tokenizer_of(self.config.actor_train)
        assert isinstance(self.source, PreparedSteps)
        self.actor_train.open_pairs(self.source.pairs)
        self.actor_train.initialize(self.total_steps, model)
        refuse_foreign_tokens(self.config, self.data, self.actor_train)
        if with_reference:
            self.reference_stream.load()
        if self.answers:
            self.answers.begin(self.tokenizer, resumes=newest is not None)
        self._restore(newest)
        if model and self.evaluation and self.objective.baseline_kind == "mean":
            self.evaluation.running = self._running_mean(Path(model))

    def _running_mean(self, model: Path) -> Running | None:
        """Return the running mean reward of the run that exported a model; None if unknown."""
        newest = None
        if self.roles.is_main and model.name in RESULTS:
            newest = checkpoint.newest_good(model.parent, full=False)
        before = newest.state.get("progress", {}).get("running") if newest else None
        running: Running | None = before if before and before[0] else None
        if newest and running:
            text = "rewards are compared with %.4g, the running mean reward of %s"
            log.info(text, running[1], newest.path)
        elif self.roles.is_main:
            log.warning(
                "%s: no checkpoint with a running mean reward is next to it; rewards are compared "
                "with their mean over the held-out %s",
                model,
                self.config.unit,
            )
        return self.roles.broadcast(running)  # type: ignore[no-any-return]

    def _export_model(self, folder: Path) -> Mapping[str, float]:
        pairs, with_reference = len(self.data.train), self.reference is not None
        card = model_card(self.config, self.progress.step, pairs, with_reference=with_reference)
        kept = self.actor_train.save_model(folder, self.tokenizer, card)
        if folder.name != "model":  # the outcome of the run describes that one
            log.info("%s: %s", folder, kept)
        assert self.evaluation is not None
        self.evaluation.compare_file(folder)
        return kept.as_json()

    def _end(self) -> None:
        """Export the model and mark the run as finished, unless it was stopped."""
        step = self.progress.step
        self._summarize()
        if logps := self.reference_stream.logps:
            text = "reference log-probs: %s from the cache, %d computed (forward passes: %d)"
            cost = logps.counts
            cached = counted(cost.pairs_from_cache, self.config.unit)
            log.info(text, cached, cost.pairs_computed, cost.forwards)
        if self._is_stopped():
            log.info("Stopped and saved at step %d; run the same command again to resume.", step)
            return
        self.progress.refuse_no_update()
        if self.summary:
            self.changes = self._export_model(self.config.run_dir / "model")
            log.info("The trained model is in %s.", self.config.run_dir / "model")
        self._report_outcome()
        if self.summary:
            self._log_next_commands()
        if self.run_dir and self.roles.is_main:
            mark_finished(self.run_dir, step)
        if self._is_stopped():
            log.info("The run had finished when it was asked to stop; nothing is left to do.")

    def _log_next_commands(self) -> None:
        run = self.config.run_dir
        questions = {
            "problems that were found": f"rather health {run}",
            "charts of the run": f"rather report {run}",
        }
        if self.config.task != "reward":
            questions["answers of the model"] = f"rather chat {run}"
        if self.config.pair_ledger:
            questions["labels it disagrees with"] = f"rather pairs {run}"
        width = max(map(len, questions))
        lines = [f"  {what:<{width}}  {command}" for what, command in questions.items()]
        log.info("What next:\n%s", "\n".join(lines))

    def _report_outcome(self, error: Exception | None = None) -> None:
        """Log what the run has changed; add it to report.json, and problems to health.jsonl."""
        found = self.outcome()
        log.info("Outcome: %s.", outcome_text(found))
        if self.run_dir and self.roles.is_main:
            record_end(self.run_dir, found, error)
        if error is None or isinstance(error, NonFiniteError | DataError):  # workers still answer
            self._summarize()
