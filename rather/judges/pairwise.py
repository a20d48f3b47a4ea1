"""A language model on a server that compares two answers, in both orders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rather.errors import DataError, counted
from rather.files import JsonObject
from rather.judges.judge import (
    AnswerRow,
    Answers,
    Comparison,
    JudgedPrompt,
    JudgeOptions,
    Score,
    judge,
)
from rather.judges.server import ServerJudge, Verdict

VERDICT = re.compile(r"\[\[([ABC])\]\]")
OUTCOMES = {"A": 0.0, "B": 1.0}  # for the second answer; otherwise a tie
NEIGHBOURS = 2  # answers on either side that an answer is compared with
TEMPLATE = """\
You compare two answers to the same prompt. Judge which of them helps the person who wrote the prompt more: by what is
right, by what was asked for, and by how clearly it is said. A longer answer is not a better one. The order in which the
answers are shown means nothing.

<prompt>
{{ prompt }}
</prompt>

<answer_a>
{{ answer_a }}
</answer_a>

<answer_b>
{{ answer_b }}
</answer_b>

Explain your judgement in at most three sentences. Then end with exactly one of these: [[A]] if answer A is better,
[[B]] if answer B is better, [[C]] if neither is.
"""


@judge("pairwise")
class PairwiseJudge(ServerJudge):
    """Its verdicts are A for the first answer, B for the second, C for neither.

    The score of an answer is the share of its comparisons with others to the prompt that it wins.
    """

    label = "a server that compares answers (http://...)"
    takes = (*ServerJudge.takes, "template")
    is_relative = True
    template_option, default_template = "template", TEMPLATE
    must_show = ("answer_a", "answer_b")
    result_type = str
    forged = re.compile(
        r"\[\[(\s*[ABC]\s*)\]\]|<(\s*/?\s*(?:prompt|answer_[ab])\s*)>", re.IGNORECASE
    )

    def __init__(self, name: str, options: JudgeOptions) -> None:
        super().__init__(name, options)
        self.flips = 0  # verdicts that differ between the orders
        self.comparisons = dict[str, int]()  # their number, of scores

    def read(self, reply: str) -> Verdict:
        if verdicts := VERDICT.findall(reply):
            return Verdict(verdicts[-1])
        return Verdict(None, "without [[A]], [[B]] or [[C]]")

    def counts(self) -> JsonObject:
        return {**self.comparisons, "flips": self.flips, **super().counts()}

    def scores(self, answers: Answers) -> list[Score]:
        """Return the share of its comparisons that each answer wins; ties count half.

        Each answer meets its NEIGHBOURS on both sides, in a circle: up to five answers all meet.
        Equal answers tie without a request, and so does a verdict that cannot be read.
        """
        indices = list[tuple[int, int]]()
        shares = [list[float]() for _ in answers]
        start = 0
        for place, count in Counter(question.place for question, _ in answers).items():
            if count < 2:
                raise DataError(
                    f"{place}: has one answer, and a server compares answers; generate several "
                    "(--answers), or name a second file."
                )
            for i, j in _neighbours(range(start, start + count)):
                if answers[i][1] != answers[j][1]:
                    indices.append((i, j))
                else:
                    shares[i].append(0.5)
                    shares[j].append(0.5)
            start += count
        pairs = [(*answers[i], answers[j][1]) for i, j in indices]
        for (i, j), outcome in zip(indices, self._outcomes(pairs), strict=True):
            share_of_second = 0.5 if outcome is None else outcome
            shares[i].append(1 - share_of_second)
            shares[j].append(share_of_second)
        self.comparisons = {"comparisons": len(pairs)}
        return list(map(fmean, shares))

    def compare(self, first: Sequence[AnswerRow], second: Sequence[AnswerRow]) -> list[Comparison]:
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
        comparisons = []
        for prompt, pair, outcome in zip(prompts, pairs, self._outcomes(pairs), strict=True):
            if outcome is not None:
                comparisons.append(Comparison(prompt, outcome, len(pair[2]) - len(pair[1])))
        return comparisons

    def _outcomes(self, pairs: Sequence[tuple[JudgedPrompt, str, str]]) -> list[float | None]:
        """Return the outcome of (prompt, A, B) for B; None if a verdict cannot be read."""
        texts = []
        for question, first, second in pairs:
            texts.append(self.render(question, {"answer_a": first, "answer_b": second}))
            texts.append(self.render(question, {"answer_a": second, "answer_b": first}))
        verdicts = self.ask(texts)
        outcomes: list[float | None] = []
        for there, back in zip(verdicts[::2], verdicts[1::2], strict=True):
            if there.problem or back.problem:
                outcomes.append(None)
                continue
            outcome = OUTCOMES.get(there.result, 0.5)
            is_flipped = outcome != 1 - OUTCOMES.get(back.result, 0.5)
            self.flips += is_flipped
            outcomes.append(0.5 if is_flipped else outcome)
        if pairs and not any(outcome is not None for outcome in outcomes):
            raise DataError(
                f"--with {self.url}: no verdict could be read ({listed(self.unreadable)}); look at "
                "--judge-template and --judge-tokens."
            )
        return outcomes


def _neighbours(group: range) -> list[tuple[int, int]]:
    """Return which answers to a prompt are compared."""
    return [
        (i, j)
        for i in group
        for j in range(i + 1, group.stop)
        if min(j - i, len(group) + i - j) <= NEIGHBOURS
    ]


def listed(reasons: dict[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in reasons.items())
