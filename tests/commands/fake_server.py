"""A small HTTP server with OpenAI's interface, whose behaviour each test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | None  # status and JSON; None: close the connection without an answer
Behaviour = Callable[[str, dict[str, Any]], Reply]


class FakeServer:
    """Its address, and the path, headers and body of every request."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []


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

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    server = FakeServer(http.server_address[1])
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
