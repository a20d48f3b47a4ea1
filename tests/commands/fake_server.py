"""Small HTTP servers whose behaviour each test writes: with OpenAI's interface, or byte by byte."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

Reply = tuple[int, Any] | None  # status and JSON; None: close the connection without an answer
Behaviour = Callable[[str, dict[str, Any]], Reply]


class FakeServer:
    """Its address, and the path, headers and body of every request."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.judge = ("--with", self.url, "--judge-model", "m")  # words of a command


@contextmanager
def listening(tcp: ThreadingTCPServer) -> Iterator[FakeServer]:
    """Run a server in a thread of its own."""
    tcp.daemon_threads = True
    threading.Thread(target=tcp.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield FakeServer(tcp.server_address[1])
    finally:
        tcp.shutdown()
        tcp.server_close()


@contextmanager
def serving(
    behaviour: Behaviour, models: list[str] | None = None, port: int = 0
) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            names = None if models is None else {"data": [{"id": name} for name in models]}
            self.reply((200, names) if names else (500, {"error": "offline"}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((self.path, dict(self.headers), body))
            self.reply(behaviour(self.path, body))

        def reply(self, reply: Reply) -> None:
            if reply is None:
                self.close_connection = True
                return
            data = json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with listening(ThreadingHTTPServer(("127.0.0.1", port), Handler)) as server:
        yield server


@contextmanager
def sending(parts: Callable[[], Iterator[bytes]]) -> Iterator[tuple[str, list[int]]]:
    """Serve raw bytes, part by part, until the client closes the connection.

    Yield the address, and how many bytes each connection could send.
    """
    sent = list[int]()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while not request.endswith(b"{}"):  # a close would reset what is unread
                request += self.request.recv(1 << 20)
            number = len(sent)
            sent.append(0)
            with suppress(OSError):
                for part in parts():
                    self.request.sendall(part)
                    sent[number] += len(part)

    with listening(ThreadingTCPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.url, sent


# --- servers that answer ---


def completion(text: str, prompt_tokens: int, **more: Any) -> Reply:
    choice = {"text": text, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text.split())}
    return 200, {"choices": [choice], "usage": usage}


def honest(path: str, body: dict[str, Any]) -> Reply:
    """A server that takes and returns ids, as vLLM does; the text follows from prompt and seed."""
    if path != "/v1/completions":
        return 404, {"error": "no such path"}
    prompt = body["prompt"]
    seed = body["seed"] if body["temperature"] else 0
    ids = [(sum(prompt) + seed) % 20 + 3, seed % 7 + 3]
    words = " ".join(f"w{token - 3}" for token in ids)
    return completion(words, len(prompt), token_ids=[*ids, 2])


def failing(status: int) -> Behaviour:
    return lambda path, body: (status, {"error": "broken"})


# --- servers that judge ---


def says(choose: Callable[[str, str], str]) -> Behaviour:
    """A judge that gets both answers as the template shows them."""

    def behaviour(path: str, body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        first, second = (
            text.split(f"<answer_{side}>\n")[1].split(f"\n</answer_{side}>")[0] for side in "ab"
        )
        reply = f"At first [[C]], but {choose(first, second)}"
        return 200, {"choices": [{"message": {"content": reply}}], "usage": {"total_tokens": 10}}

    return behaviour


def kinder(first: str, second: str) -> str:
    a, b = ("kind" in text for text in (first, second))
    return "[[C]]" if a == b else "[[A]]" if a else "[[B]]"


def longer(first: str, second: str) -> str:
    return (
        "[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]"
    )
