"""Judges of answers: a rule in a Python file, a reward model, or a language model on a server."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import jinja2
import jinja2.meta
import jinja2.sandbox
import typer

from rather.commands.openai_client import Server, first_choice, text_of_choice, tokens_of
from rather.commands.terminal import echo
from rather.config.found import NO_TRUST, Trust
from rather.config.redaction import public_url
from rather.config.schema import AnswerJudge
from rather.data.rule import Rule, Unscored
from rather.errors import ConfigError, RatherError, ServerError
from rather.files import (
    JsonObject,
    append_whole,
    make_folder,
    own,
    parse_json,
    real_path,
    text_sha,
    yaml_text,
)
from rather.reference.logprob_cache import refuse_foreign
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

RULE = re.compile(r"(.+\.py):(\w+)")
VERDICT = re.compile(r"\[\[([ABC])\]\]")
# What could end an answer's place in the question, or be quoted as a verdict.
FORGED = re.compile(r"\[\[(\s*[ABC]\s*)\]\]|<(\s*/?\s*(?:prompt|answer_[ab])\s*)>", re.IGNORECASE)
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
    """How a judge works. The first five are those of a server.

    `columns` maps names in a rule or in a server's template to columns of the rows.
    """

    model: str | None = None
    template: Path | None = None
    max_tokens: int = VERDICT_TOKENS
    concurrency: int = 16
    dry_run: bool = False  # end after the forecast
    trust: Trust = NO_TRUST
    columns: Mapping[str, str] = field(default_factory=dict)
    rule_timeout: float | None = None  # seconds for one answer

    @classmethod
    def of(cls, judge: AnswerJudge) -> JudgeOptions:
        """Return the options that a config names."""
        template = Path(judge.template) if judge.template else None
        return cls(
            judge.model, template, judge.max_tokens, columns=judge.columns or {},
            rule_timeout=judge.rule_timeout,
        )  # fmt: skip


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
    """A for the first answer, B for the second, C for neither; None if it cannot be read.

    `problem` says why it cannot.
    """

    choice: str | None
    problem: str = ""


class VerdictCache:
    """Results of a judge by a digest of the question, in the user's own cache folder.

    Files that others made, such as one next to the answers, decide nothing. Several commands may
    append at a time: each line is one write to the end of the file. A file that cannot be used
    costs a warning, and the results are kept for this command.
    """

    def __init__(self, judge: Any, kind: type) -> None:
        self._known: dict[str, Any] = {}
        self.file: BinaryIO | None = None
        try:
            self.file = verdict_file(judge)
            lines = self.file.read().splitlines()
        except (RatherError, OSError) as error:
            self._close(error)
            return
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # of a line that was cut off
                entry = parse_json(line)
                if isinstance(entry["result"], kind):
                    self._known[entry["key"]] = entry["result"]

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, result: Any) -> None:
        self._known[key] = result
        if (file := self.file) is None:
            return
        # The first line end closes a line that a kill or a full disk has cut off.
        line = f"\n{strict_json({'key': key, 'result': result})}\n"
        try:
            append_whole(file.fileno(), line.encode())
        except OSError as error:
            self._close(error)

    def _close(self, error: Exception) -> None:
        self.file = None
        warn_uncached(str(error))


def verdict_file(judge: Any) -> BinaryIO:
    """Open the file of a judge in the user's own cache folder, at its beginning."""
    home = real_path(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))
    for folder in (home / "rather", home / "rather" / "verdicts"):
        make_folder(folder, "XDG_CACHE_HOME", 0o700)
        refuse_foreign(folder, "XDG_CACHE_HOME")
    name = f"{text_sha(strict_json(judge))}.jsonl"
    file = open(folder / name, "a+b", buffering=0, opener=own)  # noqa: SIM115
    file.seek(0)
    return file


@cache
def warn_uncached(problem: str) -> None:
    """Log once that results are not cached."""
    log.warning("The judge's results are not cached: %s", problem)


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

    def __init__(self, name: str, file: Path, trust: Trust) -> None:
        from rather.run_folder.model_source import weights_of  # these import torch

        self.weights = weights_of(name, trust)
        if not self.weights.is_reward:
            raise ConfigError(
                f"--with {name}: is not a reward model; train one with task: reward, or name a "
                "Python file with a function (rule.py:score) or a server (http://...)."
            )
        self.file, self.problems = file, list[str]()

    def scores(self, answers: Answers) -> list[float]:
        """Return the score of each answer; those that the cache has are not computed again."""
        cache = VerdictCache(self.weights.digest(), float)
        prompt_columns = ("prompt", "system", "tools", "chat_template_kwargs")
        rows = [{name: q.row.get(name) for name in prompt_columns} for q, _ in answers]
        keys = [
            text_sha(strict_json([row, answer]))
            for row, (_, answer) in zip(rows, answers, strict=True)
        ]
        missing = {key: i for i, key in enumerate(keys) if key not in cache}
        if missing:
            from rather.commands.reward_scores import reward_scores

            indices = list(missing.values())
            questions = [(rows[i], answers[i][1], answers[i][0].place) for i in indices]
            for key, score in zip(
                missing, reward_scores(self.weights, self.file, questions), strict=True
            ):
                cache.add(key, score)
        return [cache[key] for key in keys]


class ServerJudge:
    """A language model that compares two answers, in both orders."""

    def __init__(self, url: str, options: JudgeOptions) -> None:
        if not options.model:
            raise ConfigError("--judge-model: name the model of the server that judges.")
        self.tokens_spent = 0  # by the last `verdicts`
        self.url, self.options, template = public_url(url), options, options.template
        self.server = Server(url, timeout=300)
        self.cache = VerdictCache([self.server.url, options.model], str)
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
        row = unforged(question.row)
        try:
            columns = {name: row[column] for name, column in self.options.columns.items()}
            texts = {"prompt": prompt_text(question.prompt), "answer_a": first, "answer_b": second}
            return self.template.render(row | columns | unforged(texts), row=row)
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
        keys = list(map(text_sha, texts))
        missing = {
            key: text for key, text in zip(keys, texts, strict=True) if key not in self.cache
        }
        characters = sum(map(len, missing.values()))
        echo(
            f"{self.url}: {len(missing)} requests ({len(texts) - len(missing)} of {len(texts)} "
            f"verdicts are cached), about {characters // CHARACTERS_PER_TOKEN} tokens of prompts "
            f"and at most {len(missing) * self.options.max_tokens} of verdicts",
            err=True,
        )
        if self.options.dry_run:
            raise typer.Exit
        asked = self._ask_all(missing, on_verdict)
        verdicts = [asked.get(key) or Verdict(self.cache[key]) for key in keys]
        return [
            (there, back._replace(choice=_exchanged(back.choice)))
            for there, back in zip(verdicts[::2], verdicts[1::2], strict=True)
        ]

    def _ask_all(
        self, missing: dict[str, str], on_verdict: Callable[[], object]
    ) -> dict[str, Verdict]:
        """Ask for the verdicts that the cache does not have; keep those that can be read."""

        spent = list[int]()

        def ask(item: tuple[str, str]) -> tuple[str, Verdict]:
            key, text = item
            body = {
                "model": self.options.model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": self.options.max_tokens,
            }
            answer = self.server.post("chat/completions", body)
            choice = first_choice(answer)
            reply = text_of_choice(choice)
            verdict = self._read(choice, reply)
            if verdict.choice:
                self.cache.add(key, verdict.choice)
            on_verdict()
            counted = tokens_of(answer, "total_tokens")
            estimate = (len(text) + len(reply)) // CHARACTERS_PER_TOKEN
            spent.append(estimate if counted is None else counted)
            return key, verdict

        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            return dict(pool.map(ask, missing.items()))
        except ServerError as error:
            raise ServerError(
                f"--with {self.server.with_address(error)} Run the same command again"
                f"{'; finished verdicts are kept' if self.cache.file else ''}."
            ) from None
        finally:
            self.server.stopped.set()
            pool.shutdown(cancel_futures=True)
            self.tokens_spent = sum(spent)

    def _read(self, choice: JsonObject, reply: str) -> Verdict:
        if choice.get("finish_reason") == "length":  # what it quotes is not its verdict
            return Verdict(None, f"cut off at {self.options.max_tokens} tokens")
        if verdicts := VERDICT.findall(reply):
            return Verdict(verdicts[-1])
        return Verdict(None, "without [[A]], [[B]] or [[C]]" if reply.strip() else "empty")


def unforged(shown: Any) -> Any:
    """Return a value whose texts neither end their place in a question nor plant a verdict."""
    if isinstance(shown, dict):
        return {key: unforged(inner) for key, inner in shown.items()}
    if isinstance(shown, list):
        return list(map(unforged, shown))
    if not isinstance(shown, str):
        return shown
    return FORGED.sub(lambda match: f"(({match[1]}))" if match[1] else f"({match[2]})", shown)


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
    if public_url(name) != name:  # not shown: it may hold a password
        raise ConfigError("--with: write the address of a server as http://HOST:PORT.")
    if options.model or options.template or options.dry_run:
        raise ConfigError("--judge-model, --judge-template and --dry-run need --with http(s)://...")
    if rule := RULE.fullmatch(name):
        return RuleJudge(Rule(rule[1], rule[2], options.columns, options.rule_timeout))
    if name.endswith(".py"):
        raise ConfigError(f"--with {name}: name the function, too, as in {name}:score.")
    if options.columns or options.rule_timeout:
        raise ConfigError("--column and --rule-timeout need a rule (--with rule.py:score).")
    return RewardJudge(name, file, options.trust)
