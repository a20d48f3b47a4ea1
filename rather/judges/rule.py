"""A rule: a function of a Python file that the user names, in a child process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rather.config.redaction import public_url
from rather.errors import ConfigError, RatherError
from rather.files import file_sha
from rather.judges.judge import Answers, Judge, JudgedPrompt, JudgeOptions, Score, judge
from rather.judges.rule_process import Rule, Unscored
from rather.tracking.json_lines import strict_json

RULE = re.compile(r".+\.py(:\w+)?")


@judge("rule")
class RuleJudge(Judge):
    """Scores with a function. Its scores are not cached: a rule may use other files."""

    label = "a rule (rule.py:score)"
    takes = ("columns", "rule_timeout")

    def __init__(self, name: str, options: JudgeOptions) -> None:
        super().__init__(name, options)
        self.file, _, self.function = name.rpartition(":")
        self.rule = Rule(self.file, self.function, options.columns, options.rule_timeout)

    @classmethod
    def matches(cls, name: str, options: JudgeOptions) -> bool:
        # Another name may be an address with a password, which no message may show.
        return public_url(name) == name and bool(RULE.fullmatch(name))

    @classmethod
    def check(cls, name: str, options: JudgeOptions) -> None:
        super().check(name, options)
        if name.endswith(".py"):
            raise ConfigError(f"--with {name}: name the function, too, as in {name}:score.")

    def problems(self, questions: Iterable[JudgedPrompt]) -> Iterable[str]:
        """Yield a problem of each row that lacks a column of the rule."""
        for question in questions:
            try:
                self.rule.check(question.row, question.place)
            except RatherError as error:
                yield str(error)

    def scores(self, answers: Answers) -> list[Score]:
        for question, _ in answers:
            self.rule.check(question.row, question.place)
        scores = list[Score]()
        for (prompt, row, place), answer in answers:
            score = self.rule.score(prompt, answer, row, place)
            if isinstance(score, Unscored):
                self.errors.append(score.reason)
            scores.append(score if isinstance(score, float) else None)
        return scores

    def digest(self) -> str:
        options = list(filter(None, (self.options.columns, self.options.rule_timeout)))
        digest = f"{self.function}:{file_sha(Path(self.file).expanduser())}"
        return f"{digest}:{strict_json(options)}" if options else digest
