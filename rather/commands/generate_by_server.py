"""`rather generate --server`: one request per answer, written to a journal as it arrives.

Servers differ from what they say, so nothing is trusted. The first answer is the health check: its
`usage.prompt_tokens` must be the number of tokens that MODEL's tokenizer and template give. Before
sampling, one prompt is asked with two seeds. `n` is never used. Token ids are sent where a server
takes them, and taken where it returns them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rather.commands.generate import (
    Answered,
    AnswerRequest,
    Output,
    Prompts,
    WrittenAnswer,
    progress_bar,
    write_answers,
    written_answer,
)
from rather.commands.journal import Journal
from rather.config.redaction import public_url
from rather.data.images import MOST_BYTES, PLACEHOLDER, data_url, open_image
from rather.data.messages import as_turns
from rather.errors import ConfigError, ServerError, ServerSilent
from rather.files import JsonObject, read_bytes
from rather.judges.openai_client import TRIES, Server, first_choice, text_of_choice, tokens_of
from rather.run_folder.model_source import Weights
from rather.tracking.json_lines import strict_json

# How a prompt is sent, best first; with logprobs, mlx-lm and others return ids. Some servers add
# the BOS of a text themselves.
NO_BOS = " without BOS"
LOGPROBS = "text with logprobs"
WAYS = ("ids", LOGPROBS, LOGPROBS + NO_BOS, "text", "text" + NO_BOS, "messages")
CHECKED_PROMPTS = 3  # that are asked twice, if the samples of the first are equal
Place = tuple[int, int]  # a prompt and the number of its answer


@dataclass(frozen=True)
class ServerOptions:
    """How a server is used; `tokens` is the most that a command may spend."""

    url: str
    name: str | None = None
    concurrency: int = 16
    tokens: int | None = None
    timeout: float = 120


class ServerReply(NamedTuple):
    """An answer of the server, and its tokens."""

    answer: WrittenAnswer
    tokens: int


class ServedModel:
    """The model on a server, and the way in which it takes prompts."""

    def __init__(
        self, options: ServerOptions, prompts: Prompts, request: AnswerRequest, model: str
    ) -> None:
        self.server, self.prompts, self.request = (
            Server(options.url, options.timeout),
            prompts,
            request,
        )
        self.name = options.name or self._find_name(model)
        self.way = WAYS[0]
        vocabulary = prompts.tokenizer.get_vocab()
        self.known_ids = set(vocabulary.values())
        self.longest_token = 1 + max(map(len, vocabulary))  # with a space
        self.has_miscounted = False  # then no answer without a count is accepted

    def _find_name(self, model: str) -> str:
        """Return the only model that the server lists; else the name that was typed."""
        with suppress(ServerError, LookupError, TypeError, ValueError):
            [listed] = self.server.get("models")["data"]
            return str(listed["id"])
        return model

    def ask(self, place: Place, *, variant: int = 0, tries: int = TRIES) -> ServerReply:
        """Return one answer; `variant` gives it another seed."""
        prompt, _ = place
        decoding = self.request.decoding
        seed = hashlib.sha256(strict_json([self.request.seed, *place, variant]).encode()).digest()
        body: JsonObject = {
            "model": self.name,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "seed": int.from_bytes(seed[:4], "little") >> 1,
        }
        if decoding.stop:
            body["stop"] = list(decoding.stop)
        path = "completions"
        if self.way == "ids":
            body |= {"prompt": self.prompts.ids[prompt], "return_token_ids": True}
        elif self.way.startswith("text"):
            if self.way.startswith(LOGPROBS):
                body["logprobs"] = True
            start = 1 if self.way.endswith(NO_BOS) else 0
            body["prompt"] = self.prompts.tokenizer.decode(self.prompts.ids[prompt][start:])
        else:
            path = "chat/completions"
            body |= self._messages(prompt)
        return self._reply(prompt, self.server.post(path, body, tries=tries))

    def _messages(self, prompt: int) -> JsonObject:
        row = self.prompts.rows[prompt]
        turns = list(as_turns(row.prompt, "user"))
        if row.images:
            turns = with_data_urls(turns, [image.source for image in self.prompts.images[prompt]])
        if self.request.system and not row.has_system:
            turns = [{"role": "system", "content": self.request.system}, *turns]
        body: JsonObject = {"messages": turns}
        if row.tools:
            body["tools"] = row.tools
        if row.template_kwargs:
            body["chat_template_kwargs"] = row.template_kwargs
        return body

    def _reply(self, prompt: int, answer: JsonObject) -> ServerReply:
        choice = first_choice(answer)
        text = text_of_choice(choice)
        expected = len(self.prompts.ids[prompt])
        count = tokens_of(answer, "prompt_tokens")
        self.has_miscounted |= count not in (None, expected)
        if self.has_miscounted and count != expected:
            raise ServerError(
                f"usage.prompt_tokens of a prompt sent as {self.way} is {count or 'missing'}; the "
                f"tokenizer and template of MODEL give {expected}: the server runs another model "
                "or template."
            )
        limit = self.request.decoding.max_new_tokens
        if len(text) > limit * self.longest_token:
            raise ServerError(
                f"the server's answer has {len(text):,} characters, more than --max-new-tokens "
                f"{limit} can hold."
            )
        counted = len(self.prompts.tokenizer(text, add_special_tokens=False).input_ids)
        written = max(counted, tokens_of(answer, "completion_tokens") or 0)
        ended = choice.get("finish_reason") not in (None, "length")
        complete = WrittenAnswer(text, ended, self._ids(choice, text))
        cut = self.prompts.cut_at_stop(complete, self.request.decoding.stop)
        return ServerReply(cut, expected + written)

    def _ids(self, choice: JsonObject, text: str) -> list[int] | None:
        """Return the ids without the end token, if the server offers those of this text."""
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None and isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            ids = [entry.get("id") for entry in logprobs["content"] if isinstance(entry, dict)]
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            return None
        if not self.known_ids.issuperset(ids):
            raise ServerError("the server's answer has token ids that MODEL's tokenizer does not.")
        ends = (self.prompts.tokenizer.eos_token_id, self.prompts.end_of_turn)
        while ids and ids[-1] in ends:
            ids.pop()
        return ids if self.prompts.decode(ids) == text else None

    def find_way(self, place: Place) -> ServerReply:
        """Return the first answer; choose the way by which the server reads the same tokens."""
        problems = []
        ways: tuple[str, ...] = WAYS if self.prompts.has_template else WAYS[:-1]
        if self.prompts.has_images:
            ways = WAYS[-1:]
        begins_with_bos = self.prompts.ids[place[0]][:1] == [self.prompts.tokenizer.bos_token_id]
        for way in ways:
            if way.endswith(NO_BOS) and not begins_with_bos:
                continue
            self.way = way
            try:
                return self._first_reply(place)
            except ServerSilent:
                raise
            except ServerError as error:
                problems.append(str(error))
        raise ServerError(f"{self.server.url}: {' '.join(dict.fromkeys(problems))}")

    def _first_reply(self, place: Place) -> ServerReply:
        """Wait for a server that starts; do not repeat a request that it does not understand."""
        try:
            return self.ask(place, tries=1)
        except ServerSilent:
            return self.ask(place)


def with_data_urls(turns: Iterable[JsonObject], files: Sequence[str | bytes]) -> list[JsonObject]:
    """Return messages whose images are in them, as servers take them."""
    remaining = iter(files)
    written = []
    for turn in turns:
        first, *texts_after_images = turn["content"].split(PLACEHOLDER)
        if turn["role"] == "assistant" or not texts_after_images:
            written.append(turn)
            continue
        content_parts: list[JsonObject] = [{"type": "text", "text": first}] if first else []
        for text in texts_after_images:
            file = next(remaining)
            content = file if isinstance(file, bytes) else read_bytes(Path(file), MOST_BYTES)
            kind = f"image/{str(open_image(content).format or 'png').lower()}"
            content_parts.append(
                {"type": "image_url", "image_url": {"url": data_url(content, kind)}}
            )
            content_parts += [{"type": "text", "text": text}] if text else []
        written.append({**turn, "content": content_parts})
    return written


class Spending:
    """Counts tokens, those of requests in flight at their most."""

    def __init__(self, most: int | None) -> None:
        self.most, self.spent, self.reserved = most, 0, 0

    def reserve(self, tokens: int) -> bool:
        """Return whether a request of at most so many tokens may be sent, and reserve them."""
        if self.most is not None and self.spent + self.reserved + tokens > self.most:
            return False
        self.reserved += tokens
        return True


def generate_by_server(
    model: str, file: Path, out: Path, request: AnswerRequest, options: ServerOptions, **more: Any
) -> JsonObject:
    """Write the answers of a server that runs MODEL, and return meta.json."""

    def answer(_: Weights, prompts: Prompts, work: JsonObject, output: Output) -> Answered:
        journal = output.open_journal(work)
        asking = Asking(ServedModel(options, prompts, request, model), journal, options)
        asking.run()
        answers = {
            prompt: [asking.answers[prompt, k] for k in range(request.answers)]
            for prompt in range(len(prompts.ids))
        }
        spent = asking.tokens_before + asking.spending.spent
        return answers, {"requests": asking.counts(), "tokens": {"spent": spent}}

    source = {"server": {"url": public_url(options.url), "name": options.name}, "batch": None}
    return write_answers(answer, source, model, file, out, request, **more)


class Asking:
    """Asks for all answers that the journal does not have."""

    def __init__(self, served: ServedModel, journal: Journal, options: ServerOptions) -> None:
        self.served, self.journal, self.options = served, journal, options
        self.answers: dict[Place, WrittenAnswer] = {}
        self.tokens_before = 0
        self.spending = Spending(options.tokens)
        sent: set[Place] = set()
        self.repeated = 0
        self.way: str | None = None  # found by an earlier command
        with journal.reading():
            for entry in journal.entries:
                if "way" in entry:
                    self.way = WAYS[WAYS.index(entry["way"])]
                    continue
                question = (entry["prompt"], entry["answer"])
                if "sent" in entry:
                    self.repeated += question in sent and question not in self.answers
                    sent.add(question)
                else:
                    answer = written_answer(entry["text"], entry["ended"], entry["ids"])
                    self.answers[question] = answer
                    self.tokens_before += entry["tokens"]
        self.unanswered = sent - self.answers.keys()  # in flight when the last command ended

    def counts(self) -> JsonObject:
        return {"answers": len(self.answers), "repeated": self.repeated, "way": self.served.way}

    def run(self) -> None:
        """Ask until all answers are there, or the tokens are spent."""
        served = self.served
        questions = list(product(range(len(served.prompts.ids)), range(served.request.answers)))
        if self.answers.keys() >= set(questions):
            return
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            self._check_server(questions)
            missing = iter([question for question in questions if question not in self.answers])
            with progress_bar(len(questions), len(self.answers)) as bar:
                self._ask_all(pool, missing, bar)
        except ServerError as error:
            raise ServerError(
                f"--server {served.server.with_address(error)} {len(self.answers)} of "
                f"{len(questions)} answers are kept; run the same command again."
            ) from None
        finally:
            served.server.stopped.set()
            pool.shutdown(cancel_futures=True)
        if len(self.answers) < len(questions):
            raise ConfigError(
                f"--max-tokens-spent {self.options.tokens}: reached with {len(self.answers)} of "
                f"{len(questions)} answers; they are kept. Raise it and run the same command again."
            )

    def _check_server(self, places: list[Place]) -> None:
        """Ask for the first answer, and for samples of one prompt; an earlier command may have.

        Samples that are equal may be so by chance: then other prompts are asked.
        """
        served, samples = self.served, bool(self.served.request.decoding.temperature)
        if self.way:
            served.way = self.way
            return
        needed = (1 + samples) * self._most_tokens(places[0])
        if self.options.tokens is not None and self.options.tokens < needed:
            raise ConfigError(
                f"--max-tokens-spent must be at least {needed}, for the requests that check the "
                f"server (got {self.options.tokens})."
            )
        if (0, 0) not in self.answers:
            self._send((0, 0))
            self._keep((0, 0), served.find_way((0, 0)))
        prompts = min(CHECKED_PROMPTS, len(served.prompts.ids)) if samples else 0
        if prompts and not any(self._samples_differ(prompt) for prompt in range(prompts)):
            self.journal.path.unlink()  # its answers are worthless
            raise ConfigError(
                f"--server {served.server.url}: two seeds give the same text at temperature "
                f"{served.request.decoding.temperature:g}: the server does not sample. Use another "
                "server, or --temperature 0 with one answer."
            )
        self.journal.append({"way": served.way})

    def _samples_differ(self, prompt: int) -> bool:
        """Return whether two seeds give two texts; the answers are kept."""
        has_second = self.served.request.answers > 1
        for question in product([prompt], range(1 + has_second)):
            if question not in self.answers:
                self._send(question)
                self._keep(question, self.served.ask(question))
        if has_second:
            second = self.answers[prompt, 1]
        else:
            reply = self.served.ask((prompt, 0), variant=1)
            self.spending.spent += reply.tokens
            second = reply.answer
        return second.text != self.answers[prompt, 0].text

    def _most_tokens(self, place: Place) -> int:
        return len(self.served.prompts.ids[place[0]]) + self.served.request.decoding.max_new_tokens

    def _ask_all(self, pool: ThreadPoolExecutor, missing: Iterator[Place], bar: Any) -> None:
        in_flight: dict[Future[ServerReply], Place] = {}
        question = next(missing, None)
        while question is not None or in_flight:
            while (
                question is not None
                and len(in_flight) < self.options.concurrency
                and self.spending.reserve(self._most_tokens(question))
            ):
                self._send(question)
                in_flight[pool.submit(self.served.ask, question)] = question
                question = next(missing, None)
            if not in_flight:
                return  # the tokens are spent
            done, _ = wait(in_flight, return_when=FIRST_COMPLETED)
            for future in done:
                answered = in_flight.pop(future)
                reply = future.result()
                self.spending.reserved -= self._most_tokens(answered)
                self._keep(answered, reply)
                bar.advance(bar.task_ids[0])

    def _send(self, place: Place) -> None:
        self.journal.append({"prompt": place[0], "answer": place[1], "sent": True})
        self.repeated += place in self.unanswered

    def _keep(self, place: Place, reply: ServerReply) -> None:
        self.answers[place] = reply.answer
        self.spending.spent += reply.tokens
        entry: JsonObject = {"prompt": place[0], "answer": place[1], "tokens": reply.tokens}
        answer = reply.answer
        self.journal.append(entry | {"text": answer.text, "ended": answer.ended, "ids": answer.ids})
