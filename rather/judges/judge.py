"""What a judge is, and how a name given to `--with`, or to `with:` in a YAML, finds its judge.

A judge is one decorated class, in a file of this folder or in a file that `--import` names:

    from rather.judges.judge import Answers, Judge, judge

    @judge("short")
    class Short(Judge):
        def scores(self, answers: Answers) -> list[float]:
            return [-float(len(text)) for _, text in answers]

        def digest(self) -> str:
            return "short"
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rather.config.found import NO_TRUST, Trust
from rather.config.plugins import Registry
from rather.config.schema import AnswerJudge
from rather.errors import ConfigError
from rather.files import JsonObject

log = logging.getLogger(__name__)

SHOWN = 5  # errors
FIXED = ("prompt", "answer", "answer_a", "answer_b", "row")  # in rules and templates, not columns
FLAGS = {  # of `rather judge`, by the field of JudgeOptions
    "model": "--judge-model",
    "template": "--judge-template",
    "max_tokens": "--judge-tokens",
    "concurrency": "--concurrency",
    "dry_run": "--dry-run",
    "columns": "--column",
    "rule_timeout": "--rule-timeout",
    "trust": "--trust-remote-code, --trust-paths or --any-base",
}


class JudgedPrompt(NamedTuple):
    """A prompt, as the row has it, with the name of its place for messages."""

    prompt: Any
    row: JsonObject
    place: str


Answers = Sequence[tuple[JudgedPrompt, str]]
Score = float | None


class AnswerRow(NamedTuple):
    """The answers to one prompt, and the row of the file."""

    question: JudgedPrompt
    responses: list[str]
    ended: list[bool] | None

    @property
    def mean_length(self) -> float:
        return fmean(map(len, self.responses))


class Comparison(NamedTuple):
    """The outcome for B (1 wins, 0.5 ties, 0 loses) and how many characters it is longer."""

    prompt: int
    outcome: float
    longer: float
    scores: tuple[float, float] | None = None  # the mean scores of A and B, if there are any


@dataclass(frozen=True)
class JudgeOptions:
    """How a judge works. `Judge.takes` says which of the options in FLAGS have an effect.

    `columns` maps names in a rule or in a server's template to columns of the rows.
    """

    model: str | None = None
    template: Path | None = None
    max_tokens: int = 1024  # of a verdict
    concurrency: int = 16
    dry_run: bool = False  # end after the forecast
    trust: Trust = NO_TRUST
    columns: Mapping[str, str] = field(default_factory=dict)
    rule_timeout: float | None = None  # seconds for one answer
    section: str = ""  # of the config that names the judge
    report: Callable[[str], object] = log.info  # gets the forecast of a server's tokens

    @classmethod
    def of(cls, asked: AnswerJudge, section: str) -> JudgeOptions:
        """Return the options in a section of a config."""
        return cls(
            asked.model,
            Path(asked.template) if asked.template else None,
            asked.max_tokens,
            columns=asked.columns or {},
            rule_timeout=asked.rule_timeout,
            section=section,
        )

    def called(self, option: str) -> str:
        """Return an option as the user writes it."""
        return f"{self.section}.{option}" if self.section else FLAGS[option]


DEFAULTS = JudgeOptions()


class ForecastOnly(Exception):
    """The forecast was reported, and with `dry_run` nothing else happens."""


class Judge(ABC):
    """Gives answers scores, or compares them. The decorator sets `word`."""

    word: str
    label: str = ""  # for messages, with an example of a name; default: the word
    takes: tuple[str, ...] = ()  # the options that have an effect
    is_fallback = False  # any name that matches no other judge means it
    is_relative = False  # a score depends on the other answers to the prompt

    def __init__(self, name: str, options: JudgeOptions) -> None:
        self.name, self.options = name, options
        self.errors = list[str]()  # why answers have no score, with the places of their rows

    @classmethod
    def matches(cls, name: str, options: JudgeOptions) -> bool:
        """Return whether a name means this judge."""
        return name == cls.word

    @classmethod
    def check(cls, name: str, options: JudgeOptions) -> None:
        """Refuse options without an effect."""
        if problems := [
            f"{options.called(option)}: has no effect with {cls.label}; leave it out."
            for option in FLAGS
            if option not in cls.takes and getattr(options, option) != getattr(DEFAULTS, option)
        ]:
            raise ConfigError(problems)

    @abstractmethod
    def scores(self, answers: Answers) -> Sequence[Score]:
        """Return the score of each answer, or None and add the reason to `errors`.

        The answers to a prompt follow one another.
        """

    @abstractmethod
    def digest(self) -> str:
        """Return what decides the scores: if it is the same, so are they."""

    def problems(self, questions: Iterable[JudgedPrompt]) -> Iterable[str]:
        """Yield what is wrong with prompts like these, before they are answered."""
        return ()

    def counts(self) -> JsonObject:
        """Return what `rather judge --json` reports about the answers so far."""
        return {"errors": len(self.errors), "first_errors": self.errors[:SHOWN]}

    def scores_of(self, rows: Sequence[AnswerRow]) -> list[list[Score]]:
        """Return the score of every answer of every row."""
        answers = [(row.question, text) for row in rows for text in row.responses]
        flat = iter(self.scores(answers))
        return [[next(flat) for _ in row.responses] for row in rows]

    def compare(self, first: Sequence[AnswerRow], second: Sequence[AnswerRow]) -> list[Comparison]:
        """Compare the mean scores of the answers to each prompt.

        A prompt is left out if one of its answers has no score.
        """
        means = list(map(mean_of, self.scores_of([*first, *second])))
        return compare_means(first, second, means[: len(first)], means[len(first) :])


def mean_of(scores: Sequence[Score]) -> Score:
    """Return the mean score; None if one is missing."""
    return None if None in scores else fmean(score for score in scores if score is not None)


def compare_means(
    first: Sequence[AnswerRow],
    second: Sequence[AnswerRow],
    of_a: Sequence[Score],
    of_b: Sequence[Score],
) -> list[Comparison]:
    """Compare the mean scores of the answers to each prompt that has both."""
    comparisons = []
    for i, (row_a, row_b, a, b) in enumerate(zip(first, second, of_a, of_b, strict=True)):
        if a is not None and b is not None:
            outcome = 0.5 if a == b else float(b > a)
            longer = row_b.mean_length - row_a.mean_length
            comparisons.append(Comparison(i, outcome, longer, (a, b)))
    return comparisons


JUDGES: Registry[type[Judge]] = Registry("judge", "rather.judges")


def judge(word: str) -> Callable[[type[Judge]], type[Judge]]:
    """Register a judge. A name that is this word means it, unless it overrides `matches`."""

    def register(kind: type[Judge]) -> type[Judge]:
        kind.word = word
        kind.label = kind.label or word
        JUDGES.add(word, kind, kind.__module__)
        return kind

    return register


def judge_class(name: str, options: JudgeOptions) -> type[Judge]:
    """Return the judge that a name means, after checking the options."""
    kinds = sorted(JUDGES.values(), key=lambda kind: kind.is_fallback)
    kind = next(kind for kind in kinds if kind.matches(name, options) or kind.is_fallback)
    kind.check(name, options)
    return kind


def make_judge(name: str, options: JudgeOptions) -> Judge:
    """Return the judge with this name; raise ConfigError if it cannot work."""
    return judge_class(name, options)(name, options)
