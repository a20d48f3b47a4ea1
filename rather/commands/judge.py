"""`rather judge`: are the answers of one file better than those of another?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rather.commands.journal import refuse_inputs, write_atomic
from rather.commands.terminal import echo
from rather.config.redaction import public_url
from rather.config.values import BY_CHANCE
from rather.data.json_rows import DropReason
from rather.data.read import find_sources, rows_of
from rather.errors import ConfigError, DataError, counted
from rather.files import JsonObject
from rather.judges.compare import answer_facts, compare_rows, nothing_usable
from rather.judges.judge import FIXED, AnswerRow, Judge, JudgedPrompt
from rather.judges.pairwise import listed
from rather.tracking.json_lines import strict_json


def columns_of(words: Iterable[str]) -> dict[str, str]:
    """Return the columns that `--column NAME=COLUMN` gives to names."""
    columns = {}
    for word in words:
        name, equals, column = word.partition("=")
        if not (name and equals and column) or name in FIXED:
            raise ConfigError(
                f"--column {word}: write NAME=COLUMN, as in --column gold=answer; NAME is none of "
                f"{', '.join(FIXED)}."
            )
        columns[name] = column
    return columns


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
    path: Path, judge: Judge, out: Path | None, against: Path | None = None
) -> JsonObject:
    """Score the answers of one file; write its rows with `scores` to `out`.

    If scores depend on the other answers to a prompt, those in `against` are added.
    """
    if out:
        refuse_inputs(out, [path, against or path])
    rows = read_answers(path)
    judged_rows = rows
    if against and judge.is_relative:
        judged_rows = [
            row._replace(responses=[*base.responses, *row.responses])
            for base, row in zip(read_answers(against), rows, strict=True)
        ]
    all_scores = zip(rows, judge.scores_of(judged_rows), strict=True)
    scores = [of_row[-len(row.responses) :] for row, of_row in all_scores]
    numbers = [score for of_row in scores for score in of_row if score is not None]
    if not numbers:
        raise nothing_usable(judge)
    if out:
        lines = zip(rows, scores, strict=True)
        write_atomic(
            out,
            (
                f"{strict_json({**row.question.row, 'scores': row_scores})}\n"
                for row, row_scores in lines
            ),
        )
    facts: JsonObject = {"file": str(path), "with": public_url(judge.name), "prompts": len(rows)}
    facts |= {**judge.counts(), "n": len(numbers), "mean_score": fmean(numbers)}
    return facts | {key: values[0] for key, values in answer_facts(rows).items()}


def judge_files(a: Path, b: Path, judge: Judge) -> JsonObject:
    """Return how often the answers of file B are better."""
    first = read_answers(a)
    second = match_rows(first, read_answers(b), a, b)
    facts: JsonObject = {
        "a": str(a), "b": str(b), "with": public_url(judge.name), "prompts": len(first),
    }  # fmt: skip
    return facts | compare_rows(first, second, judge)


def print_verdict(result: JsonObject) -> None:
    """Print the result of two files, or of one."""
    if "win_rate" not in result:
        if "comparisons" in result:
            echo(f"{result['file']}: {result['n']} answers, {result['comparisons']} comparisons")
        else:
            echo(
                f"{result['file']}: mean score {result['mean_score']:.4g} of {result['n']} answers"
            )
        _print_server_counts(result)
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
    if "mean_score" in result:
        echo(f"mean score: {_both(result['mean_score'], '.4g')}")
    _print_server_counts(result)
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
    if "unreadable_because" not in result:  # not a server
        return
    if "mean_score" not in result or "comparisons" in result:  # of pairs
        comparisons = result.get("comparisons", result["n"])
        echo(f"verdicts that flip with the order: {result['flips']} of {comparisons} (ties)")
    reasons = listed(result["unreadable_because"])
    echo(f"verdicts that cannot be read: {result['unreadable']}{reasons and f' ({reasons})'}")
    echo(f"tokens spent: {result['tokens_spent']}")


def _both(values: Sequence[Any], form: str) -> str:
    texts = ["unknown" if number is None else f"{number:{form}}" for number in values]
    return f"A {texts[0]}, B {texts[1]}"
