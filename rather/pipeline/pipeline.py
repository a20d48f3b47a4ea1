"""DPOPipeline: the loop. Pairs in order, reference log-probs, a training step; log, evaluate and save when due."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial

import torch

from rather import faults
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import launch
from rather.cluster.role import Role
from rather.cluster.supervision import Supervision
from rather.cluster.worker import ActorWorker
from rather.config.checks import device_problems, missing
from rather.config.schema import DPOConfig
from rather.data.batch import Columns, PairBatch
from rather.data.prepare import Prepared, prepare
from rather.data.template import tokenizer_of
from rather.errors import ConfigError, DataError, DiskError, Ended, HangError, WorkerLost
from rather.losses.metrics import Window
from rather.losses.objective import from_config
from rather.model.model_card import model_card
from rather.pipeline.eval_prompts import Answers
from rather.pipeline.evaluation import BrokenOff, Evaluation
from rather.pipeline.guard import Guard
from rather.pipeline.identity import identity_of
from rather.pipeline.oom import Memory
from rather.pipeline.prefetch import ahead
from rather.pipeline.progress import Progress
from rather.pipeline.reference_stream import Asking
from rather.pipeline.run_summary import Notes
from rather.pipeline.sanity_checks import (
    check_step_zero,
    refuse_foreign_tokens,
    refuse_missing_columns,
)
from rather.pipeline.saving import Saving
from rather.pipeline.steps import Course, Packing, Step
from rather.pipeline.timeline import Timeline, Times
from rather.reference.logps import ReferenceLogps
from rather.report.write import LiveReport
from rather.run_folder import control
from rather.run_folder.incidents import Incidents
from rather.run_folder.layout import (
    mark_finished,
    mark_unfinished,
    metrics_position,
    named_checkpoint,
    trace_file,
)
from rather.run_folder.lock import held
from rather.run_folder.signals import StopRequest
from rather.tracking import NoTracker, RunTracker, check_installed
from rather.train.rank_trainer import StepResult

log = logging.getLogger(__name__)

STEPS_AHEAD = 2  # steps that are packed before they are needed


class DPOPipeline:
    """Builds data and clusters from one config; `run` trains to the end, going on from where the run folder stands."""

    def __init__(self, pipeline_config: DPOConfig) -> None:
        self.config = config = pipeline_config
        if unnamed := [f"{key}: {text}" for key, text, _ in missing(config)]:
            raise ConfigError(unnamed)
        check_installed(config.trackers)
        self.objective = from_config(config)  # a wrong number should cost no work
        faults.arm(config.run_dir, "driver", 0)
        self.named = named_checkpoint(config)
        self.progress = Progress()
        self.stop = StopRequest()
        self.supervision = Supervision(
            config, Incidents(config.run_dir).add, lambda: self.progress.step, self._pause
        )
        wanted = self.objective.needs_reference
        self.roles = launch(config, with_reference=wanted, supervision=self.supervision)
        try:
            self._read()
            self._build()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        """The pairs, and what follows from them."""
        config = self.config
        if problems := device_problems(config, self.roles.kind):
            raise ConfigError(problems)
        self.data: Prepared = self._prepared()
        if len(self.data.train) == 0:
            raise DataError("0 pairs to train on: every row was dropped, see the table above.")
        refuse_missing_columns(config, self.objective, self.data)
        self.identity = identity_of(config, self.objective, self.data)
        self.course = Course.of(config, self.data)
        self.order, self.total_steps = self.course.order, self.course.total_steps

    def _build(self) -> None:
        """What stands on the roles: built again with them, where they are replaced."""
        config, roles, course = self.config, self.roles, self.course
        self.packing = Packing(config, roles.kind, roles.here)
        self.timeline = Timeline(in_turn=not roles.runs_ahead)
        self.incidents = Incidents(config.run_dir, silent=not roles.is_main)
        self.memory = Memory(self.packing, self.incidents)
        self.asking = Asking(
            config, self.objective, roles, course, self.packing, self.timeline, self.memory
        )
        self.evaluation = Evaluation(roles.actor_train, self.asking, self.packing, self.data.evals)
        self.answers = Answers(config, roles) if config.eval_prompts else None
        self.saving = Saving(config, roles, self.identity, self.total_steps, self.named)
        self.guard = Guard(config, course, self.incidents)
        self.notes = Notes(config, roles, course)
        self.progress = Progress()

    def _prepared(self) -> Prepared:
        """One driver tokenises; what it leaves in the cache is there for the others."""
        if not self.roles.is_main:
            self.roles.broadcast(None)
            return prepare(self.config)
        data = prepare(self.config)
        self.roles.broadcast(None)
        return data

    @property
    def actor_train(self) -> Role:
        return self.roles.actor_train

    @property
    def reference(self) -> Role | None:
        return self.roles.reference

    @property
    def reference_logps(self) -> ReferenceLogps | None:
        return self.asking.logps

    def close(self) -> None:
        """Ends the processes of the workers. A pipeline that has run is closed already."""
        self.roles.close()

    def run(self, stop: StopRequest | None = None) -> int:
        """Trains and leaves the run folder complete, and no process behind. Returns the exit code.

        Where workers are lost, it goes on from the last checkpoint with new ones. `stop`: a command listens to signals
        and holds the run folder since before the pairs were read.
        """
        with closing(self), ExitStack() as ours:
            if stop is None:
                stop = ours.enter_context(StopRequest())
                ours.enter_context(held(self.config, leads=self.roles.is_main))
            self.stop = stop
            stop.last_saved = lambda: self.saving.last_saved
            attempt = self._run
            while True:
                try:
                    return attempt()
                except (WorkerLost, HangError) as error:
                    if self.roles.restart is None or self.stop.ends:
                        raise
                    self.supervision.survive(error, "worker_lost", "all workers are started again")
                    if number := self.stop.signal:
                        raise Ended(
                            number, "ended while its workers were gone; the same command goes on"
                        ) from error
                attempt = self._run_again

    def _run_again(self) -> int:
        assert self.roles.restart is not None
        self.config = self.supervision.going_on()
        self.roles = self.roles.restart()
        vars(self).pop("budget", None)  # new processes plan it anew
        self._build()
        return self._run()

    def _pause(self, seconds: float) -> None:
        """Before workers are started again; whoever asks for an end need not wait for that."""
        until = time.monotonic() + seconds
        while not self.stop.ends and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, control.LOOK_EVERY))
            self._listen()

    def _run(self) -> int:
        run_dir = self.config.run_dir
        with closing(self.asking), closing(self.saving):
            newest = self.saving.to_resume()
            if newest and self.saving.is_finished(newest):
                early = newest.state["progress"]["stopped_early"]
                advice = (
                    "early stopping ended it"
                    if early
                    else "raise max_steps or num_train_epochs to train on"
                )
                log.info("%s is finished at step %d; %s", run_dir, newest.step, advice)
                return 0
            with_reference = self.roles.broadcast(self.asking.open(newest))
            self.notes.forecast(reference=with_reference)
            self.initialize(newest, with_reference=with_reference)
            self.stop.begin_training()
            self.evaluation.stopped = self._stopped
            self.asking.recheck(self.progress.step)
            if self.roles.is_main:
                mark_unfinished(run_dir)
            self.notes.begin(self.tokenizer, self.progress.step)
            trace = trace_file(self.config, newest) if self.roles.is_main else None
            with LiveReport(self.config, leads=self.roles.is_main) as self.page:
                with self._tracker(newest) as self.tracker, self.timeline.drawn(trace):
                    self._train()
                self._end()
            return self.stop.exit_code

    def initialize(
        self,
        newest: Checkpoint | None = None,
        model: str | None = None,
        *,
        with_reference: bool = True,
    ) -> None:
        """Loads tokenizer and models (`model` stands in for the policy's weights), then a checkpoint's state.

        Without the reference where all its log-probs are known.
        """
        self.tokenizer = tokenizer_of(self.config.actor_train)
        self.actor_train.initialize(self.total_steps, model)
        refuse_foreign_tokens(self.config, self.data, self.actor_train)
        if with_reference:
            self.asking.load()
        if self.answers:
            self.answers.begin(self.tokenizer, resumes=newest is not None)
        if newest is not None:
            self.progress = self.saving.restore(newest)

    def _tracker(self, newest: Checkpoint | None) -> RunTracker | NoTracker:
        if not self.roles.is_main:
            return NoTracker()
        return RunTracker(
            self.config,
            total_steps=self.total_steps,
            start_step=self.progress.step,
            metrics_position=metrics_position(self.config, newest),
        )

    def _train(self) -> None:
        config, progress, back_from = self.config, self.progress, None
        faults.at_step(progress.step)
        if self.answers:
            self.answers.forget_untold()
        if self.guard.wants_checkpoint(progress, self.saving):
            self.save()
        if self._ends_before_a_step():
            return
        with (
            closing(self.steps()) as packed,
            closing(self.asking.with_reference(packed, progress.step)) as steps,
        ):
            for step, reference, _ in self.timeline.awaited(steps):
                faults.at_step(step.number)
                result = self._trained(step, reference)
                if not self.guard.passes(progress, step, result):
                    back_from = step
                    break
                if progress.step == 0 and reference is not None and not result.trouble:
                    self._check_step_zero(step, result, reference)
                self._count(step, result)
                if config.sync_ref_model and due(progress.step, config.ref_model_sync_steps):
                    self.asking.follow_policy()
                    faults.point("follow.done")
                    self._forget_reference()
                last = progress.step == self.total_steps
                if last or due(progress.step, config.logging_steps):
                    self._track_training(result)
                if (
                    last
                    or due(progress.step, config.eval_steps)
                    or self.order.ends_epoch(progress.step)
                ):
                    last = self._evaluate_and_judge(result) or last
                    if last and progress.window.pairs:  # early stopping between two log lines
                        self._track_training(result)
                self.asking.keep()
                stopped = self._stopped()
                if last or stopped or self.stop.saves or due(progress.step, config.save_steps):
                    self.save(last=last or stopped)
                if last or stopped:
                    break
        if back_from:
            self._go_back(back_from)
            self._train()

    def _go_back(self, step: Step) -> None:
        """To the newest good checkpoint; the step that leads back is left out when it comes again."""
        newest, self.progress = self.guard.gone_back(self.saving, self.progress, step)
        self.tracker.go_back(metrics_position(self.config, newest), newest.step)
        self.timeline.times = Times()
        if self.config.sync_ref_model:
            self._forget_reference()

    def _forget_reference(self) -> None:
        """It has moved: what evaluations know of it is of the past."""
        self.evaluation.forget_reference()
        if self.answers:
            self.answers.forget_reference()

    def _end(self) -> None:
        """Exports the model, unless a signal asked for the end."""
        run_dir, step = self.config.run_dir, self.progress.step
        self.notes.report(self.progress.step, self.timeline.tally, self.asking)
        self.asking.tell_counts()
        if self._stopped():
            log.info("stopped and saved at step %d; the same command goes on from there", step)
            return
        self._save_model("model")
        if self.roles.is_main:
            faults.point("finish")
            mark_finished(run_dir, step)
            faults.point("finish.done")
        log.info("the aligned model is in %s", run_dir / "model")
        if self._stopped():
            log.info(
                "the run was finished when it was asked to stop; the same command has nothing left to do"
            )

    # --- one step ---

    @cached_property
    def budget(self) -> int:
        """Tokens of a training micro-batch, by the memory that both models leave free."""
        largest = int(self.data.train.tokens.max())
        if isinstance(self.actor_train, ActorWorker):
            return self.actor_train.plan(largest, self.asking.parking())
        return self.actor_train.plan(largest)

    def steps(self) -> Generator[Step, None, None]:
        """The steps that are left, packed ahead in the background; each is a pure function of its number."""
        if self.progress.stopped_early:
            return
        numbers, _ = (
            range(self.progress.step, self.total_steps),
            self.budget,
        )  # planned before the background begins
        with closing(ahead(map(self._packed, numbers), STEPS_AHEAD)) as ready:
            yield from ready

    def _packed(self, done: int) -> Step:
        with self.timeline.span("data", "pack", done + 1):
            return self.packing.to_train(self.course.pairs_after(done), self.budget, done + 1)

    def _trained(self, step: Step, reference: Columns | None) -> StepResult:
        """One optimizer step; where memory falls short, again with smaller micro-batches: the result is the same."""
        limits = self.guard.limits(self.progress, step)

        def work(batches: Sequence[PairBatch]) -> StepResult:
            with self.timeline.span("actor_train", "train", step.number) as span:
                result = self.actor_train.train_step(batches, reference, limits=limits)
            self.timeline.times.train += span.seconds
            return result

        pack = partial(self.packing.policy, step.pairs)
        result, self.budget = self.memory.fitting(
            self.actor_train, step.policy, self.budget, pack, work
        )
        return result

    def _check_step_zero(self, step: Step, result: StepResult, reference: Columns) -> None:
        told = (result.policy, reference["sum"], self.asking.used_cache)
        check_step_zero(self.config, self.roles.kind, step.pairs, *told)

    def _count(self, step: Step, result: StepResult) -> None:
        self.progress.step += 1
        self.timeline.count(step)
        # Numbers that are none would make the means of a whole line so; `skipped_iter` tells of them.
        sums = dict.fromkeys(result.sums, 0.0) if result.trouble else result.sums
        self.progress.window.add(
            sums, pairs=len(step.pairs), tokens=step.tokens, skipped=result.skipped
        )

    def _stopped(self) -> bool:
        """Whether the run was asked to end: by a signal to any driver, or from another shell."""
        self._listen()
        self.stop.agree(self.roles.max_over_drivers(self.stop.asked))
        return self.stop.stops

    def _listen(self) -> None:
        if self.roles.is_main and (word := control.taken(self.config.run_dir, self.progress.step)):
            self.stop.end() if word == control.STOP else self.stop.ask_for_a_save()

    # --- what is told and kept ---

    def _track_training(self, result: StepResult) -> None:
        progress, window = self.progress, self.progress.window
        record = {
            "step": progress.step,
            "epoch": self.course.epoch_at(progress.step),
            **window.means(),
        }
        record |= {
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "pairs": window.pairs,
            "tokens": window.tokens,
        }
        if result.zeros_in_grad is not None:
            record["num_zeros_in_grad"] = result.zeros_in_grad
        record["skipped_iter"] = window.skipped
        self.tracker.log(record | self.timeline.times.record(window.pairs, window.tokens))
        progress.window, self.timeline.times = Window(), Times()
        self.page.log(evaluated=False)

    def evaluate(self) -> dict[str, float | int]:
        """All evaluation sets, weighted by pairs, no remainder dropped. Empty without any set."""
        return self.evaluation.record()

    def _ends_before_a_step(self) -> bool:
        """The evaluation of step 0, or the one that a signal broke off; whether the run ends with it."""
        progress, numbers = self.progress, self.progress.unevaluated
        if progress.step and not numbers:
            return False
        before = StepResult({}, torch.empty(0, 2), held=None, **numbers) if numbers else None
        early = self._evaluate_and_judge(before)
        if early and before and progress.window.pairs:
            self._track_training(before)
        stopped, last = self._stopped(), early or progress.step == self.total_steps
        if last or stopped or (progress.step and due(progress.step, self.config.save_steps)):
            self.asking.keep()
            self.save(last=last or stopped)
        return stopped or early

    def _evaluate_and_judge(self, result: StepResult | None) -> bool:
        """Tracks an evaluation; keeps the best model; says whether early stopping ends the run.

        Broken off by a signal it is done again, when the run goes on after `result`.
        """
        config, progress = self.config, self.progress
        if not (self.data.evals or self.answers):
            return False
        try:
            with self.timeline.span("driver", "evaluate", progress.step):
                record = self.evaluate()
                if self.answers:
                    record |= self.answers.record(progress.step, self._stopped)
        except BrokenOff:
            names = ("grad_norm", "lr", "zeros_in_grad")
            progress.unevaluated = (
                {name: getattr(result, name) for name in names} if result else None
            )
            return False
        progress.unevaluated = None
        self.tracker.log(
            {"step": progress.step, "epoch": self.course.epoch_at(progress.step), **record}
        )
        self.page.log(evaluated=True)
        judged = config.save_best or config.early_stopping_patience
        if judged and progress.judge(record, config) and config.save_best:
            self._save_best()
        return progress.stopped_early

    def save(self, *, last: bool = False) -> None:
        """A checkpoint, complete or not at all; what is written beside training is waited for where it is the last."""
        faults.point("save")
        self.stop.save_now = False
        with self.timeline.span("driver", "save", self.progress.step):
            self.saving.save(self.progress, self._synced)
            if last:
                self.saving.wait(last=True)
        self.notes.report(self.progress.step, self.timeline.tally, self.asking)

    def _synced(self) -> int:
        """Brings what a checkpoint relies on to the disk; the length of metrics.jsonl."""
        self.asking.sync()
        return self.tracker.position()

    def _save_best(self) -> None:
        """A disk without room costs this model, not the run."""
        try:
            self._save_model("best_model")
        except DiskError as error:
            folder = str(self.config.run_dir / "best_model")
            self.incidents.add("missed_save", self.progress.step, folder=folder, reason=str(error))
            log.warning("MISSED SAVE of the best model at step %d: %s", self.progress.step, error)

    def _save_model(self, name: str) -> None:
        step, pairs, with_reference = (
            self.progress.step,
            len(self.data.train),
            self.reference is not None,
        )
        card = model_card(self.config, step, pairs, with_reference=with_reference)
        faults.point("export")
        self.actor_train.save_model(self.config.run_dir / name, self.tokenizer, card)
        faults.point("export.done")


def due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0
