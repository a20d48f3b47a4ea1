"""Judges of answers: a rule in a Python file, a reward model, or a language model on a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jinja2
import jinja2.meta
import jinja2.sandbox
import typer

from rather.commands.journal import Journal
from rather.commands.openai_client import Server, first_choice, text_of_choice, tokens_of
from rather.commands.terminal import echo
from rather.config.found import NO_TRUST, Trust
from rather.config.schema import AnswerJudge
from rather.data.rule import Rule, Unscored
from rather.errors import ConfigError, ServerError
from rather.files import JsonObject, make_folder, text_sha, yaml_text
from rather.tracking.json_lines import strict_json

CACHE = ".rather-cache"  # next to the first file of answers
RULE = re.compile(r"(.+\.py):(\w+)")
VERDICT = re.compile(r"\[\[([ABC])\]\]")
VERDICT_TOKENS = 1024
FIXED = ("prompt", "answer", "answer_a", "answer_b", "row")  # in rules and templates, not columns
CHARACTERS_PER_TOKEN = 4  # of English text, for the forecast
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


@dataclass(frozen=True)
class JudgeOptions:
    """How a judge works. The first four are those of a server.

    `columns` maps names in a rule or in a server's template to columns of the rows.
    """

    model: str | None = None
    template: Path | None = None
    concurrency: int = 16
    dry_run: bool = False  # end after the forecast
    trust: Trust = NO_TRUST
    columns: Mapping[str, str] = field(default_factory=dict)
    rule_timeout: float | None = None  # seconds for one answer

    @classmethod
    def of(cls, judge: AnswerJudge) -> JudgeOptions:
        """Return the options that a config names."""
        return cls(model=judge.model, template=Path(judge.template) if judge.template else None)


class JudgedPrompt(NamedTuple):
    """A prompt, as the row has it, with the name of its place for messages."""

    prompt: Any
    row: JsonObject
    place: str


Answers = Sequence[tuple[JudgedPrompt, str]]
Score = float | None


class Scorer(Protocol):
    """A judge that gives each answer a number, or None and adds a problem."""

    problems: list[str]

    def scores(self, answers: Answers) -> Sequence[Score]: ...


class Verdict(NamedTuple):
    """A for the first answer, B for the second, C for neither; None if it cannot be read."""

    choice: str | None
    tokens: int


class VerdictCache:
    """Results by a digest of all that decides them, in a file next to the answers."""

    def __init__(self, answers: Path) -> None:
        folder = answers.absolute().parent / CACHE
        make_folder(folder)
        self._journal = Journal(folder / "verdicts.jsonl", {"verdicts": 1})
        entries = self._journal.entries
        self._known = {entry["key"]: entry.get("result") for entry in entries if "key" in entry}

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, result: Any) -> None:
        self._known[key] = result
        self._journal.append({"key": key, "result": result})


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; of messages, each after its role."""
    if isinstance(prompt, str):
        return prompt
    turns = prompt if isinstance(prompt, list) else [prompt]
    return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)


class RuleJudge:
    """A function of a Python file that the command line names."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.problems = rule, list[str]()

    def check(self, questions: Iterable[JudgedPrompt]) -> None:
        """Refuse rows that lack a column of the rule."""
        for question in questions:
            self.rule.check(question.row, question.place)

    def scores(self, answers: Answers) -> list[Score]:
        """Return the score of each answer. They are not cached: a rule may use other files."""
        self.check(question for question, _ in answers)
        scores = list[Score]()
        for (prompt, row, place), answer in answers:
            score = self.rule.score(prompt, answer, row, place)
            if isinstance(score, Unscored):
                self.problems.append(score.reason)
            scores.append(score if isinstance(score, float) else None)
        return scores


class RewardJudge:
    """A reward model: the score that it gives to an answer after its prompt."""

    def __init__(self, name: str, file: Path, cache: VerdictCache, trust: Trust) -> None:
        from rather.run_folder.model_source import weights_of  # these import torch

        self.weights = weights_of(name, trust)
        if not self.weights.is_reward:
            raise ConfigError(
                f"--with {name}: is not a reward model; train one with task: reward, or name a "
                "Python file with a function (rule.py:score) or a server (http://...)."
            )
        self.file, self.cache, self.problems = file, cache, list[str]()

    def scores(self, answers: Answers) -> list[float]:
        """Return the score of each answer; those that the cache has are not computed again."""
        digest = self.weights.digest()
        prompt_columns = ("prompt", "system", "tools", "chat_template_kwargs")
        rows = [{name: q.row.get(name) for name in prompt_columns} for q, _ in answers]
        keys = [
            text_sha(strict_json([digest, row, answer]))
            for row, (_, answer) in zip(rows, answers, strict=True)
        ]
        missing = {key: i for i, key in enumerate(keys) if key not in self.cache}
        if missing:
            from rather.commands.reward_scores import reward_scores

            indices = list(missing.values())
            questions = [(rows[i], answers[i][1], answers[i][0].place) for i in indices]
            for key, score in zip(
                missing, reward_scores(self.weights, self.file, questions), strict=True
            ):
                self.cache.add(key, score)
        return [float(self.cache[key]) for key in keys]


class ServerJudge:
    """A language model that compares two answers, in both orders."""

    def __init__(self, url: str, file: Path, options: JudgeOptions) -> None:
        """Verdicts are cached next to `file`."""
        if not options.model:
            raise ConfigError("--judge-model: name the model of the server that judges.")
        self.url, self.options, template = url, options, options.template
        self.cache = VerdictCache(file)
        self.server = Server(url, timeout=300)
        text = TEMPLATE if template is None else _template_text(template)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            self.template = environment.from_string(text)
            names = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ConfigError(f"--judge-template {template}: {error}.") from None
        if missing := {"answer_a", "answer_b", *options.columns} - names:
            raise ConfigError(
                f"--judge-template {template or 'of Rather'}: must show "
                f"{' and '.join(sorted(missing))}."
            )
        if options.rule_timeout:
            raise ConfigError("--rule-timeout needs a rule (--with rule.py:score).")

    def _render(self, question: JudgedPrompt, first: str, second: str) -> str:
        """Return what the server is asked; the template sees the columns of the row."""
        row = question.row
        try:
            columns = {name: row[column] for name, column in self.options.columns.items()}
            fixed = {"prompt": prompt_text(question.prompt), "answer_a": first, "answer_b": second}
            return self.template.render(row | columns | fixed, row=row)
        except Exception as error:  # a template may raise anything at a row
            raise ConfigError(
                f"--judge-template {self.options.template}: {type(error).__name__}: {error} (at "
                f"{question.place}, whose columns are {', '.join(row)})."
            ) from None

    def verdicts(
        self, pairs: Sequence[tuple[JudgedPrompt, str, str]], on_verdict: Callable[[], object]
    ) -> list[tuple[Verdict, Verdict]]:
        """Return the verdicts on (prompt, A, B) as shown and with the answers exchanged.

        The choice of the second verdict names the answers as the first does. The forecast is
        printed before the first request.
        """
        texts = []
        for question, first, second in pairs:
            texts.append(self._render(question, first, second))
            texts.append(self._render(question, second, first))
        keys = [text_sha(strict_json([self.url, self.options.model, text])) for text in texts]
        missing = {
            key: text for key, text in zip(keys, texts, strict=True) if key not in self.cache
        }
        characters = sum(map(len, missing.values()))
        echo(
            f"{self.url}: {len(missing)} requests ({len(texts) - len(missing)} of {len(texts)} "
            f"verdicts are cached), about {characters // CHARACTERS_PER_TOKEN} tokens of prompts "
            f"and at most {len(missing) * VERDICT_TOKENS} of verdicts",
            err=True,
        )
        if self.options.dry_run:
            raise typer.Exit
        spent = self._ask_all(missing, on_verdict)
        pairs_of_verdicts = []
        for i in range(0, len(keys), 2):
            # Equal questions were asked once, so their tokens count once.
            there = Verdict(self.cache[keys[i]], spent.pop(keys[i], 0))
            back = Verdict(_exchanged(self.cache[keys[i + 1]]), spent.pop(keys[i + 1], 0))
            pairs_of_verdicts.append((there, back))
        return pairs_of_verdicts

    def _ask_all(self, missing: dict[str, str], on_verdict: Callable[[], object]) -> dict[str, int]:
        """Ask for the verdicts that the cache does not have; return the tokens of each."""

        def ask(item: tuple[str, str]) -> tuple[str, int]:
            key, text = item
            body = {
                "model": self.options.model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": VERDICT_TOKENS,
            }
            answer = self.server.post("chat/completions", body)
            reply = text_of_choice(first_choice(answer))
            verdicts = VERDICT.findall(reply)
            self.cache.add(key, verdicts[-1] if verdicts else None)
            on_verdict()
            counted = tokens_of(answer, "total_tokens")
            estimate = (len(text) + len(reply)) // CHARACTERS_PER_TOKEN
            return key, counted if counted is not None else estimate

        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            return dict(pool.map(ask, missing.items()))
        except ServerError as error:
            raise ServerError(
                f"--with {self.server.with_address(error)} Finished verdicts are kept; run the "
                "same command again."
            ) from None
        finally:
            self.server.stopped.set()
            pool.shutdown(cancel_futures=True)


def _exchanged(choice: str | None) -> str | None:
    return {"A": "B", "B": "A"}.get(choice or "", choice)


def _template_text(file: Path) -> str:
    try:
        return yaml_text(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--judge-template {file}: cannot be read ({error}).") from None


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


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


def scorer_of(name: str, file: Path, options: JudgeOptions) -> Scorer:
    """Return the judge that gives scores: a rule, or a reward model."""
    if options.model or options.template or options.dry_run:
        raise ConfigError("--judge-model, --judge-template and --dry-run need --with http(s)://...")
    if rule := RULE.fullmatch(name):
        return RuleJudge(Rule(rule[1], rule[2], options.columns, options.rule_timeout))
    if name.endswith(".py"):
        raise ConfigError(f"--with {name}: name the function, too, as in {name}:score.")
    if options.columns or options.rule_timeout:
        raise ConfigError("--column and --rule-timeout need a rule (--with rule.py:score).")
    return RewardJudge(name, file, VerdictCache(file), options.trust)
