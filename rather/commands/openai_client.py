"""Requests to a server with OpenAI's interface: repeated with back-off, then named.

The key comes from OPENAI_API_KEY and appears in no message. Redirects are not followed, so it
reaches no other address.
"""

from __future__ import annotations

import os
from threading import Event
from typing import Any

import httpx

from rather.config.redaction import hide
from rather.errors import ConfigError, ServerError, ServerSilent
from rather.files import JsonObject, parse_json

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a request is repeated, doubled each time
REPEATED = (408, 409, 425, 429)  # and all from 500 on
SHOWN = 300  # characters of a server's error


class Server:
    """A server by its address. Threads may share it; `stopped` ends all waiting."""

    def __init__(self, url: str, timeout: float) -> None:
        for end in ("/", "/chat/completions", "/completions", "/v1"):
            url = url.removesuffix(end)
        try:
            if not httpx.URL(url).host:
                raise ValueError("it names no host")
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url}: is not an address of a server ({error}).") from None
        self.url, self.timeout, self.stopped = url, timeout, Event()
        headers = {}
        if key := os.environ.get("OPENAI_API_KEY"):
            hide([key])
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(timeout=timeout, headers=headers, limits=limits)

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
            try:
                response = self._client.request(method, url, json=body)
            except httpx.TimeoutException:
                problem, kind = f"no answer within {self.timeout:g} s", ServerSilent
            except httpx.ConnectError as error:
                problem, kind = f"no connection ({error})", ServerSilent
            except httpx.TransportError as error:
                problem = f"the connection broke ({str(error) or type(error).__name__})"
            else:
                if response.status_code == 200:
                    try:
                        answer = parse_json(response.content)
                    except ValueError:
                        answer = None
                    if isinstance(answer, dict):
                        return answer
                    problem = "an answer that is not a JSON object"
                else:
                    problem = f"HTTP {response.status_code}: {response.text[:SHOWN].strip()}"
                    after = _seconds(response.headers.get("Retry-After"))
                    if response.status_code < 500 and response.status_code not in REPEATED:
                        raise ServerError(f"{url}: the server refuses a request: {problem}.")
            # Doubled whoever names it: a limit may last longer than a server says.
            wait = min((after or FIRST_WAIT) * 2 ** (attempt - 1), LONGEST_WAIT)
            if attempt < tries and self.stopped.wait(wait):
                break
        raise kind(f"{url}: {problem}, after {tries} {'try' if tries == 1 else 'tries'}.")

    def with_address(self, error: ServerError) -> str:
        """Return the text of an error, with the address of the server at the beginning."""
        text = str(error)
        return text if text.startswith(self.url) else f"{self.url}: {text}"

    def close(self) -> None:
        self._client.close()


def _seconds(text: Any) -> float | None:
    try:
        return max(0.01, float(text))
    except (TypeError, ValueError):
        return None


def first_choice(answer: JsonObject) -> JsonObject:
    """Return the first choice of a completion; raise ServerError if there is none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        keys = ", ".join(answer) or "none"
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
    return text


def tokens_of(answer: JsonObject, name: str) -> int | None:
    """Return a number of `usage`; None if the server does not say it."""
    usage = answer.get("usage")
    number = usage.get(name) if isinstance(usage, dict) else None
    return number if isinstance(number, int) else None
