"""What judges on a server share: a question from a template, its replies, their cache and cost."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import jinja2.sandbox
from rich.console import Console
from rich.progress import track

from rather.config.redaction import public_url
from rather.errors import ConfigError, ServerError
from rather.files import JsonObject, file_sha, text_sha, yaml_text
from rather.judges.cache import VerdictCache
from rather.judges.judge import ForecastOnly, Judge, JudgedPrompt, JudgeOptions
from rather.judges.openai_client import Server, first_choice, text_of_choice, tokens_of
from rather.tracking.json_lines import strict_json

CHARACTERS_PER_TOKEN = 4  # of English text, for the forecast


class Verdict(NamedTuple):
    """What a reply says; None if it cannot be read, and `problem` says why."""

    result: Any
    problem: str = ""


class ServerJudge(Judge):
    """A language model that is asked with a template, which sees the columns of the row."""

    takes: tuple[str, ...] = ("model", "max_tokens", "concurrency", "dry_run", "columns")
    template_option: str  # of JudgeOptions, for the file of the template
    default_template = ""
    must_show: tuple[str, ...]  # names that the template uses
    result_type: type
    # What could end an answer's place in the question, or be quoted as a verdict: the text in
    # double brackets, or in a tag.
    forged: re.Pattern[str]

    def __init__(self, name: str, options: JudgeOptions) -> None:
        super().__init__(name, options)
        self.tokens_spent = 0
        self.unreadable = Counter[str]()  # verdicts that cannot be read, by their problem
        self.url = public_url(name)
        self.server = Server(name, timeout=300)
        self.cache = VerdictCache([self.server.url, options.model], self.result_type)
        self.template_file: Path | None = getattr(options, self.template_option)
        self.template_name = (
            f"{options.called(self.template_option)} {self.template_file or 'of Rather'}"
        )
        text = self.default_template
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            if self.template_file:
                text = yaml_text(self.template_file)
            self.template = environment.from_string(text)
            names = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{self.template_name}: {error}.") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.template_name}: cannot be read ({error}).") from None
        if missing := {*self.must_show, *options.columns} - names:
            raise ConfigError(f"{self.template_name}: must show {' and '.join(sorted(missing))}.")

    @classmethod
    def matches(cls, name: str, options: JudgeOptions) -> bool:
        return name.startswith(("http://", "https://"))

    @classmethod
    def check(cls, name: str, options: JudgeOptions) -> None:
        super().check(name, options)
        if not options.model:
            raise ConfigError(
                f"{options.called('model')}: name the model of the server that judges."
            )

    @abstractmethod
    def read(self, reply: str) -> Verdict:
        """Return what a complete reply says."""

    def problems(self, questions: Iterable[JudgedPrompt]) -> Iterable[str]:
        """Yield a problem if the template cannot be filled in."""
        texts = dict.fromkeys(self.must_show, "")
        try:
            for question in questions:
                self.render(question, texts)
        except ConfigError as error:
            yield str(error)

    def digest(self) -> str:
        template = file_sha(self.template_file) if self.template_file else None
        facts = [self.url, self.options.model, template]
        return strict_json([*facts, self.options.columns] if self.options.columns else facts)

    def counts(self) -> JsonObject:
        return {
            "unreadable": self.unreadable.total(),
            "unreadable_because": dict(self.unreadable),
            "tokens_spent": self.tokens_spent,
        }

    def render(self, question: JudgedPrompt, answers: Mapping[str, str]) -> str:
        """Return what the server is asked about these answers."""
        row = self._unforged(question.row)
        try:
            columns = {name: row[column] for name, column in self.options.columns.items()}
            texts = {"prompt": prompt_text(question.prompt), **answers}
            return self.template.render(row | columns | self._unforged(texts), row=row)
        except Exception as error:  # a template may raise anything at a row
            raise ConfigError(
                f"{self.template_name}: {type(error).__name__}: {error} (at {question.place}, "
                f"whose columns are {', '.join(row)})."
            ) from None

    def _unforged(self, shown: Any) -> Any:
        """Return a value whose texts neither end their place in a question nor plant a verdict."""
        if isinstance(shown, dict):
            return {key: self._unforged(inner) for key, inner in shown.items()}
        if isinstance(shown, list):
            return list(map(self._unforged, shown))
        if not isinstance(shown, str):
            return shown
        return self.forged.sub(
            lambda match: f"({match[2]})" if match[1] is None else f"(({match[1]}))", shown
        )

    def ask(self, texts: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each question; the forecast comes before the first request."""
        keys = list(map(text_sha, texts))
        missing = {
            key: text for key, text in zip(keys, texts, strict=True) if key not in self.cache
        }
        characters = sum(map(len, missing.values()))
        self.options.report(
            f"{self.url}: {len(missing)} requests ({len(texts) - len(missing)} of {len(texts)} "
            f"verdicts are cached), about {characters // CHARACTERS_PER_TOKEN} tokens of prompts "
            f"and at most {len(missing) * self.options.max_tokens} of verdicts"
        )
        if self.options.dry_run:
            raise ForecastOnly
        replies = self._ask_all(missing)
        verdicts = [replies.get(key) or Verdict(self.cache[key]) for key in keys]
        self.unreadable.update(verdict.problem for verdict in verdicts if verdict.problem)
        return verdicts

    def _ask_all(self, missing: dict[str, str]) -> dict[str, Verdict]:
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
            verdict = self._verdict(choice, reply)
            if not verdict.problem:
                self.cache.add(key, verdict.result)
            counted = tokens_of(answer, "total_tokens")
            estimate = (len(text) + len(reply)) // CHARACTERS_PER_TOKEN
            spent.append(estimate if counted is None else counted)
            return key, verdict

        self.server.stopped.clear()
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            verdicts = pool.map(ask, missing.items())
            console = Console(stderr=True)
            return dict(track(verdicts, "verdicts", len(missing), console=console, transient=True))
        except ServerError as error:
            raise ServerError(
                f"--with {self.server.with_address(error)} Run the same command again"
                f"{'; finished verdicts are kept' if self.cache.file else ''}."
            ) from None
        finally:
            self.server.stopped.set()
            pool.shutdown(cancel_futures=True)
            self.tokens_spent += sum(spent)

    def _verdict(self, choice: JsonObject, reply: str) -> Verdict:
        if choice.get("finish_reason") == "length":  # what it quotes is not its verdict
            return Verdict(None, f"cut off at {self.options.max_tokens} tokens")
        return self.read(reply) if reply.strip() else Verdict(None, "empty")


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; of messages, each after its role."""
    if isinstance(prompt, str):
        return prompt
    turns = prompt if isinstance(prompt, list) else [prompt]
    return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)
