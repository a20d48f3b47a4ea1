"""Requests to a server with OpenAI's interface: repeated with back-off, then named.

The key comes from OPENAI_API_KEY, or user and password from the address. They and the query of the
address appear in no message. Redirects are not followed, so they reach no other address.

A server may send anything: an answer is read up to MOST_BYTES, and one deadline covers the whole
request. Only an event loop can end every part of a request on time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from base64 import b64encode
from functools import cache
from threading import Event, Thread
from typing import Any

import httpx

from rather.config.redaction import hide, public_url, redact, url_secrets
from rather.errors import ConfigError, ServerError, ServerSilent
from rather.files import JsonObject, parse_json

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a request is repeated, doubled each time
REPEATED = (408, 409, 425, 429)  # and all from 500 on
SHOWN = 300  # characters of a server's error
MOST_BYTES = 16 << 20  # of an answer
MOST_VALUES = 2_000_000  # of its JSON; one takes 60 bytes

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses with their query


@cache
def event_loop(_process: int) -> asyncio.AbstractEventLoop:
    """Return the running event loop of a process; a forked child has no thread of its parent's."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Server:
    """A server by its address. Threads may share it; `stopped` ends all waiting.

    `url` is the address without user, password and query.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout, self.stopped = public_url(url), timeout, Event()
        self._loop = event_loop(os.getpid())
        for end in ("/", "/chat/completions", "/completions", "/v1"):
            self.url = self.url.removesuffix(end)
        try:
            address = httpx.URL(url)
            has_port = address.port is None or 0 < address.port < 65536
            # Another host: of two @, nobody knows which one ends the password.
            if not (has_port and address.host) or address.host != httpx.URL(self.url).host:
                raise ValueError
        except (httpx.InvalidURL, ValueError):  # neither is shown: both may hold a password
            raise ConfigError(
                "the address of the server cannot be read; write http://HOST:PORT."
            ) from None
        headers = {"Accept-Encoding": "identity"}
        login = b64encode(f"{address.username}:{address.password}".encode()).decode()
        if address.userinfo:
            headers["Authorization"] = f"Basic {login}"
        elif key := key_of_environment():
            headers["Authorization"] = f"Bearer {key}"
        hide([login, *url_secrets(url)])
        self._client = httpx.AsyncClient(  # nosec B113
            timeout=None,  # one deadline covers the whole request
            headers=headers,
            params=address.params,
            limits=httpx.Limits(max_connections=None),
        )

    def post(self, path: str, body: JsonObject, *, tries: int = TRIES) -> JsonObject:
        """Return the answer to a request; raise ServerError if there is none after all tries."""
        return self._ask("POST", path, body, tries)

    def get(self, path: str) -> JsonObject:
        """Return the answer to one request without a body."""
        return self._ask("GET", path, None, 1)

    def _ask(self, method: str, path: str, body: JsonObject | None, tries: int) -> JsonObject:
        url, problem = f"{self.url}/v1/{path}", ""
        kind: type[ServerError] = ServerError
        for attempt in range(1, tries + 1):
            after: float | None = None
            kind = ServerError
            exchange = self._exchange(method, url, body)
            try:
                future = asyncio.run_coroutine_threadsafe(exchange, self._loop)
                response, content = future.result()
                if response.status_code == 200:
                    return json_object(content)
            except TimeoutError:
                problem, kind = f"no answer within {self.timeout:g} s", ServerSilent
            except httpx.ConnectError as error:
                problem, kind = f"no connection ({error})", ServerSilent
            except httpx.TransportError as error:
                problem = f"the connection broke ({str(error)[:SHOWN] or type(error).__name__})"
            except (httpx.RequestError, UnicodeError) as error:  # the same again each time
                raise ServerError(f"{url}: {error}.") from None
            except ValueError:
                problem = "an answer that is not a JSON object"
            else:
                text = _one_line(redact(content.decode(errors="replace")))
                problem = f"HTTP {response.status_code}: {text}"
                after = _seconds(response.headers.get("Retry-After"))
                if response.status_code < 500 and response.status_code not in REPEATED:
                    raise ServerError(f"{url}: the server refuses a request: {problem}.")
            # Doubled whoever names it: a limit may last longer than a server says.
            wait = min((after or FIRST_WAIT) * 2 ** (attempt - 1), LONGEST_WAIT)
            if attempt < tries and self.stopped.wait(wait):
                break
        raise kind(f"{url}: {problem}, after {tries} {'try' if tries == 1 else 'tries'}.")

    async def _exchange(
        self, method: str, url: str, body: JsonObject | None
    ) -> tuple[httpx.Response, bytes]:
        """Send a request; return the answer with its content."""
        async with (
            asyncio.timeout(self.timeout),
            self._client.stream(method, url, json=body) as response,
        ):
            packing = response.headers.get("Content-Encoding", "")[:SHOWN]
            if response.status_code == 200 and packing not in ("", "identity"):  # may unfold to TiB
                raise ServerError(f"{url}: an answer in {packing}, which was not asked for.")
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise ServerError(f"{url}: an answer of more than {MOST_BYTES >> 20} MiB.")
            return response, bytes(content)

    def with_address(self, error: ServerError) -> str:
        """Return the text of an error, with the address of the server at the beginning."""
        text = str(error)
        return text if text.startswith(self.url) else f"{self.url}: {text}"


def key_of_environment() -> str:
    """Return the key that servers get; "" if there is none."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    hide([key])
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "OPENAI_API_KEY: holds a character that is not printable ASCII; copy the key again."
        )
    return key


def json_object(content: bytes) -> JsonObject:
    """Return the object in an answer; raise ValueError if it is something else."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ServerError(f"the server's answer has more than {MOST_VALUES:,} values.")
    answer = parse_json(content.decode("utf-8-sig", "replace"))
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return answer


def _one_line(text: str) -> str:
    return " ".join(text[:SHOWN].split())


def _seconds(text: Any) -> float | None:
    try:
        return max(0.01, float(text))
    except (TypeError, ValueError):
        return None


def first_choice(answer: JsonObject) -> JsonObject:
    """Return the first choice of a completion; raise ServerError if there is none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        keys = _one_line(", ".join(answer)) or "none"
        raise ServerError(f"the server's answer has no choices in it (its keys: {keys}).")
    return choices[0]


def text_of_choice(choice: JsonObject) -> str:
    """Return the text of a choice of a completion or a chat."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if text is None and isinstance(message, dict):
        return ""  # nothing but thoughts or a tool call
    if not isinstance(text, str):
        raise ServerError("the server's answer has no text.")
    return text.encode(errors="replace").decode()  # half a character cannot be written


def tokens_of(answer: JsonObject, name: str) -> int | None:
    """Return a number of `usage`; None if the server does not say it, or what cannot be."""
    usage = answer.get("usage")
    number = usage.get(name) if isinstance(usage, dict) else None
    return number if type(number) is int and number >= 0 else None
