"""What is known of two sets of answers after a judge has compared them: win rates, and habits."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rather.config.schema import AnswerJudge
from rather.errors import DataError, RatherError
from rather.files import JsonObject
from rather.judges.answer_stats import interval, is_refusal, length_controlled, repetition
from rather.judges.judge import (
    AnswerRow,
    Comparison,
    Judge,
    JudgedPrompt,
    JudgeOptions,
    make_judge,
)
from rather.outcome.habits import HABITS, habit_metrics

log = logging.getLogger(__name__)

# A prompt, the answer of the base, and that of the trained model.
AnswersToPrompt = tuple[Any, str, str]


def compare_rows(
    first: Sequence[AnswerRow], second: Sequence[AnswerRow], judge: Judge
) -> JsonObject:
    """Return how often the second answers are better."""
    comparisons = judge.compare(first, second)
    if not comparisons:
        raise nothing_usable(judge)
    facts: JsonObject = {
        "flips": 0, "unreadable": 0, "tokens_spent": 0, "errors": 0, "first_errors": [],
        "left_out": 0, **judge.counts(),
    }  # fmt: skip
    if judge.errors:
        facts["left_out"] = len(first) - len({comparison.prompt for comparison in comparisons})
    scores = [comparison.scores for comparison in comparisons if comparison.scores]
    if scores:
        facts["mean_score"] = [fmean(of_file) for of_file in zip(*scores, strict=True)]
    old, new = ([row.responses[0] for row in rows] for rows in (first, second))
    habits = habit_metrics("", old, new, old)
    chances = {name: habits[name] for name in habits if name.endswith("_chance")}
    return win_rates(comparisons) | answer_facts(first, second) | chances | facts


def nothing_usable(judge: Judge) -> DataError:
    return DataError("\n".join(["no answer can be used:", *judge.counts()["first_errors"]]))


def answer_judge(asked: AnswerJudge) -> Callable[[Sequence[AnswersToPrompt]], JsonObject]:
    """Return a function that compares the answers before and after training, for eval_prompts.

    It returns what `rather judge --json` prints. What is wrong is found before training.
    """
    options = JudgeOptions.of(asked, "eval_prompts.judge")
    question = JudgedPrompt("", {"prompt": ""}, "eval_prompts")
    if problems := list(make_judge(asked.name, options).problems([question])):
        raise DataError("\n".join(problems))

    def compare(answers: Sequence[AnswersToPrompt]) -> JsonObject:
        before, after = list[AnswerRow](), list[AnswerRow]()
        for number, (prompt, old, new) in enumerate(answers, 1):
            question = JudgedPrompt(prompt, {"prompt": prompt}, f"eval_prompts: prompt {number}")
            before.append(AnswerRow(question, [old], None))
            after.append(AnswerRow(question, [new], None))
        try:
            rates = compare_rows(before, after, make_judge(asked.name, options))
        except RatherError as error:
            raise type(error)(f"eval_prompts.judge: {error}") from error
        for reason in rates["first_errors"]:
            log.warning("eval_prompts.judge: %s", reason)
        return rates

    return compare


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
