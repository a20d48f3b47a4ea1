"""DPOPipeline: builds the parts of a run from a config, and trains it."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rich.console import Console

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.images import refuse_images
from rather.cluster.launch import launch
from rather.cluster.ray_ranks import RayRanks
from rather.cluster.supervision import Supervision
from rather.cluster.worker import ActorWorker
from rather.config.checks import device_problems, missing
from rather.config.found import Trust
from rather.config.run_config import DPOConfig
from rather.config.values import WIN_RATE
from rather.data.formats import FORMATS
from rather.data.hub import refuse_unknown_model
from rather.data.prepare import BadRows, Prepared, prepare
from rather.data.show import print_report
from rather.data.template import tokenizer_of
from rather.data.trial import try_own_formats
from rather.errors import (
    ConfigError,
    DataError,
    DiskError,
    Ended,
    HangError,
    WorkerLost,
    counted,
)
from rather.files import read_bytes, replace_own
from rather.losses.losses import LOSSES
from rather.losses.objective import Running, from_config
from rather.losses.own import METRICS
from rather.losses.trial import try_own_losses, try_own_metrics
from rather.outcome.habits import chosen_texts
from rather.outcome.result import LINES, run_result, shown_lines
from rather.pipeline.answers_at_end import AnswersAtEnd
from rather.pipeline.callbacks import CALLBACKS, registered_callbacks
from rather.pipeline.checks import (
    check_step_zero,
    identity_of,
    refuse_foreign_tokens,
    refuse_missing_columns,
    refuse_other_bases,
)
from rather.pipeline.evaluation import Answers, Evaluation, is_local
from rather.pipeline.forgetting import ForgettingCheck
from rather.pipeline.hook import Hook, Record
from rather.pipeline.hooks import (
    CheckFirstStep,
    Evaluate,
    Evaluator,
    LogMetrics,
    MoveReference,
    WritePairLedger,
    WriteSummary,
    save_best_model,
)
from rather.pipeline.loop import RunParts
from rather.pipeline.progress import RunState
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.run import Run
from rather.pipeline.run_summary import RunSummary
from rather.pipeline.steps import PreparedSteps, log_length
from rather.registry import tool
from rather.run_folder import control
from rather.run_folder.control import StopRequest
from rather.run_folder.layout import (
    RESULTS,
    Incidents,
    RunFolder,
    with_rounding_of_run,
    write_run_report,
)
from rather.run_folder.names import DATA_REPORT
from rather.run_folder.names import METRICS as METRICS_FILE
from rather.tracking.json_lines import append_line, strict_json
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import check_installed

log = logging.getLogger(__name__)

PREPARE = "prepare"  # the key of `timeouts` while the first driver tokenizes


class DPOPipeline(Run):
    """Trains to the end, and resumes from the run folder."""

    run_dir: Path

    def __init__(self, pipeline_config: DPOConfig, *, is_watched: bool = False) -> None:
        """Start the roles that the config describes, and prepare its data files.

        `is_watched`: end this process if a call misses its deadline, as commands do.
        """
        self.config = config = with_rounding_of_run(pipeline_config)
        if problems := [f"{key}: {text}" for key, text in missing(config)]:
            raise ConfigError(problems)
        for role in config.roles.values():
            refuse_unknown_model(role.model_path, role.model_args.revision)
        check_installed(config.trackers)
        self.objective = from_config(config)  # reports a wrong number before any work
        try_own_losses(self.objective)
        try_own_metrics(METRICS, with_reference=self.objective.needs_reference)
        sections = config.actor_train.data_args, config.validation.data_args
        try_own_formats(config, config.rows, *sections)
        self.callbacks, self.on_record = registered_callbacks(), None
        self.run_dir, self.stop = config.run_dir, StopRequest()
        self.folder = RunFolder.of(config)
        self.state = RunState()
        self.supervision = Supervision(
            config.run_dir,
            config.max_failures,
            config.failure_backoff,
            Incidents(config.run_dir).add,
            self._steps_done,
            self._pause,
        )
        self.roles = launch(
            config,
            with_reference=self.objective.needs_reference,
            supervision=self.supervision,
        )
        if self.roles.ranks:  # each of them does the rest
            try:
                self._refuse_what_cannot_travel()
            except ConfigError:
                self.close()
                raise
            return
        try:
            if is_watched:
                self.roles.watch()
            self._prepare()
            self._build()
        except BaseException:
            self.close()
            raise

    def _refuse_what_cannot_travel(self) -> None:
        """Refuse what a script has defined and ranks would have to use."""
        data = self.config.actor_train.data_args, self.config.validation.data_args
        CALLBACKS.refuse_from_scripts(CALLBACKS)
        METRICS.refuse_from_scripts(METRICS)
        LOSSES.refuse_from_scripts(term.name for term in self.objective.terms)
        FORMATS.refuse_from_scripts(each.format for each in data if each.format in FORMATS)

    def _prepare(self) -> None:
        """Read the pairs of the config's data files."""
        config, roles = self.config, self.roles
        if problems := device_problems(config, roles.kind):
            raise ConfigError(problems)
        if roles.is_main:
            refuse_other_bases(config.roles)
        else:
            # One driver tokenises; the others find the result in the cache.
            roles.broadcast(None, PREPARE)
        with roles.during("prepare", PREPARE):
            self.data: Prepared = prepare(config)
        if roles.is_main:
            roles.broadcast(None, PREPARE)
        if len(self.data.train) == 0:
            raise DataError(
                f"0 {config.unit} to train on: every row was dropped, see the table above."
            )
        refuse_missing_columns(self.objective, self.data)
        refuse_images(config.actor_train, config.reference, self.data)
        if self.objective.baseline_kind == "kl":
            self.data = self.data.with_partners(config.data_seed, config.sequence_length)
        # Only the main driver reads it, and it hashes the weights.
        self.identity = identity_of(config, self.objective, self.data) if roles.is_main else {}
        self.source = PreparedSteps.of(config, self.data)
        args = config.actor_train.training_args
        log_length(args, config.max_steps, self.source.total_steps)

    def _build(self) -> None:
        """Build everything that depends on the roles; called again when they are replaced."""
        config, roles, source = self.config, self.roles, self.source
        self.state = RunState()
        self.parts = parts = RunParts.build(
            config,
            roles,
            source,
            self.objective,
            self.state,
            saving=self._saving_of(source, self.identity),
            run_dir=self.run_dir,
            stop=self.stop,
        )
        self.evaluation = Evaluation(
            roles.actor_train,
            parts.reference_stream,
            parts.retry,
            self.data.evals,
            source.pairs,
            self.objective,
            metrics=METRICS,
        )
        self.evaluators: list[Evaluator] = [self.evaluation.record] if self.data.evals else []
        self.answers: Answers | None = None
        if config.eval_prompts:
            self.answers = Answers(
                config.eval_prompts,
                roles,
                source.total_steps,
                run_dir=self.run_dir,
                data_args=config.actor_train.data_args,
                sequence_length=config.sequence_length,
                is_always_judged=config.selects_by(WIN_RATE),
            )
        is_whole = all(is_local(role) for role in (roles.actor_train, roles.reference) if role)
        if self.answers and is_whole:
            self.evaluators.append(self.answers.record)
        self.forgetting: ForgettingCheck | None = None
        if config.task != "reward":  # which writes no text
            data_args, length = config.actor_train.data_args, config.sequence_length
            self.forgetting = ForgettingCheck.of(
                config, data_args, length, roles, parts.retry, self.state, source
            )
        if self.forgetting:
            self.evaluators.append(self.forgetting.record)
        self.at_end: AnswersAtEnd | None = None
        if not is_whole and (self.answers or self.forgetting):
            role = config.reference if self.objective.needs_reference else config.actor_train
            trust = Trust(role.model_args.trust_remote_code)
            self.at_end = AnswersAtEnd(role.model_path, trust, self.answers, self.forgetting)
        self.summary = RunSummary(config, roles, source)
        self.changes: Mapping[str, float] = {}  # of the weights, as the export found them
        self.result: list[str] = []  # what was achieved, as the export found it

    @property
    def reference_stream(self) -> ReferenceStream:
        return self.parts.reference_stream

    def evaluate(self) -> Record:
        """Return the metrics of all evaluation sets; empty if there are none."""
        return self.evaluation.record(self.progress.step, lambda: False)

    # --- a run ---

    def run(self, stop: StopRequest | None = None) -> int:
        """Train, complete the run folder, end all workers, and return the exit code.

        If workers are lost, training resumes from the last checkpoint with new ones. If `stop`
        is given, the caller handles signals and has locked the run folder.
        """
        with closing(self), ExitStack() as stack:
            if stop is None:
                stack.enter_context(self.folder.locked(is_main=self.roles.is_main))
                stop = stack.enter_context(StopRequest())
            self.stop = stop
            if self.roles.ranks:
                return self._run_on_ranks(self.roles.ranks, stop)
            self.parts.requests.stop = stop
            stop.last_saved = lambda: self.saving.last_saved if self.saving else None
            code = self._resume_and_train()
            self._check_uploads(failed=code != 0)
            return code

    def _run_on_ranks(self, ranks: RayRanks, stop: StopRequest) -> int:
        """Let all ranks train; if some are lost, start all again from the last checkpoint."""
        stop.last_saved = lambda: self._last_step
        while True:
            try:
                return ranks.run(partial(run_rank, self.config), stop)
            except (WorkerLost, HangError) as error:
                if stop.signal is not None:
                    raise
                self.supervision.survive(error, "worker_lost", "all workers are started again")
                if number := self.stop.signal:  # it came during the pause
                    text = "stopped while workers were restarting; run the command again"
                    raise Ended(number, text) from error
            self.config = self.config.resumed(has_saved=self.supervision.has_saved)
            ranks.restart()

    @property
    def _last_step(self) -> int | None:
        """The step of the newest checkpoint, by its file: this process may not train."""
        newest = control.latest(self.run_dir)
        return newest[0] if newest else None

    def _check_uploads(self, *, failed: bool) -> None:
        """Refuse to end as finished if the object store lacks something."""
        assert self.saving
        problem = self.saving.upload_problem()
        if problem and not failed:
            raise DiskError(problem)
        if problem:
            log.warning("%s", problem)

    def _pause(self, seconds: float) -> None:
        """Wait before workers are started again, unless the run is asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.signal and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, control.POLL_SECONDS))
            if control.take_requests(self.run_dir, self._steps_done()) == control.STOP:
                self.stop.end()

    def _steps_done(self) -> int:
        """Return how many steps are done, as far as this process knows."""
        return (self._last_step or 0) if self.roles.ranks else self.progress.step

    def _tracker(self, newest: Checkpoint | None, *, quiet: bool = False) -> RunTracker:
        return super()._tracker(newest, quiet=quiet)

    def _first_hooks(self, tracker: NoTracker) -> list[Hook]:
        hooks: list[Hook] = []
        if self.parts.keeps_ledger:
            hooks.append(WritePairLedger(tracker, self.objective))
        if self.objective.needs_reference:
            roles = self.config.actor_train, self.config.reference
            check = partial(check_step_zero, roles, self.roles.kind)
            hooks.append(CheckFirstStep(check, self.reference_stream))
        return hooks

    def _reference_hooks(self) -> list[Hook]:
        config = self.config
        if not config.sync_ref_model:
            return []
        share = config.ref_model_mixup_alpha
        move = partial(self.roles.move_reference, share, self.run_dir)
        return [MoveReference(config.ref_model_sync_steps, move, self._forget_reference)]

    def _forget_reference(self) -> None:
        """Discard what evaluations have cached of the reference, which has moved."""
        self.evaluation.known.clear()
        if self.answers:
            self.answers.known = None

    def _evaluate_hook(self, training_log: LogMetrics, tracker: NoTracker) -> Evaluate:
        hook = super()._evaluate_hook(training_log, tracker)
        hook.evaluates_first = True
        hook.evaluation, hook.answers = self.evaluation, self.answers
        hook.keeps_ledger = self.parts.keeps_ledger
        if self.config.save_best:
            hook.save_best = partial(
                save_best_model,
                self._export_model,
                self.run_dir / "best_model",
                self.parts.saving,
                self.parts.incidents,
                self.state,
            )
        return hook

    def _followers(self, stack: ExitStack, *, writes: bool) -> list[Hook]:
        if writes and self.config.report_html:
            stack.push(partial(tool("last_report"), self.run_dir))
        return [WriteSummary(self._summarize)]

    def _open_finished(self, newest: Checkpoint) -> None:
        """Load nothing: the exported model is there."""

    def _start(self, newest: Checkpoint | None) -> None:
        """Load the models and the state of a checkpoint."""
        stream = self.reference_stream
        answers = self.config.eval_prompts is not None
        needs_model = stream.open(self.folder, newest, answers=answers)
        with_reference = self.roles.broadcast(needs_model)
        self.summary.forecast(reference=with_reference)
        self.initialize(newest, with_reference=with_reference)
        self.stop.begin_training()
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
        self.tokenizer = tokenizer_of(self.config.actor_train)
        self.actor_train.open_pairs(self.source.pairs)
        self.actor_train.initialize(self.source.total_steps, model)
        refuse_foreign_tokens(self.data, self.actor_train)
        if with_reference:
            self.reference_stream.load()
        chosen = chosen_texts(self.data.train, self.tokenizer)
        if self.answers:
            self.answers.chosen = chosen
            self.answers.begin(self.tokenizer, resumes=newest is not None)
        if self.forgetting:
            self.forgetting.chosen = chosen
            self.forgetting.begin(self.tokenizer)
        self.parts.restore(newest)
        if model and self.objective.baseline_kind == "mean":
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

    # --- the end ---

    def _export_model(self, folder: Path) -> Mapping[str, float]:
        pairs, with_reference = len(self.data.train), self.reference is not None
        self.result = run_result(self.run_dir) if self.roles.is_main else []
        card = self.summary.model_card(
            self.progress.step,
            pairs,
            with_reference=with_reference,
            result=" ".join(self.result[:LINES]),
        )
        kept = self.actor_train.save_model(folder, self.tokenizer, card)
        if folder.name != "model":  # the outcome of the run describes that one
            log.info("%s: %s", folder, kept)
        self.evaluation.compare_file(folder)
        return kept.as_json()

    def _end(self) -> None:
        if logps := self.reference_stream.logps:
            text = "reference log-probs: %s from the cache, %d computed (forward passes: %d)"
            cost = logps.counts
            cached = counted(cost.pairs_from_cache, self.config.unit)
            log.info(text, cached, cost.pairs_computed, cost.forwards)
        for worker in (self.actor_train, self.reference):
            if isinstance(worker, ActorWorker) and worker.vision:
                text = "%s: features of images: %d from the cache, %d computed"
                log.info(text, worker.role, *worker.vision.counts())
                worker.vision.close()
        super()._end()

    def _export_result(self) -> None:
        folder = self.run_dir / "model"
        self.changes = self._export_model(folder)
        log.info("The trained model is in %s.", folder)
        if self.at_end:
            if self.roles.is_main:
                self._ask_exported(self.at_end, folder)
            self.roles.broadcast(None)

    def _ask_exported(self, at_end: AnswersAtEnd, folder: Path) -> None:
        """Add what the exported model answers to the metrics, to the result and to the card."""
        step = self.progress.step
        found = at_end.record(step, folder)
        if not found:
            return
        append_line(self.run_dir / METRICS_FILE, {"step": step, **found})
        before = " ".join(self.result[:LINES])
        self.result = run_result(self.run_dir)
        for card in self.run_dir.glob("*/README.md"):  # of the model, and of an adapter
            text = read_bytes(card).decode()
            replace_own(card, text.replace(before, " ".join(self.result[:LINES])))

    def outcome(self) -> Record:
        result = {"result": self.result} if self.result else {}
        return {**super().outcome(), **self.changes, **result}

    def _report_outcome(self, error: Exception | None = None) -> None:
        super()._report_outcome(error)
        if self.result and error is None:
            lines = "\n".join(f"  {line}" for line in shown_lines(self.result))
            log.info("Did it get better?\n%s", lines)

    def _summarize(self) -> None:
        self.summary.report(self.outcome(), self.parts.timeline, self.reference_stream)

    def _log_next_commands(self) -> None:
        run = shlex.quote(str(self.config.run_dir))
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


# --- what every rank runs, whoever started it ---


def run_rank(config: DPOConfig, stop: StopRequest) -> int:
    """Train, or resume, and return the exit code.

    In a process that only starts the ranks of a Ray cluster, this returns when they have ended.
    """
    try:
        pipeline = DPOPipeline(config, is_watched=True)
        if pipeline.roles.is_main and not pipeline.roles.ranks:
            print_report(pipeline.data.report, Console(stderr=True))
        return pipeline.run(stop)
    except BadRows as refused:
        write_run_report(config.run_dir, refused.report, DATA_REPORT)
        raise


def evaluate_rank(config: DPOConfig, stop: StopRequest, *, model: str) -> int:
    """Print the metrics of a model on the held-out pairs as JSON."""
    with closing(DPOPipeline(config, is_watched=True)) as pipeline:
        if pipeline.roles.ranks:
            return pipeline.roles.ranks.run(partial(evaluate_rank, config, model=model), stop)
        pipeline.initialize(model=model)
        metrics = pipeline.evaluate()
        if pipeline.roles.is_main:
            print(strict_json(metrics, indent=1), flush=True)
    return 0
