"""`rather judge`: are the answers of one file better than those of another?"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from rather.commands.answer_stats import interval, is_refusal, length_controlled, repetition
from rather.commands.journal import refuse_inputs, write_atomic
from rather.commands.judges import (
    JudgedPrompt,
    JudgeOptions,
    RuleJudge,
    Score,
    Scorer,
    ServerJudge,
    is_server,
    scorer_of,
)
from rather.commands.terminal import echo
from rather.config.redaction import public_url
from rather.config.schema import AnswerJudge
from rather.config.values import BY_CHANCE
from rather.data.json_rows import DropReason
from rather.data.read import find_sources, rows_of
from rather.errors import ConfigError, DataError, RatherError, counted
from rather.files import JsonObject
from rather.outcome.habits import HABITS, habit_metrics
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

SHOWN = 5  # errors
NEIGHBOURS = 2  # answers on either side that an answer is compared with


class AnswerRow(NamedTuple):
    """The answers to one prompt, and the row of the file."""

    question: JudgedPrompt
    responses: list[str]
    ended: list[bool] | None

    @property
    def mean_length(self) -> float:
        return fmean(map(len, self.responses))


AnswerPair = tuple[JudgedPrompt, str, str]


class Comparison(NamedTuple):
    """The outcome for B (1 wins, 0.5 ties, 0 loses) and how many characters it is longer."""

    prompt: int
    outcome: float
    longer: float


def read_answers(path: Path) -> list[AnswerRow]:
    """Return the rows of a file that `rather generate` wrote, or of one like it."""
    rows = []
    for source in find_sources(path):
        for number, row in rows_of(source):
            line = f"{source.path}:{number}"
            if isinstance(row, DropReason):
                raise DataError(f"{line}: {row.detail}")
            rows.append(_answer_row(row, line))
    if not rows:
        raise DataError(f"{path}: has no answers in it.")
    return rows


def _answer_row(row: JsonObject, place: str) -> AnswerRow:
    prompt, responses, ended = (row.get(name) for name in ("prompt", "responses", "ended"))
    if not isinstance(prompt, str | list | dict):
        raise DataError(f"{place}: prompt must be text or messages.")
    has_texts = isinstance(responses, list) and all(isinstance(text, str) for text in responses)
    if not has_texts or not responses:
        raise DataError(f"{place}: responses must be a list of texts, as `rather generate` writes.")
    has_ends = isinstance(ended, list) and len(ended) == len(responses)
    return AnswerRow(JudgedPrompt(prompt, row, place), responses, ended if has_ends else None)


def match_rows(
    first: Sequence[AnswerRow], second: Sequence[AnswerRow], a: Path, b: Path
) -> list[AnswerRow]:
    """Return the rows of the second file in the order of the first; refuse other prompts."""
    waiting: dict[str, list[AnswerRow]] = defaultdict(list)
    for row in reversed(second):
        waiting[json.dumps(row.question.prompt, sort_keys=True)].append(row)
    matched = []
    for row in first:
        same = waiting[json.dumps(row.question.prompt, sort_keys=True)]
        if not same:
            raise _other_prompts(b, row, a, b)
        matched.append(same.pop())
    if unmatched := [row for rows in waiting.values() for row in rows]:
        raise _other_prompts(a, unmatched[-1], a, b)
    return matched


def _other_prompts(file: Path, row: AnswerRow, a: Path, b: Path) -> DataError:
    return DataError(
        f"{file}: has no answer to the prompt of {row.question.place}; {a} and {b} must have the "
        "same prompts."
    )


def score_file(
    path: Path,
    name: str,
    out: Path | None,
    options: JudgeOptions,
    against: Path | None = None,
) -> JsonObject:
    """Score the answers of one file; write its rows with `scores` to `out`.

    A server gives an answer its share of wins against other answers to the prompt; with `against`,
    against those of that file alone.
    """
    if out:
        refuse_inputs(out, [path, against or path])
    rows = read_answers(path)
    facts: JsonObject = {"file": str(path), "with": public_url(name), "prompts": len(rows)}
    scores: Sequence[Sequence[Score]]
    if is_server(name):
        base = read_answers(against) if against else None
        scores, counts = _shares_of_wins(ServerJudge(name, options), rows, base)
        facts |= counts
    else:
        judge = scorer_of(name, path, options)
        scores = scores_of(judge, rows)
        facts |= problems_of(judge, _known(scores))
    if out:
        lines = zip(rows, scores, strict=True)
        write_atomic(
            out,
            (
                f"{strict_json({**row.question.row, 'scores': row_scores})}\n"
                for row, row_scores in lines
            ),
        )
    facts |= {"n": len(_known(scores)), "mean_score": fmean(_known(scores))}
    return facts | {key: values[0] for key, values in answer_facts(rows).items()}


def _known(scores: Sequence[Sequence[Score]]) -> list[float]:
    return [score for of_row in scores for score in of_row if score is not None]


def problems_of(judge: Scorer, usable: Sized) -> JsonObject:
    """Return how many answers have no score and why; raise DataError if nothing is usable."""
    shown = judge.problems[:SHOWN]
    if not usable:
        raise DataError("\n".join(["no answer can be used:", *shown]))
    return {"errors": len(judge.problems), "first_errors": shown}


def scores_of(judge: Scorer, rows: Sequence[AnswerRow]) -> list[list[Score]]:
    """Return the score of every answer of every row."""
    answers = [(row.question, text) for row in rows for text in row.responses]
    flat = iter(judge.scores(answers))
    return [[next(flat) for _ in row.responses] for row in rows]


def _shares_of_wins(
    judge: ServerJudge, rows: Sequence[AnswerRow], base: Sequence[AnswerRow] | None
) -> tuple[list[list[float]], JsonObject]:
    """Return the share of its comparisons that each answer wins; ties count half.

    Each answer meets its NEIGHBOURS on both sides, in a circle: up to five answers all meet.
    Equal answers tie without a request, and so does a verdict that cannot be read.
    """
    if base:
        groups = [[*old.responses, *row.responses] for old, row in zip(base, rows, strict=True)]
    else:
        groups = [row.responses for row in rows]
    pairs, places = list[AnswerPair](), list[tuple[int, int, int]]()
    outcomes_of = [[list[float]() for _ in answers] for answers in groups]
    for number, (row, answers) in enumerate(zip(rows, groups, strict=True)):
        if len(answers) < 2:
            raise DataError(
                f"{row.question.place}: has one answer, and a server compares answers; generate "
                "several (--answers), or name a second file."
            )
        for i, j in _neighbours(len(answers)):
            if answers[i] != answers[j]:
                pairs.append((row.question, answers[i], answers[j]))
                places.append((number, i, j))
            else:
                for k in (i, j):
                    outcomes_of[number][k].append(0.5)
    outcomes, counts = _outcomes(judge, pairs)
    for (number, i, j), outcome in zip(places, outcomes, strict=True):
        share_of_second = 0.5 if outcome is None else outcome
        outcomes_of[number][i].append(1 - share_of_second)
        outcomes_of[number][j].append(share_of_second)
    shares = []
    for row, of_answers in zip(rows, outcomes_of, strict=True):
        shares.append(list(map(fmean, of_answers[-len(row.responses) :])))
    return shares, {"comparisons": len(pairs), **counts}


def _neighbours(count: int) -> list[tuple[int, int]]:
    """Return which of so many answers are compared."""
    indices = range(count)
    return [
        (i, j) for i in indices for j in indices[i + 1 :] if min(j - i, count + i - j) <= NEIGHBOURS
    ]


def judge_files(a: Path, b: Path, name: str, options: JudgeOptions) -> JsonObject:
    """Return how often the answers of file B are better."""
    first = read_answers(a)
    second = match_rows(first, read_answers(b), a, b)
    facts: JsonObject = {
        "a": str(a), "b": str(b), "with": public_url(name), "prompts": len(first),
    }  # fmt: skip
    return facts | compare_rows(first, second, name, a, options)


def compare_rows(
    first: Sequence[AnswerRow],
    second: Sequence[AnswerRow],
    name: str,
    file: Path,
    options: JudgeOptions,
) -> JsonObject:
    """Return how often the second answers are better; `file` has the first."""
    counts_of_judge: JsonObject = {"flips": 0, "unreadable": 0, "tokens_spent": 0}
    counts_of_judge |= {"errors": 0, "first_errors": [], "left_out": 0}
    if is_server(name):
        judge = ServerJudge(name, options)
        comparisons, counts = _compare_by_server(judge, first, second)
        counts_of_judge |= counts
    else:
        comparisons, facts = _compare_by_scores(scorer_of(name, file, options), first, second)
        counts_of_judge |= facts
    old, new = ([row.responses[0] for row in rows] for rows in (first, second))
    habits = habit_metrics("", old, new, old)
    chances = {name: habits[name] for name in habits if name.endswith("_chance")}
    return win_rates(comparisons) | answer_facts(first, second) | chances | counts_of_judge


# A prompt, the answer of the base, and that of the trained model.
AnswersToPrompt = tuple[Any, str, str]


def answer_judge(
    asked: AnswerJudge, file: Path
) -> Callable[[Sequence[AnswersToPrompt]], JsonObject]:
    """Return a function that compares the answers before and after training, for eval_prompts."""
    options = JudgeOptions.of(asked)
    if is_server(asked.name) and not asked.model:
        raise ConfigError("eval_prompts.judge.model: name the model of the server that judges.")
    # What is wrong is found before training, not after it.
    if is_server(asked.name):
        ServerJudge(asked.name, options)
    else:
        judge = scorer_of(asked.name, file, options)
        if isinstance(judge, RuleJudge):
            judge.check([JudgedPrompt("", {"prompt": ""}, "eval_prompts")])

    def compare(answers: Sequence[AnswersToPrompt]) -> JsonObject:
        before, after = list[AnswerRow](), list[AnswerRow]()
        for number, (prompt, old, new) in enumerate(answers, 1):
            question = JudgedPrompt(prompt, {"prompt": prompt}, f"eval_prompts: prompt {number}")
            before.append(AnswerRow(question, [old], None))
            after.append(AnswerRow(question, [new], None))
        try:
            rates = compare_rows(before, after, asked.name, file, options)
        except RatherError as error:
            raise type(error)(f"eval_prompts.judge: {error}") from error
        for reason in rates["first_errors"]:
            log.warning("eval_prompts.judge: %s", reason)
        return rates

    return compare


def _compare_by_scores(
    judge: Scorer, first: Sequence[AnswerRow], second: Sequence[AnswerRow]
) -> tuple[list[Comparison], JsonObject]:
    """Compare mean scores; a prompt is left out if one of its answers has no score."""
    scores = scores_of(judge, [*first, *second])
    means = [None if None in of_row else fmean(_known([of_row])) for of_row in scores]
    prompts = zip(first, second, means[: len(first)], means[len(first) :], strict=True)
    compared = [prompt for prompt in prompts if None not in prompt[2:]]
    facts = problems_of(judge, compared) | {"left_out": len(first) - len(compared)}
    rows_a, rows_b, of_a, of_b = zip(*compared, strict=True)
    facts["mean_score"] = [fmean(of_a), fmean(of_b)]
    return compare_means(rows_a, rows_b, of_a, of_b), facts


def compare_means(
    first: Sequence[AnswerRow],
    second: Sequence[AnswerRow],
    of_a: Sequence[float],
    of_b: Sequence[float],
) -> list[Comparison]:
    """Compare the mean scores of the answers to each prompt."""
    comparisons = []
    for i, (row_a, row_b) in enumerate(zip(first, second, strict=True)):
        outcome = 0.5 if of_a[i] == of_b[i] else float(of_b[i] > of_a[i])
        comparisons.append(Comparison(i, outcome, row_b.mean_length - row_a.mean_length))
    return comparisons


def _compare_by_server(
    judge: ServerJudge, first: Sequence[AnswerRow], second: Sequence[AnswerRow]
) -> tuple[list[Comparison], JsonObject]:
    """Compare the i-th answer with the i-th; verdicts that differ between the orders are ties."""
    pairs, prompts = [], []
    for number, (row_a, row_b) in enumerate(zip(first, second, strict=True)):
        if len(row_a.responses) != len(row_b.responses):
            raise DataError(
                f"{row_b.question.place}: has {counted(len(row_b.responses), 'answers')}, "
                f"{row_a.question.place} has {len(row_a.responses)}; a server compares equally "
                "many."
            )
        for text, other_text in zip(row_a.responses, row_b.responses, strict=True):
            pairs.append((row_a.question, text, other_text))
            prompts.append(number)
    outcomes, counts = _outcomes(judge, pairs)
    comparisons = []
    for prompt, (_, text, other_text), outcome in zip(prompts, pairs, outcomes, strict=True):
        if outcome is not None:
            comparisons.append(Comparison(prompt, outcome, len(other_text) - len(text)))
    return comparisons, counts


def _outcomes(
    judge: ServerJudge, pairs: Sequence[AnswerPair]
) -> tuple[list[float | None], JsonObject]:
    """Return the outcome of (prompt, A, B) for B; None if a verdict cannot be read."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verdicts", total=2 * len(pairs))
        verdicts = judge.verdicts(pairs, lambda: bar.advance(task))
    outcomes: list[float | None] = []
    flips = 0
    reasons = Counter(verdict.problem for pair in verdicts for verdict in pair if verdict.problem)
    for there, back in verdicts:
        if there.problem or back.problem:
            outcomes.append(None)
            continue
        flips += there.choice != back.choice
        agreed = there.choice if there.choice == back.choice else "C"
        outcomes.append({"A": 0.0, "B": 1.0}.get(agreed or "C", 0.5))
    if pairs and not any(outcome is not None for outcome in outcomes):
        raise DataError(
            f"--with {judge.url}: no verdict could be read ({_listed(reasons)}); look at "
            "--judge-template and --judge-tokens."
        )
    counts = {"flips": flips, "unreadable": reasons.total(), "unreadable_because": dict(reasons)}
    return outcomes, {**counts, "tokens_spent": judge.tokens_spent}


def _listed(reasons: dict[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in reasons.items())


def win_rates(comparisons: Sequence[Comparison]) -> JsonObject:
    """Return wins, ties and losses of B, and its win rates, for which every prompt counts once."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for comparison in comparisons:
        by_prompt[comparison.prompt].append(comparison.outcome)
    rates = list(map(fmean, by_prompt.values()))
    outcomes = [comparison.outcome for comparison in comparisons]
    low, high = interval(rates)
    return {
        "n": len(outcomes),
        "wins": outcomes.count(1.0),
        "ties": outcomes.count(0.5),
        "losses": outcomes.count(0.0),
        "by_prompt": {str(number): rate for number, rate in zip(by_prompt, rates, strict=True)},
        "win_rate": fmean(rates),
        "win_rate_low": low,
        "win_rate_high": high,
        "win_rate_length_controlled": length_controlled(
            outcomes,
            [comparison.longer for comparison in comparisons],
            [1 / len(by_prompt[comparison.prompt]) for comparison in comparisons],
        ),
    }


def answer_facts(*files: Sequence[AnswerRow]) -> JsonObject:
    """Return what the answers of each file are like: length, and shares with a fault."""
    names = ("mean_length", "cut", "repetition", "refusals", *HABITS)
    facts: JsonObject = {name: [] for name in names}
    for rows in files:
        texts = [text for row in rows for text in row.responses]
        ends = [end for row in rows for end in row.ended or []]
        facts["mean_length"].append(fmean(map(len, texts)))
        facts["cut"].append(ends.count(False) / len(ends) if len(ends) == len(texts) else None)
        facts["repetition"].append(fmean(map(repetition, texts)))
        facts["refusals"].append(fmean(map(is_refusal, texts)))
        for name, has in HABITS.items():
            facts[name].append(fmean(map(has, texts)))
    return facts


def print_verdict(result: JsonObject) -> None:
    """Print the result of two files, or of one."""
    if "comparisons" in result:
        echo(f"{result['file']}: {result['n']} answers, {result['comparisons']} comparisons")
        _print_server_counts(result)
        return
    if "win_rate" not in result:
        echo(f"{result['file']}: mean score {result['mean_score']:.4g} of {result['n']} answers")
        _print_errors(result)
        return
    echo(
        f"B wins {result['wins']}, ties {result['ties']}, loses {result['losses']} of {result['n']}"
    )
    echo(
        f"win rate of B: {result['win_rate']:.1%} (95 %: {result['win_rate_low']:.1%} to "
        f"{result['win_rate_high']:.1%})"
    )
    echo(f"at equal length: {result['win_rate_length_controlled']:.1%}")
    if is_server(result["with"]):
        _print_server_counts(result)
    else:
        echo(f"mean score: {_both(result['mean_score'], '.4g')}")
    echo(f"characters: {_both(result['mean_length'], '.0f')}")
    for name in ("cut", "repetition", "refusals"):
        echo(f"{name}: {_both(result[name], '.1%')}")
    for name, text in (
        ("repeats", "repeat a sentence"),
        ("starts_within", "begin within a sentence"),
    ):
        more = ", more than by chance" if result[f"{name}_chance"] < BY_CHANCE else ""
        echo(f"{text}: {_both(result[name], '.1%')}{more}")
    _print_errors(result)


def _print_errors(result: JsonObject) -> None:
    if result.get("errors"):
        left_out = result.get("left_out")  # of two files
        prompts = "" if left_out is None else f", {counted(left_out, 'prompts')} left out"
        echo(f"{counted(result['errors'], 'answers')} without a score{prompts}:")
        for reason in result["first_errors"]:
            echo(f"  {reason}")


def _print_server_counts(result: JsonObject) -> None:
    comparisons = result.get("comparisons", result["n"])
    echo(f"verdicts that flip with the order: {result['flips']} of {comparisons} (ties)")
    reasons = _listed(result["unreadable_because"])
    echo(f"verdicts that cannot be read: {result['unreadable']}{reasons and f' ({reasons})'}")
    echo(f"tokens spent: {result['tokens_spent']}")


def _both(values: Sequence[Any], form: str) -> str:
    texts = ["unknown" if number is None else f"{number:{form}}" for number in values]
    return f"A {texts[0]}, B {texts[1]}"
