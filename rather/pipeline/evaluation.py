"""Evaluation of a run: the metrics of held-out pairs, and answers to eval_prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from rather.cluster.launch import Role, Roles
from rather.cluster.worker import ActorWorker
from rather.config.schema import DataArgs, EvalPrompts
from rather.data.batch import Columns, PairFacts
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.pairs import PairDataset
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.data.shares import PairRows, RunPairs
from rather.data.tokens import Ids
from rather.errors import ConfigError, DataError, MemoryShortage
from rather.files import parse_json, read_bytes, replace_own
from rather.judges.compare import answer_judge
from rather.losses.metrics import Window, drift, interval_of_accuracy, whole_set_metrics
from rather.losses.objective import PairLoss, Running
from rather.losses.own import OwnMetric, own_metrics
from rather.model.generate import Decoding, GeneratedAnswer, generate
from rather.model.policy import PolicyModel
from rather.outcome.habits import habit_metrics
from rather.pipeline.guard import OutOfMemoryRetry
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.steps import EVALUATION_CHUNK
from rather.run_folder.names import ANSWERS
from rather.tracking.json_lines import read_lines, strict_json

log = logging.getLogger(__name__)

METRICS = "eval/answers/"
COMPARED = 64  # held-out pairs that are computed with the exported model
AT_ONCE = 64  # prompts
MOST_AT_ONCE = 192  # prompts, where fewer are tried if memory runs out
RUN = 4  # tokens: repetition is the share of such runs that came before in the same answer

Stopped = Callable[[], bool]
# Some pairs, and their log-probs of the policy and of the reference, if there is one.
EvaluatedPart = tuple[PairFacts, Columns, Columns | None]


class Interrupted(Exception):
    """The run was asked to stop during an evaluation."""


@dataclass
class Evaluation:
    """Evaluates whole sets: weighted by pairs, no remainder dropped.

    A reference that stays frozen is asked once in a run.
    """

    policy: ActorWorker
    reference: ReferenceStream
    retry: OutOfMemoryRetry
    sets: Mapping[str, PairDataset]
    pairs: RunPairs
    objective: PairLoss
    # The mean reward of training; None: unknown, the mean over the evaluated set is used instead.
    running: Running | None = field(default_factory=lambda: [0, 0.0])
    known: dict[str, list[Columns | None]] = field(default_factory=dict)  # of the reference
    parts: dict[str, list[EvaluatedPart]] = field(default_factory=dict)  # the last evaluation
    metrics: Mapping[str, OwnMetric] = field(default_factory=dict)  # the user's

    def record(self, step: int, stopped: Stopped) -> dict[str, Any]:
        """Return the metrics of all sets. `stopped` is called between chunks."""
        record: dict[str, Any] = {}
        for name, dataset in self.sets.items():
            parts = list(self._parts(name, len(dataset), step, stopped))
            self.parts[name] = parts
            prefix = f"eval/{name}/" if name else "eval/"
            metrics = metrics_of(parts, self._score, self.metrics)
            record |= {prefix + key: value for key, value in metrics.items()}
            record[f"{prefix}pairs"] = len(dataset)
        return record

    def ratios(self) -> Iterator[tuple[PairRows, NDArray[Any]]]:
        """Yield the pairs of each set with the log-ratios of both answers, [pairs, 2].

        They are those of the last evaluation; without a reference, log-probs per token.
        """
        for name, parts in self.parts.items():
            values = []
            for facts, policy, reference in parts:
                sums = policy["sum"].cpu()
                values.append(sums - reference["sum"].cpu() if reference else sums / facts.length)
            rows = PairRows(f"eval/{name}", np.arange(len(self.sets[name])), self.pairs)
            yield rows, np.asarray(torch.cat(values), np.float32)

    def _score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        """Return the metrics of a whole set, compared with its own KL or the training's mean."""
        kind = self.objective.baseline_kind
        if reference and kind == "mean" and self.running is not None:
            mean = torch.full_like(reference["sum"], self.running[1])
            reference = {**reference, "baseline": mean}
        elif reference and kind:
            reference, _ = self.objective.with_baseline(policy, reference, [0, 0.0])
        return self.policy.score(facts, policy, reference)

    def compare_file(self, folder: Path) -> None:
        """Log the mean margin of some held-out pairs in memory, and with an exported model.

        Nothing if it cannot be measured, or if the file has the weights that were trained with.
        """
        worker = self.policy
        if not self.sets or not isinstance(worker, ActorWorker):
            return
        name, dataset = next(iter(self.sets.items()))
        rows = np.arange(min(COMPARED, len(dataset)))
        step = self.retry.packing.step(PairRows(f"eval/{name}", rows, self.pairs), 0)
        if not (found := worker.compare_file(folder, step.policy)):
            return
        facts, known = PairFacts.of_pairs(step.pairs), self.reference.columns(step)
        metrics = [metrics_of([(facts, columns, known)], self._score) for columns in found]
        margins = [each["rewards/margins"] for each in metrics if "rewards/margins" in each]
        if margins:
            text = "held-out margin of %d pairs: %.4g in training, %.4g with this model"
            log.info(text, len(rows), *margins)

    def _parts(
        self, name: str, pairs: int, number: int, stopped: Stopped
    ) -> Iterator[EvaluatedPart]:
        known = self.known.setdefault(name, [])
        for chunk, first in enumerate(range(0, pairs, EVALUATION_CHUNK)):
            if stopped():
                raise Interrupted
            rows = np.arange(first, min(first + EVALUATION_CHUNK, pairs))
            step = self.retry.packing.step(PairRows(f"eval/{name}", rows, self.pairs), number)
            policy = self.retry.run("actor_train", step, self.policy.compute_log_probs)
            if chunk == len(known):
                known.append(self.reference.columns(step))
            yield PairFacts.of_pairs(step.pairs), policy, known[chunk]


def metrics_of(
    parts: Iterable[EvaluatedPart],
    score: Callable[[PairFacts, Columns, Columns | None], dict[str, float]],
    own: Mapping[str, OwnMetric] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the metrics of a whole set, of which a few numbers per pair are known.

    `own` are the user's metrics, which are computed in this process.
    """
    facts, policy, reference = zip(*parts, strict=True)
    known = None if reference[0] is None else _join(reference)
    every, columns, window = PairFacts.concat(facts), _join(policy), Window()
    window.add(score(every, columns, known), pairs=0, tokens=0)
    found = window.means()
    if own:
        found |= own_metrics(own, every, _on_cpu(columns), known and _on_cpu(known))
    if "rewards/accuracies" in found:
        found |= interval_of_accuracy(every, found["rewards/accuracies"])
    is_paired = {"logps/chosen", "rewards/length_correlation"} <= found.keys()
    sums = columns["sum"].cpu()
    reference_sums = None if known is None else known["sum"].cpu()
    if reference_sums is not None and found:  # without any weight there are no metrics
        found["drift"] = drift(every, sums, reference_sums, is_paired=is_paired)
    if is_paired:
        found |= whole_set_metrics(every, sums, reference_sums)
    return found


def _on_cpu(columns: Columns) -> Columns:
    return {name: column.cpu() for name, column in columns.items()}


def _join(parts: Sequence[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Answers:
    """eval_prompts: greedy answers of policy and reference to the same prompts.

    On one device, where both models are whole in this process; AnswersAtEnd is for several. No
    random number is drawn and no weight is touched.
    """

    def __init__(
        self,
        asked: EvalPrompts,
        roles: Roles,
        last_step: int,
        *,
        run_dir: Path,
        data_args: DataArgs,
        sequence_length: int,
        is_always_judged: bool,
    ) -> None:
        self.asked, self.roles, self.last_step = asked, roles, last_step
        self.run_dir, self.file = run_dir, run_dir / ANSWERS
        self.data_args, self.sequence_length = data_args, sequence_length
        self.prompts = read_prompts(asked, data_args)
        self.known: list[GeneratedAnswer] | None = None  # of the reference
        self.chosen: Sequence[str] = ()  # answers of the training data
        self.is_always_judged = is_always_judged
        self.judge = answer_judge(asked.judge) if asked.judge else None
        # How the last answers compare with the reference's, from 0 to 1, by the number of a prompt.
        self.scores: dict[str, float] = {}

    def begin(self, tokenizer: Any, *, resumes: bool) -> None:
        """Tokenise the prompts as training does.

        Called before the weights of a checkpoint are loaded: without a reference, the policy is
        compared with its beginning.
        """
        self.tokenizer = tokenizer
        limit = self.sequence_length
        recipe = recipe_of(tokenizer, self.data_args, limit)
        encoder = encoder_of(recipe, "eval_prompts")
        self.end_of_turn, self.ids = encoder.end_of_turn, list[Ids]()
        for number, text in enumerate(self.prompts, 1):
            try:
                self.ids.append(encoder.prompt_ids(TextPair(text, "", ""), as_trained=True))
            except DropReason as reason:
                raise DataError(f"eval_prompts: prompt {number}: {reason.detail}") from None
            tokens, most = len(self.ids[-1]), self.asked.max_new_tokens
            if tokens + most > limit:
                raise ConfigError(
                    f"eval_prompts: prompt {number} has {tokens} tokens, and with max_new_tokens "
                    f"({most}) more than sequence_length ({limit}); change one of the three."
                )
        role = self.roles.actor_train
        if resumes and self.roles.reference is None and is_local(role):
            self.known = self._answers(role)

    def forget_unlogged(self) -> None:
        """Remove the answers of evaluations that metrics.jsonl lacks: they will be repeated."""
        if not self.file.exists():
            return
        metrics, _ = read_lines(self.run_dir / "metrics.jsonl")
        logged = {line["step"] for line in metrics if f"{METRICS}prompts" in line}
        self._write(line for line in read_lines(self.file)[0] if line["step"] in logged)

    def record(self, step: int, stopped: Stopped) -> dict[str, Any]:
        """Return the metrics of the answers at this step."""
        policy = self._answers(self.roles.actor_train, stopped)
        if self.known is None:  # without one it is step 0, and the policy its own beginning
            role = self.roles.reference
            self.known = self._answers(role, stopped) if role else policy
        return self.compare(step, self.known, policy)

    def compare(
        self, step: int, known: Sequence[GeneratedAnswer], policy: Sequence[GeneratedAnswer]
    ) -> dict[str, Any]:
        """Return the metrics of these answers, and write their texts to answers.jsonl."""
        rows: list[dict[str, Any]] = [{"step": step, "prompt": prompt} for prompt in self.prompts]
        means: dict[str, float] = {}
        for name, answers in (("reference", known), ("policy", policy)):
            stats = [
                {"tokens": len(each.ids), "repetition": repetition(each.ids), "ended": each.ended}
                for each in answers
            ]
            for row, answer, numbers in zip(rows, answers, stats, strict=True):
                row[name] = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
                row[f"{name}_stats"] = numbers
            for key in stats[0]:
                total = sum(float(numbers[key]) for numbers in stats)
                means[f"{METRICS}{name}/{key}"] = total / len(stats)
        before, after = ([row[name] for row in rows] for name in ("reference", "policy"))
        means |= habit_metrics(METRICS, before, after, self.chosen)
        self._write([*read_lines(self.file)[0], *rows])
        return {**means, f"{METRICS}prompts": len(rows), **self._win_rate(step, rows)}

    def _win_rate(self, step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return how often the policy's answers are better; before the first step all are ties."""
        if self.judge is None or not (self.is_always_judged or step == self.last_step):
            return {}
        names = ("win_rate", "win_rate_low", "win_rate_high", "win_rate_length_controlled")
        if step == 0:
            return dict.fromkeys((f"eval/{name}" for name in names), 0.5)
        compared = self.judge([(row["prompt"], row["reference"], row["policy"]) for row in rows])
        self.scores = compared["by_prompt"]
        return {f"eval/{name}": compared[name] for name in names}

    def _answers(self, role: Role, stopped: Stopped = lambda: False) -> list[GeneratedAnswer]:
        most = self.asked.max_new_tokens
        answers = answer_all(role, self.ids, self.tokenizer, most, stopped, "eval_prompts")
        return [self._cut(answer) for answer in answers]

    def answers_of(self, policy: PolicyModel) -> list[GeneratedAnswer]:
        """Return the answers of a model that is whole in this process."""
        decoding, answers = Decoding(self.asked.max_new_tokens), list[GeneratedAnswer]()
        for first in range(0, len(self.ids), AT_ONCE):
            chunk = self.ids[first : first + AT_ONCE]
            answers += generate(policy.causal_lm, self.tokenizer, chunk, decoding)
        return [self._cut(answer) for answer in answers]

    def _cut(self, answer: GeneratedAnswer) -> GeneratedAnswer:
        """Cut at the template's end of a turn, which the settings of a base model may not know."""
        if self.end_of_turn not in answer.ids:
            return answer
        return GeneratedAnswer(answer.ids[: answer.ids.index(self.end_of_turn)], ended=True)

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write all lines; if the disk is full new texts are lost and the run continues."""
        try:
            replace_own(self.file, "".join(f"{strict_json(row)}\n" for row in rows))
        except OSError as error:
            log.warning("%s: cannot be written (%s)", self.file, error.strerror)


def answer_all(
    role: Role, prompts: Sequence[Ids], tokenizer: Any, tokens: int, stopped: Stopped, key: str
) -> list[GeneratedAnswer]:
    """Return greedy answers of up to so many tokens, as many at a time as memory allows."""
    assert is_local(role)
    worker, size = role, MOST_AT_ONCE
    answers: list[GeneratedAnswer] = []
    while len(answers) < len(prompts):
        if stopped():
            raise Interrupted
        chunk = prompts[len(answers) :][:size]
        try:
            answers += worker.answer(chunk, tokenizer, tokens)
        except torch.OutOfMemoryError as error:
            if len(chunk) == 1:
                raise MemoryShortage(
                    f"{key}: an answer does not fit in memory next to the models ({error}); "
                    "lower max_new_tokens, or switch it off."
                ) from error
            size = len(chunk) // 2
        worker.release()
    return answers


def is_local(role: Role) -> TypeGuard[ActorWorker]:
    """Return whether the whole model of a role is in this process: only then can it answer."""
    return isinstance(role, ActorWorker) and role.member.world == 1


def read_prompts(asked: EvalPrompts, data_args: DataArgs) -> list[str]:
    """Return the prompts of the config, or of its file: lines of text, or rows with `prompt`."""
    if asked.file is None:
        return list(asked.prompts or [])
    path = data_args.locate(asked.file)
    try:
        content = read_bytes(path).decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise DataError(f"eval_prompts.file: {path} cannot be read ({error}).") from error
    lines = [line for line in content.split("\n") if line.strip()]
    if not lines:
        raise DataError(f"eval_prompts.file: {path} has no prompt in it.")
    if path.suffix != ".jsonl":
        return lines
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        row: Any = None
        with suppress(ValueError):
            row = parse_json(line)
        text = row.get("prompt") if isinstance(row, dict) else row
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"eval_prompts.file: {path}, prompt {number}: neither a JSON text nor a row with a "
                "text under 'prompt'."
            )
        prompts.append(text)
    return prompts


def repetition(ids: Sequence[int]) -> float:
    """Return the share of runs of four tokens that came before in the same answer."""
    runs = [tuple(ids[first : first + RUN]) for first in range(len(ids) - RUN + 1)]
    return round(1 - len(set(runs)) / len(runs), 4) if runs else 0.0
