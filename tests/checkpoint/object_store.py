"""A real object store on this machine, behind a proxy that cuts connections, waits, or says that a request is here."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rather.checkpoint.store import Store, Uploads, client

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests-of-stores"}


class Proxy:
    """Forwards each connection, which is one request of moto's server, to another port.

    `before` and `after` are called with the number of the request: when half of it was forwarded,
    and when it was answered but the answer not yet forwarded. If one returns true, or while the
    proxy is `down`, the connection is cut.
    """

    def __init__(self, port: int) -> None:
        self.target, self.requests, self.down = port, 0, False
        self.before: Callable[[int], Any] = lambda _: None
        self.after: Callable[[int], Any] = lambda _: None
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        self.requests, self.down = 0, False
        self.before = self.after = lambda _: None
        self.open.set()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target)) as store:
            with suppress(OSError):
                self._answer(client, store)
            for end in (client, store):  # a close does not end what a thread waits for
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, store: socket.socket) -> None:
        self.open.wait()
        if self.down:
            return
        with self._lock:
            number = self.requests
            self.requests += 1
        first = client.recv(1 << 16)
        store.sendall(first[: len(first) // 2])
        if self.before(number):
            return
        store.sendall(first[len(first) // 2 :])
        threading.Thread(target=self._forward, args=(client, store), daemon=True).start()
        answer = store.recv(1 << 16)
        while answer.startswith(b"HTTP/1.1 100"):
            client.sendall(answer)
            answer = store.recv(1 << 16)
        rest = b"".join(iter(lambda: store.recv(1 << 16), b""))
        if not self.after(number):
            client.sendall(answer + rest)

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


@contextmanager
def served() -> Iterator[Proxy]:
    """Run the store with an empty bucket; this process, and what it starts, reaches it by the proxy."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    before = dict(os.environ)
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": proxy.address, "AWS_DEFAULT_REGION": "us-east-1"}
    client.cache_clear()
    try:
        Store(f"s3://{BUCKET}").client.create_bucket(Bucket=BUCKET)
        yield proxy
    finally:
        proxy.close()
        server.stop()
        client.cache_clear()
        os.environ.clear()
        os.environ.update(before)


def uploads(
    address: str, run_dir: Path, incidents: list[Any] | None = None, keep: int = 1
) -> Uploads:
    found: list[Any] = [] if incidents is None else incidents
    report = lambda *facts, **more: found.append((*facts, more))  # noqa: E731
    return Uploads(Store(address), run_dir, ("metrics.jsonl",), keep, report)


def upload(address: str, run_dir: Path, step: int, endpoint: str | None = None) -> None:
    """Upload a checkpoint as a run does; also in a process of its own."""
    if endpoint:  # a process of its own
        os.environ |= {**KEYS, "AWS_ENDPOINT_URL": endpoint}
    work = uploads(address, run_dir)
    work.add(run_dir / f"checkpoint-{step}", step)
    work.close()
