"""DPOPipeline: the loop. Pairs in order, reference log-probs, a training step; log, evaluate and save when due."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rather import checkpoint
from rather.ahead import ahead
from rather.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.card import model_card
from rather.checkpoint import Checkpoint
from rather.cluster.local import local_cluster
from rather.cluster.worker import ActorWorker
from rather.config.checks import device_problems
from rather.config.load import dump_yaml
from rather.config.schema import ActorConfig, DPOConfig, RoleConfig
from rather.config.strategies import single_device_problem
from rather.data.pack import pack
from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared, prepare
from rather.data.sampler import Order
from rather.data.template import choose_template, load_tokenizer
from rather.errors import ConfigError, DataError
from rather.metrics import Window
from rather.model.budget import LADDER, PARKING_PAYS, TOKENS
from rather.model.load import compute_dtype, device_of, same_weights
from rather.objective import from_config
from rather.reference import ReferenceLogps, scored_tokens
from rather.run_folder import (
    FINISHED,
    RUN_REPORT,
    checkpoint_to_resume,
    identity_of,
    metrics_position,
    reference_log,
)
from rather.signals import StopRequest
from rather.tracking import RunTracker
from rather.trainer import StepResult

log = logging.getLogger(__name__)

EVALUATION_CHUNK = 256  # pairs taken from disk at a time
MANY_PAIRS = 100_000  # to look for them in the cache takes seconds (20 us each)
SMALLEST_BUDGET = 512  # tokens of a micro-batch that running out of memory leads to
STEPS_AHEAD = 2  # steps that are packed before they are needed
STEP_ZERO_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}  # log-prob per token

Record = dict[str, float | int]


@dataclass
class Progress:
    """Where the run stands: all that is not in the workers. Part of every checkpoint."""

    step: int = 0
    window: Window = field(default_factory=Window)
    best: float | None = None
    best_step: int = 0
    stale_evaluations: int = 0  # since the best one
    stopped_early: bool = False


@dataclass(frozen=True)
class Step:
    """The pairs of one optimizer step (or of a chunk of an evaluation set), packed for each role."""

    pairs: Sequence[TokenPair]
    policy: Sequence[PairBatch]
    reference: Sequence[PairBatch]

    @property
    def tokens(self) -> int:
        return sum(pair.tokens for pair in self.pairs)


@dataclass
class Tally:
    """What the steps of this start took; the run's report."""

    began: float = field(default_factory=time.perf_counter)
    in_steps: float = 0.0  # seconds
    waited: float = 0.0  # of them, seconds in which training waited for a packed step
    pairs: int = 0
    tokens: int = 0
    real: int = 0  # tokens of micro-batches that are not fillers
    laid_out: int = 0

    def add(self, step: Step, seconds: float) -> None:
        self.in_steps += seconds
        self.pairs += len(step.pairs)
        self.tokens += step.tokens
        self.real += sum(batch.real_tokens for batch in step.policy)
        self.laid_out += sum(len(batch.ids_N) for batch in step.policy)

    def report(self) -> dict[str, Any]:
        seconds = max(self.in_steps, 1e-9)
        return {
            "seconds": time.perf_counter() - self.began,
            "pairs_per_second": self.pairs / seconds,
            "tokens_per_second": self.tokens / seconds,
            "peak_memory_bytes": _peak_memory(),
            "packing": {"fill": self.real / max(self.laid_out, 1), "seconds_waited": self.waited},
        }


class DPOPipeline:
    """Builds data and clusters from one config; `run` trains to the end, going on from where the run folder stands."""

    def __init__(self, pipeline_config: DPOConfig) -> None:
        self.config = config = pipeline_config
        problems = device_problems(config, "cuda" if torch.cuda.is_available() else "cpu")
        if problem := single_device_problem(config):
            problems.append(problem)
        if problems:
            raise ConfigError(problems)
        self.objective = from_config(config)  # a wrong number should cost no work
        self.data: Prepared = prepare(config)
        if len(self.data.train) == 0:
            raise DataError("0 pairs to train on: every row was dropped, see the table above.")
        self._refuse_missing_columns()
        self.identity = identity_of(config, self.objective, self.data.train)
        groups = self.data.train.groups if config.group_responses else None
        self.order = Order(tuple(self.data.train.parts), config.global_batch(), config.data_seed, groups)
        if self.order.pairs_in(0) == 0:
            raise DataError("actor_train.data_args.weights: they leave 0 pairs of each file; raise them.")
        self.total_steps = self._total_steps()
        self.actor_train = local_cluster("actor_train", config)
        self.reference = local_cluster("reference", config) if self.objective.needs_reference else None
        self._reference_loaded = False
        self.reference_logps = ReferenceLogps(config, self.objective, self._ask_reference) if self.reference else None
        if not self.reference and config.reference.model_fields_set:
            log.info("the loss compares with no reference: the section `reference` is not used")
        self.progress = Progress()
        self.tally = Tally()
        self.seconds = 0.0  # spent in steps since the last log line
        self._evaluation_reference: dict[str, list[Columns]] = {}

    def run(self) -> int:
        """Trains and leaves the run folder complete. Returns the exit code."""
        run_dir = self.config.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        reference_files = closing(self.reference_logps) if self.reference_logps else nullcontext()
        with checkpoint.lock(run_dir), reference_files, StopRequest() as self.stop:
            newest = checkpoint_to_resume(self.config, self.identity)
            if newest and self._finished(newest):
                early = newest.state["progress"]["stopped_early"]
                advice = "early stopping ended it" if early else "raise max_steps or num_train_epochs to train on"
                log.info("%s is finished at step %d; %s", run_dir, newest.step, advice)
                return 0
            (run_dir / FINISHED).unlink(missing_ok=True)
            self.initialize(newest, with_reference=self._open_reference(newest))
            self._recheck_reference()
            self._write_run_files()
            with RunTracker(
                self.config,
                total_steps=self.total_steps,
                start_step=self.progress.step,
                metrics_position=metrics_position(self.config, newest),
            ) as self.tracker:
                self.tally = Tally()
                self._train()
            self._write_run_report()
            if known := self.reference_logps:
                told = (known.counts.pairs_from_cache, known.counts.pairs_computed, known.counts.forwards)
                log.info("reference log-probs: %d pairs from the cache, %d computed in %d forwards", *told)
            if self.stop.signal is None:
                self.actor_train.save_model(run_dir / "model", self.tokenizer, self._card())
                (run_dir / FINISHED).write_text(f"{self.progress.step}\n", encoding="utf-8")
                log.info("the aligned model is in %s", run_dir / "model")
            else:
                log.info("stopped and saved at step %d; the same command goes on from there", self.progress.step)
            return self.stop.exit_code

    def initialize(
        self, newest: Checkpoint | None = None, model: str | None = None, *, with_reference: bool = True
    ) -> None:
        """Loads tokenizer and models (`model` stands in for the policy's weights), then a checkpoint's state.

        Without the reference where all its log-probs are known.
        """
        torch.manual_seed(self.config.seed)
        self.tokenizer = _tokenizer(self.config.actor_train)
        self.actor_train.initialize(self.total_steps, model)
        self._refuse_foreign_tokens(self.actor_train)
        if self.reference and with_reference:
            self._load_reference(self.reference)
        if newest is not None:
            self._restore(newest)

    def _refuse_foreign_tokens(self, worker: ActorWorker) -> None:
        """An id beyond a model's embeddings would be an index error at best."""
        largest = max(dataset.largest_id for dataset in (self.data.train, *self.data.evals.values()))
        if largest >= worker.embedding_rows():
            raise ConfigError(
                f"{worker.role}: the tokenizer {self.config.actor_train.tokenizer_path} gives ids up to {largest}, "
                f"the model {worker.embedding_rows()} embeddings; use the tokenizer that belongs to the model."
            )

    # --- the reference ---

    def _open_reference(self, newest: Checkpoint | None) -> bool:
        """Reads what is known of the reference; whether the run needs the model itself."""
        if self.reference_logps is None:
            return False
        self.reference_logps.open(reference_log(self.config, newest))
        if self.config.reference.cache.recheck or self.reference_logps.is_empty:
            return True
        rows = self._rows_to_visit(newest.step if newest else 0)
        if len(rows) > MANY_PAIRS:
            log.info("reference: looking for %d pairs in %s", len(rows), self.reference_logps.folder)
        parts = [(self.data.train, rows), *((held, np.arange(len(held))) for held in self.data.evals.values())]
        for dataset, wanted in parts:
            for first in range(0, len(wanted), EVALUATION_CHUNK):
                if not self.reference_logps.knows(dataset.take(wanted[first : first + EVALUATION_CHUNK])):
                    return True
        log.info("reference: %s holds the log-probs of all pairs; the model is not loaded", self.reference_logps.folder)
        return False

    def _rows_to_visit(self, first_step: int) -> NDArray[np.int64]:
        """Training pairs of the steps that are left."""
        visited = np.zeros(len(self.data.train), bool)
        for number in range(first_step, self.total_steps):
            visited[self.order.step(number)] = True
        return np.flatnonzero(visited)

    def _load_reference(self, reference: ActorWorker) -> None:
        reference.initialize(self.total_steps)
        self._refuse_foreign_tokens(reference)
        self._reference_loaded = True

    def _ask_reference(self, batches: Sequence[PairBatch]) -> Columns:
        assert self.reference is not None
        if not self._reference_loaded:  # an entry that was there at the start can no longer be read
            self._load_reference(self.reference)
        return self.reference.compute_log_probs(batches)

    def _recheck_reference(self) -> None:
        """Known values of some pairs, drawn by the seed, against the model."""
        count, known = self.config.reference.cache.recheck, self.reference_logps
        if not (count and known):
            return
        rows = np.random.default_rng(self.config.seed).permutation(self._rows_to_visit(self.progress.step))
        pairs: list[TokenPair] = []
        for first in range(0, len(rows), EVALUATION_CHUNK):
            taken = self.data.train.take(rows[first : first + EVALUATION_CHUNK])
            pairs += [pair for pair in taken if known.knows([pair])]
            if len(pairs) >= count:
                break
        if pairs := pairs[:count]:
            role = self.config.reference
            tolerance = STEP_ZERO_TOLERANCE[compute_dtype(role.model_args, device_of(role))]
            known.recheck(pairs, _without_gradients(pairs, role), tolerance)

    # --- the loop ---

    def _train(self) -> None:
        config, progress = self.config, self.progress
        if progress.step == 0:
            self._evaluate_and_judge()
        with closing(self.with_reference(() if progress.stopped_early else self.steps())) as steps:
            for step, reference in steps:
                result = self._trained(step, reference)
                if progress.step == 0:
                    self._check_step_zero(step, result, reference)
                self._count(step, result)
                if config.sync_ref_model and due(progress.step, config.ref_model_sync_steps):
                    self._sync_reference()
                last = progress.step == self.total_steps
                if last or due(progress.step, config.logging_steps):
                    self._track_training(result)
                if last or due(progress.step, config.eval_steps) or self.order.ends_epoch(progress.step):
                    last = self._evaluate_and_judge() or last
                    if last and progress.window.pairs:  # early stopping between two log lines
                        self._track_training(result)
                if self.reference_logps:
                    self.reference_logps.keep()
                if last or self.stop.signal or due(progress.step, config.save_steps):
                    self.save()
                if last or self.stop.signal:
                    break

    def _trained(self, step: Step, reference: Columns | None) -> StepResult:
        """One optimizer step; where memory falls short, again with smaller micro-batches: the result is the same."""
        while True:
            try:
                return self.actor_train.train_step(step.policy, reference)
            except torch.OutOfMemoryError as error:
                if self.budget < 2 * SMALLEST_BUDGET:
                    raise
                shortage = str(error).splitlines()[0]
            self.actor_train.forget()  # here, where the exception no longer holds what filled the memory
            self.budget //= 2
            log.warning("%s From now on micro-batches have up to %d tokens.", shortage, self.budget)
            step = replace(step, policy=pack(step.pairs, self.budget, ladder=LADDER[_kind()]))

    @cached_property
    def budget(self) -> int:
        """Tokens of a training micro-batch, by the memory that both models leave free."""
        return self.actor_train.plan(int(self.data.train.tokens.max()), self._parking())

    def _parking(self) -> Callable[[], bool] | None:
        """Makes room by sending the reference to the host, where it may go and steps are long enough to pay for it."""
        config, reference = self.config, self.reference
        if reference is None or not self._reference_loaded:
            return None
        if config.reference.offload != "auto" or config.sync_ref_model:
            return None
        first = self.data.train.take(self.order.step(0))
        tokens = sum(batch.real_tokens for batch in _without_gradients(first, config.reference))
        return reference.park if tokens > PARKING_PAYS else None

    def steps(self) -> Generator[Step, None, None]:
        """The steps that are left, packed ahead in the background; each is a pure function of its number."""
        numbers, _ = range(self.progress.step, self.total_steps), self.budget  # planned before the background begins
        packed = (self._packed(self.data.train.take(self.order.step(number)), train=True) for number in numbers)
        with closing(ahead(packed, STEPS_AHEAD)) as ready:
            while True:
                self._step_began = time.perf_counter()
                step = next(ready, None)
                if step is None:
                    return
                self.tally.waited += time.perf_counter() - self._step_began
                yield step

    def with_reference(self, steps: Iterable[Step]) -> Generator[tuple[Step, Columns | None], None, None]:
        """Each step with the reference log-probs of its pairs, where the loss has a reference."""
        for step in steps:
            yield step, self._reference_columns(step)

    def _reference_columns(self, step: Step) -> Columns | None:
        return self.reference_logps.columns(step.pairs, step.reference) if self.reference_logps else None

    # --- evaluation ---

    def evaluate(self) -> Record:
        """All evaluation sets, weighted by pairs, no remainder dropped. Empty without any set."""
        record: Record = {}
        for name, dataset in self.data.evals.items():
            facts, policy, reference = self._evaluation_columns(name, dataset)
            window = Window()
            window.add(self.actor_train.score(facts, policy, reference), pairs=len(dataset), tokens=0)
            prefix = f"eval/{name}/" if name else "eval/"
            record |= {prefix + key: value for key, value in window.means().items()}
            record[f"{prefix}pairs"] = len(dataset)
        return record

    def _evaluation_columns(self, name: str, dataset: PairDataset) -> tuple[PairFacts, Columns, Columns | None]:
        """Facts and log-probs of a whole evaluation set, a few numbers a pair: some losses sort it.

        A reference that stays frozen is asked once in a run.
        """
        facts: list[PairFacts] = []
        policy: list[Columns] = []
        known = self._evaluation_reference.setdefault(name, [])
        for number, first in enumerate(range(0, len(dataset), EVALUATION_CHUNK)):
            pairs = dataset.take(range(first, min(first + EVALUATION_CHUNK, len(dataset))))
            step = self._packed(pairs, train=False)
            facts.append(PairFacts.of_step(step.policy))
            policy.append(self.actor_train.compute_log_probs(step.policy))
            if number == len(known) and (columns := self._reference_columns(step)):
                known.append(columns)
        return PairFacts.joined(facts), _joined(policy), _joined(known) if known else None

    def _evaluate_and_judge(self) -> bool:
        """Tracks an evaluation; keeps the best model; says whether early stopping ends the run."""
        progress, config = self.progress, self.config
        record = self.evaluate()
        if not record:
            return False
        self.tracker.log({"step": progress.step, "epoch": self._epoch(), **record})
        if not (config.save_best or config.early_stopping_patience):
            return False
        value = record.get(config.metric_for_best_model)
        if value is None:
            raise ConfigError(
                f"metric_for_best_model: there is no '{config.metric_for_best_model}'; there are {', '.join(record)}"
            )
        lower_is_better = config.metric_for_best_model.endswith("loss")
        best = math.nan if progress.best is None else progress.best
        if math.isnan(best) or (value < best if lower_is_better else value > best):
            progress.best, progress.best_step, progress.stale_evaluations = value, progress.step, 0
            if config.save_best:
                self.actor_train.save_model(config.run_dir / "best_model", self.tokenizer, self._card())
            return False
        progress.stale_evaluations += 1
        patience = config.early_stopping_patience
        progress.stopped_early = patience is not None and progress.stale_evaluations >= patience
        if progress.stopped_early:
            metric, best_step = config.metric_for_best_model, progress.best_step
            log.info("stopping early: %s has not improved since step %d", metric, best_step)
        return progress.stopped_early

    # --- one step ---

    def _packed(self, pairs: Sequence[TokenPair], *, train: bool) -> Step:
        actor, reference = self.config.actor_train, self.config.reference
        policy = pack(pairs, self.budget, ladder=LADDER[_kind()]) if train else _without_gradients(pairs, actor)
        packed = (policy, _without_gradients(pairs, reference))
        return Step(pairs, *([batch.pinned() for batch in batches] for batches in packed))

    def _count(self, step: Step, result: StepResult) -> None:
        self.progress.step += 1
        seconds = time.perf_counter() - self._step_began
        self.tally.add(step, seconds)
        self.seconds += seconds
        self.progress.window.add(result.sums, pairs=len(step.pairs), tokens=step.tokens, skipped=result.skipped)

    def _track_training(self, result: StepResult) -> None:
        window = self.progress.window
        record: Record = {"step": self.progress.step, "epoch": self._epoch(), **window.means()}
        record |= {"grad_norm": result.grad_norm, "lr": result.lr, "pairs": window.pairs, "tokens": window.tokens}
        if result.zeros_in_grad is not None:
            record["num_zeros_in_grad"] = result.zeros_in_grad
        record["skipped_iter"] = window.skipped
        seconds = max(self.seconds, 1e-9)
        record |= {"pairs_per_second": window.pairs / seconds, "tokens_per_second": window.tokens / seconds}
        self.tracker.log(record)
        self.progress.window, self.seconds = Window(), 0.0

    def _sync_reference(self) -> None:
        """TR-DPO: the reference follows the policy; what was known of the old one is forgotten."""
        assert self.reference is not None
        self.reference.mix_weights(self.actor_train.weights(), self.config.ref_model_mixup_alpha)
        self._evaluation_reference.clear()

    def _check_step_zero(self, step: Step, result: StepResult, reference: Columns | None) -> None:
        """Untrained, a policy that names the reference's weights must have its log-probs: sigmoid's loss is ln 2."""
        if reference is None:
            return
        policy_model, reference_model = self.config.actor_train.model_path, self.config.reference.model_path
        roles = (self.config.actor_train, self.config.reference)
        dtypes = {compute_dtype(role.model_args, device_of(role)) for role in roles}
        revisions = {role.model_args.revision for role in roles}
        if not same_weights(policy_model, reference_model) or len(dtypes) > 1 or len(revisions) > 1:
            told = [(role.model_path, role.model_args.revision, role.model_args.dtype) for role in roles]
            log.info("policy %s and reference %s differ by intent: no check at step 0", *told)
            return
        lengths = torch.tensor(
            [[scored_tokens(pair.chosen_scored), scored_tokens(pair.rejected_scored)] for pair in step.pairs]
        )
        worst = float(((result.policy.cpu() - reference["sum"].cpu()).abs() / lengths).max())
        if not worst <= STEP_ZERO_TOLERANCE[dtypes.pop()]:
            known = self.reference_logps
            cached = known.folder if known and known.counts.pairs_from_cache else None
            advice = f", or the cached log-probs are wrong: delete {cached}" if cached else ""
            raise ConfigError(
                f"before any training, policy and reference log-probs of the same weights ({policy_model}) differ by "
                f"{worst:.2g} per token: one of the two roles does not hold those weights{advice}. Nothing was saved."
            )

    def _refuse_missing_columns(self) -> None:
        """A loss that reads a column needs it in every row; one that sorts pairs has no use for weights."""
        weights = [dataset.column("weight") for dataset in (self.data.train, *self.data.evals.values())]
        if self.objective.whole_batch and any((column != 1).any() for column in weights):
            raise DataError(
                f"loss '{' + '.join(self.config.loss_names)}' sorts the pairs of a step: none has its own weight. "
                "Remove the column weight, or map it away with data_args.columns."
            )
        for column in sorted(self.objective.pair_columns):
            for name, dataset in {"training": self.data.train, **self.data.evals}.items():
                missing = int(np.isnan(dataset.column(column)).sum())
                if missing:
                    raise DataError(
                        f"loss '{' + '.join(self.config.loss_names)}' reads the column {column}: {missing} of "
                        f"{len(dataset)} {name or 'evaluation'} pairs have none."
                    )

    def _total_steps(self) -> int:
        config, order = self.config, self.order
        epochs, limit = config.actor_train.training_args.num_train_epochs, config.max_steps or math.inf
        if (pairs := order.pairs_in(0)) < order.batch:
            log.warning("%d pairs are fewer than one step takes (%d): each epoch is one small step", pairs, order.batch)
        return order.steps(epochs, limit)

    def _epoch(self) -> float:
        return round(self.order.epoch_at(self.progress.step), 4)

    # --- files ---

    def save(self) -> None:
        groups, numbers = self.actor_train.state()
        if self.reference and self.config.sync_ref_model:
            groups["reference"] = dict(self.reference.weights())
        state = {
            "progress": asdict(self.progress),
            "trainer": numbers,
            "metrics_bytes": self.tracker.position(),
            "identity": self.identity,
            "schedule": self._schedule(),
        }
        config = self.config
        if self.reference_logps:
            self.reference_logps.sync()
        path = checkpoint.save(config.run_dir, self.progress.step, groups, state)
        self._write_run_report()
        self.stop.last_saved = self.progress.step
        checkpoint.prune(config.run_dir, config.max_ckpt_to_keep)
        if config.checkpoint_config.output_dir:
            checkpoint.copy_to(path, config.checkpoint_copy_dir)
            checkpoint.prune(config.checkpoint_copy_dir, config.max_ckpt_to_keep)

    def _finished(self, newest: Checkpoint) -> bool:
        ended = newest.step >= self.total_steps or newest.state["progress"]["stopped_early"]
        return ended and (self.config.run_dir / FINISHED).exists()

    def _restore(self, newest: Checkpoint) -> None:
        saved = newest.state["progress"]
        self.progress = Progress(**{**saved, "window": Window(**saved["window"])})
        numbers = newest.state["trainer"]
        groups = {"model": newest.tensors("model"), "rng": newest.tensors("rng")}
        groups["optimizer"] = newest.tensors("optimizer") if numbers["updates"] else {}
        self.actor_train.load_state(groups, numbers)
        if self.reference and self.config.sync_ref_model:
            self.reference.mix_weights(newest.tensors("reference"), 1.0)
        before = newest.state["schedule"]
        for key, value in self._schedule().items():
            if before.get(key) != value:
                log.info("%s was %s up to here and is %s from now on", key, before.get(key), value)
        log.info("continuing %s from step %d of %d", newest.path, newest.step, self.total_steps)

    def _schedule(self) -> dict[str, Any]:
        """What may change at a resume, and is told when it does."""
        actor = self.config.actor_train
        free = {"max_grad_norm": self.config.max_grad_norm, "dtype": actor.model_args.dtype}
        return {"optimizer steps": self.total_steps, **actor.training_args.model_dump(mode="json"), **free}

    def _write_run_files(self) -> None:
        run_dir = self.config.run_dir
        resumable = self.config.model_copy(update={"overwrite": False})  # trained by this file, the run goes on
        (run_dir / "config.yaml").write_text(dump_yaml(resumable), encoding="utf-8")
        write_report(run_dir, self.data.report)

    def _write_run_report(self) -> None:
        """What this start of the run took, for people and scripts: nothing reads it back."""
        known = self.reference_logps
        report = {"steps": self.progress.step, **self.tally.report(), "reference": known.report() if known else None}
        write_json(self.config.run_dir / RUN_REPORT, report)

    def _card(self) -> str:
        with_reference = self.reference is not None
        return model_card(self.config, self.progress.step, len(self.data.train), with_reference=with_reference)


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """data_report.json; also of data that was refused."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "data_report.json", report)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _peak_memory() -> int:
    """Of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def due(step: int, every: int | None) -> bool:
    return bool(every) and step % (every or 1) == 0


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _tokenizer(actor: ActorConfig) -> Any:
    """The policy's tokenizer, carrying the chat template it is trained with into the exported model."""
    args = actor.model_args
    tokenizer = load_tokenizer(actor.tokenizer_path, args.revision, args.trust_remote_code)
    template = choose_template(actor.data_args.template, tokenizer)
    if template and template.name != "native":
        tokenizer.chat_template = template.text
    return tokenizer


def _without_gradients(pairs: Sequence[TokenPair], role: RoleConfig) -> list[PairBatch]:
    """Without activations to keep, twice the tokens of training fit."""
    budget = role.max_tokens_per_microbatch_in_infer or 2 * TOKENS[_kind()]
    return pack(pairs, budget, role.infer_batch_size, ladder=LADDER[_kind()])


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
