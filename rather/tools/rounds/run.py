"""The loop over rounds. Each stage is a command of its own that continues after a kill."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import typer

from rather.commands.generate import AnswerRequest
from rather.commands.journal import write_atomic
from rather.commands.judge import read_answers, score_file
from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.data.prepare import BadRows, prepare
from rather.errors import ConfigError, RatherError
from rather.files import JsonObject, file_sha, make_folder, own, parse_json, read_json, replace_own
from rather.judges.judge import JudgeOptions, make_judge
from rather.model.generate import Decoding
from rather.run_folder import control
from rather.run_folder.model_source import weights_of
from rather.run_folder.names import CONFIG, DATA_REPORT, FINISHED, METRICS
from rather.tools.rounds.answers import AnswerSource
from rather.tools.rounds.evaluation import Evaluated, evaluate, is_worse
from rather.tools.rounds.settings import Plan
from rather.tools.rounds.stages import RoundStages
from rather.tools.rounds.status import (
    EVALUATION,
    FIGURES,
    RESULT,
    best_round,
    limit_problem,
    without_lists,
)
from rather.tools.sweep import release_memory, train_here
from rather.tracking.json_lines import strict_json

UNUSED = (  # answers and pairs that the data report counts as skipped
    "ties_skipped", "cut_answer", "empty_answer", "duplicate_answer", "small_gap", "length_gap",
)  # fmt: skip


class TrainingEnded(RatherError):
    """A training was stopped or failed; its message was printed already."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = code


class NoPairs(Exception):
    """All answers of a round are equally good, or cannot be used."""


def refuse_no_pairs(config: DPOConfig) -> None:
    """Raise NoPairs if the scored answers give no pair; the pairs are in the cache afterwards."""
    try:
        prepare(config)
    except BadRows as problem:
        if problem.report["train"]["pairs"] == 0:
            raise NoPairs from None


def say(text: str) -> None:
    typer.secho(f"rounds: {text}", bold=True, err=True)


def run_rounds(plan: Plan) -> JsonObject:
    """Run all rounds, or continue, and return what rounds.json says at the end."""
    make_folder(plan.folder, "output_dir")
    with control.lock(plan.folder):
        (plan.folder / FINISHED).unlink(missing_ok=True)
        replace_own(plan.folder / CONFIG, dump_yaml(plan.base))
        return RoundsRun(plan).run()


class RoundsRun:
    """All rounds of a plan, and what is known of those that are evaluated."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rounds = plan, plan.rounds
        self.evaluated: list[JsonObject] = []  # by number; 0 is the first model

    def run(self) -> JsonObject:
        count = self.rounds.count
        reason = f"all {count} rounds are done" if count > 1 else "the round is done"
        for number in range(count + 1):
            last = number == count
            folder = self.plan.round_folder(number)
            make_folder(folder)
            model = self.plan.model(number)
            with AnswerSource(model, self.rounds.server, folder, number) as source:
                self._evaluate(number, source)
                if problem := limit_problem(self.evaluated[-1], self.plan.limits):
                    reason = f"round {number} exceeds a limit: {problem.rstrip('.')}"
                    break
                if self._best() != number and is_worse(*self._this_and_best()):
                    reason = f"round {number} is worse than round {self._best()}"
                    break
                if last:
                    break
                self._generate(number + 1, source)
            self._judge(number + 1)
            try:
                self._train(number + 1)
            except NoPairs:
                reason = f"round {number + 1} has no pairs: all answers to a prompt score equally"
                break
        return self._end(reason)

    # --- stages ---

    def _generate(self, number: int, source: AnswerSource) -> None:
        """Write answers.jsonl of a round by the model before it, and those of the pool."""
        folder = self.plan.round_folder(number)
        make_folder(folder)
        self._write_answers(number, "answers", source, self.plan.prompts(number), sampled=True)
        for i, name in enumerate(self.plan.pool):
            with AnswerSource(name, None, folder, number) as pool_source:
                self._write_answers(
                    number, f"pool-{i}", pool_source, self.plan.prompts(number), True
                )

    def _write_answers(
        self, number: int, name: str, source: AnswerSource, prompts: Path, sampled: bool
    ) -> Path:
        """Write sampled answers to prompts, or one greedy answer to each."""
        rounds = self.rounds
        greedy = Decoding(rounds.max_new_tokens)
        decoding = Decoding(rounds.max_new_tokens, rounds.temperature, rounds.top_p)
        seed = self.plan.base.seed + number
        request = (
            AnswerRequest(rounds.answers, decoding, seed) if sampled else AnswerRequest(1, greedy)
        )
        answers_file = self.plan.round_folder(number) / f"{name}.jsonl"
        server = source.keys.model_dump(include={"url", "start"}) if source.keys else None
        inputs: JsonObject = {
            "weights": weights_of(source.model).digest(),
            "prompts": file_sha(prompts),
            "request": request.as_json(),
            "server": server,
        }
        stages = RoundStages(self.plan.round_folder(number))
        if not stages.is_done(name, inputs, answers_file):
            say(f"round {number}: {source.model} answers {prompts}")
        stages.run(
            name, inputs, answers_file, lambda _: source.write(prompts, answers_file, request)
        )
        release_memory()
        return answers_file

    def _judge(self, number: int) -> None:
        """Write scored.jsonl of a round from its answers and those of the pool."""
        folder = self.plan.round_folder(number)
        files = [folder / "answers.jsonl"]
        files += [folder / f"pool-{i}.jsonl" for i in range(len(self.plan.pool))]
        self._score(number, "scored", files)

    def _score(
        self, number: int, name: str, files: Sequence[Path], against: Path | None = None
    ) -> Path:
        """Write scores; a server compares with the answers in `against`, else with each other."""
        asked = self.plan.judge
        judge = make_judge(asked.name, JudgeOptions.of(asked, "rounds.judge")) if asked else None
        folder = self.plan.round_folder(number)
        scored_file = folder / f"{name}.jsonl"
        inputs: JsonObject = {
            "files": [file_sha(file) for file in files],
            "judge": judge and judge.digest(),
        }
        if judge and judge.is_relative and against:
            inputs["against"] = file_sha(against)

        def work(_: bool) -> None:
            answers = files[0]
            if len(files) > 1:
                answers = folder / "pooled.jsonl"
                write_atomic(answers, pooled(files))
            if judge:
                score_file(answers, judge, scored_file, against)
            else:
                write_atomic(scored_file, scored_by_source(files))

        RoundStages(folder).run(name, inputs, scored_file, work)
        release_memory()
        return scored_file

    def _train(self, number: int) -> None:
        plan, folder = self.plan, self.plan.round_folder(number)
        config = plan.training(number)
        args = config.actor_train
        inputs: JsonObject = {
            "config": {**plan.values, "rounds": None},
            "files": [file_sha(file) for file in args.data_args.files],
            "model": weights_of(args.model_path).digest(),
            "reference": weights_of(config.reference.model_path).digest(),
        }

        def work(begins_again: bool) -> None:
            if number > 1:
                refuse_no_pairs(config)
            say(f"round {number}: training on {', '.join(map(str, args.data_args.files))}")
            code, error = train_here(plan.training(number, overwrite=begins_again))
            if code:
                raise TrainingEnded(code, error or "stopped; run the same command again")

        model = Path(plan.model(number))
        RoundStages(folder).run("train", inputs, model, work)
        if not model.is_dir():
            raise ConfigError(f"{model}: the training has exported no model.")

    def _evaluate(self, number: int, source: AnswerSource) -> None:
        """Write eval.json of a round, and the metrics of all rounds so far."""
        plan, folder = self.plan, self.plan.round_folder(number)
        prompts = plan.locate(self.rounds.held_out_prompts)
        answers = self._write_answers(number, "held_out", source, prompts, False)
        if plan.judge:
            first_answers = plan.round_folder(0) / answers.name
            answers = self._score(number, "held_out_scored", [answers], first_answers)
        base = None
        if number:
            first = plan.round_folder(0) / answers.name
            base = Evaluated(self.evaluated[0], first)
        evaluation_file = folder / EVALUATION
        inputs: JsonObject = {
            "answers": file_sha(answers),
            "weights": weights_of(source.model).digest(),
            "first": weights_of(plan.first_model).digest(),
        }

        def work(_: bool) -> None:
            say(f"round {number}: evaluating {source.model}")
            figures = evaluate(source.model, plan.first_model, answers, base)
            figures |= pairs_of(folder / "train") if number else {}
            write_atomic(
                evaluation_file, [strict_json({"round": number, **figures}, indent=1), "\n"]
            )

        RoundStages(folder).run("eval", inputs, evaluation_file, work)
        self.evaluated.append(read_json(evaluation_file, own))
        self._write_metrics()
        say(line_of(self.evaluated[-1]))

    # --- the result ---

    def _best(self) -> int:
        """Return the round with the highest score, within the limits; without a judge, the last."""
        return best_round(self.evaluated, self.plan.limits)

    def _this_and_best(self) -> tuple[JsonObject, JsonObject]:
        return self.evaluated[-1], self.evaluated[self._best()]

    def _write_metrics(self) -> None:
        """Write metrics.jsonl, by which the board shows all rounds as one run."""
        lines = []
        for figures in self.evaluated:
            every_figure = {f"rounds/{name}": figures.get(name) for name in FIGURES}
            record = {name: figure for name, figure in every_figure.items() if figure is not None}
            lines.append(strict_json({"step": figures["round"], **record}) + "\n")
        write_atomic(self.plan.folder / METRICS, lines)

    def _end(self, reason: str) -> JsonObject:
        """Export the best round, and write rounds.json."""
        best = self._best()
        target = self.plan.folder / "model"
        if best:
            copy_model(Path(self.plan.model(best)), target)
        elif target.exists():
            shutil.rmtree(target)
        reached: JsonObject = {
            "best": best,
            "model": str(target) if best else self.plan.first_model,
            "reason": reason,
            "rounds": [without_lists(figures) for figures in self.evaluated],
        }
        write_atomic(self.plan.folder / RESULT, [strict_json(reached, indent=1), "\n"])
        replace_own(self.plan.folder / FINISHED, f"{best}\n")
        return reached


def line_of(figures: JsonObject) -> str:
    """Return the figures of a round in one line."""
    texts = [f"round {figures['round']}"]
    for name in FIGURES:
        figure = figures.get(name)
        if figure is not None:
            texts.append(f"{name.replace('_', ' ')} {figure:.4g}")
    return ", ".join(texts)


def pairs_of(run: Path) -> JsonObject:
    """Return how many pairs were trained on, and how many answers and pairs were not used."""
    report = read_json(run / DATA_REPORT, own)["train"]
    counts = {kind: entry["count"] for kind, entry in report["dropped"].items()}
    for kind, entry in report["changed"].items():
        if kind in UNUSED:
            counts[kind] = entry["count"]
    return {"pairs": report["pairs"], "dropped": sum(counts.values()), "reasons": counts}


def pooled(files: Sequence[Path]) -> Iterator[str]:
    """Yield the rows of the first file with the answers of the others added."""
    for rows in zip(*map(read_answers, files), strict=True):
        first = rows[0].question.row
        merged = {name: first[name] for name in first if name != "scores"}
        for name in ("responses", "ended"):
            merged[name] = [entry for row in rows for entry in row.question.row[name]]
        ids = [row.question.row.get("response_ids") for row in rows]
        same_tokens = len({row.question.row.get("tokens_digest") for row in rows}) == 1
        is_known = same_tokens and all(ids_of_row is not None for ids_of_row in ids)
        merged["response_ids"] = list(chain.from_iterable(ids)) if is_known else None
        yield strict_json(merged) + "\n"


def scored_by_source(files: Sequence[Path]) -> Iterator[str]:
    """Yield the rows of all files: the model's own answers have score 1, those of the pool 0."""
    own_answers = [len(row.responses) for row in read_answers(files[0])]
    for text, count in zip(pooled(files), own_answers, strict=True):
        row = parse_json(text)
        answers_of_pool = len(row["responses"]) - count
        yield strict_json({**row, "scores": [1.0] * count + [0.0] * answers_of_pool}) + "\n"


def copy_model(source: Path, target: Path) -> None:
    """Copy a model folder, whole or not at all."""
    temporary = target.with_name(f".tmp-{target.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    shutil.copytree(source, temporary)
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)
