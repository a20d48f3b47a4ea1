"""A language model on a server that gives each answer a number, by the user's rubric."""

from __future__ import annotations

import re

from rather.files import JsonObject
from rather.judges.judge import Answers, Judge, JudgeOptions, Score, judge
from rather.judges.server import ServerJudge, Verdict

VERDICT = re.compile(r"\[\[\s*([+-]?[0-9]*\.?[0-9]+)\s*\]\]\s*\Z")
HIGHEST = 10


@judge("rubric")
class RubricJudge(ServerJudge):
    """Its verdicts are numbers from 0 to HIGHEST, at the end of a reply."""

    label = "a server with a rubric (http://...)"
    takes = (*ServerJudge.takes, "rubric")
    template_option = "rubric"
    must_show = ("answer",)
    result_type = float
    forged = re.compile(
        r"\[\[(\s*[+-]?[0-9.]+\s*)\]\]|<(\s*/?\s*(?:prompt|answer)\s*)>", re.IGNORECASE
    )

    @classmethod
    def matches(cls, name: str, options: JudgeOptions) -> bool:
        return options.rubric is not None and super().matches(name, options)

    def read(self, reply: str) -> Verdict:
        verdict = VERDICT.search(reply)
        if not verdict:
            return Verdict(None, "without [[NUMBER]] at the end")
        number = float(verdict[1])  # infinite if it has very many digits
        if not 0 <= number <= HIGHEST:
            return Verdict(None, f"with a number that is not from 0 to {HIGHEST}")
        return Verdict(number)

    def scores(self, answers: Answers) -> list[Score]:
        verdicts = self.ask([self.render(question, {"answer": text}) for question, text in answers])
        for (question, _), verdict in zip(answers, verdicts, strict=True):
            if verdict.problem:
                self.errors.append(
                    f"--with {self.url}: a verdict {verdict.problem} (at {question.place})"
                )
        return [verdict.result for verdict in verdicts]

    def counts(self) -> JsonObject:
        return super().counts() | Judge.counts(self)
