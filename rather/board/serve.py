"""The server of the board: loopback only, GET only, a token for everything, and no path of a request names a file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from rather.board.inspector import Inspector, Question
from rather.board.runs import REPORT, Problem, Runs, differences, read_config
from rather.board.template import BODY
from rather.errors import ConfigError
from rather.report import as_json, page, plotly_bundle

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
MOST_RUNS = 8  # in one chart: as many as there are colours
TITLE = "Rather board"
FRAMED = "frame-ancestors 'none'"
# Of a report, which comes out of a run folder: its scripts run in an origin of their own, from which no request is
# answered, so that one from a stranger cannot ask the board for anything.
ALONE = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    f"img-src data: blob:; {FRAMED}"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
KEPT = "private, max-age=31536000, immutable"  # assets have their digest in their address

Query = Mapping[str, list[str]]


class Reply(NamedTuple):
    body: bytes
    kind: str = "application/json"
    headers: Mapping[str, str] = {}


Route = Callable[["Board", Query], Reply]


class Refused(Exception):
    """An HTTP status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Board(ThreadingHTTPServer):
    """Serves the runs under a folder. `address` is the one to open: it carries the token."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, inspector: Inspector | None = None) -> None:
        self.runs, self.inspector = Runs(folder), inspector or Inspector()
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot be used ({error.strerror}); name another, or leave it out for a free one."
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.cookie = (
            f"rather_board_{self.server_port}"  # cookies of a host are sent to all its ports
        )

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not the traceback of socketserver: a browser that went away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            log.warning("a request could not be answered", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Each address is one of ROUTES, word for word."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rather", ""
    timeout = 60  # seconds until an idle connection is closed
    server: Board

    def do_GET(self) -> None:
        try:
            self._refuse_foreign_hosts()
            path, query = _address(self.path)
            with_token = self._refuse_strangers(query)
            route = ROUTES.get(path)
            if route is None:
                raise Refused(404, "There is nothing at this address.")
            reply = _made(route, self.server, query)
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        else:
            self._send(200, reply, with_token=with_token)

    def _refuse_method(self) -> None:
        self._refuse(405, "The board only shows: GET is the only method.", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = (
        _refuse_method
    )

    def _refuse_foreign_hosts(self) -> None:
        """A page of a stranger whose name was made to mean 127.0.0.1 sends its own name here."""
        told = self.headers.get_all("Host") or []
        if len(told) != 1 or told[0].lower() not in self.server.hosts:
            raise Refused(
                421,
                f"This is {ADDRESS}:{self.server.server_port}, and the request names another host.",
            )

    def _refuse_strangers(self, query: Query) -> bool:
        """The token is in the address, in a header or in the cookie; whether it was in the address."""
        in_address = any(self.server.knows(token) for token in query.get("token", []))
        header = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not (
            in_address or self.server.knows(header) or any(map(self.server.knows, self._cookies()))
        ):
            raise Refused(
                403, "Open the address that `rather board` printed: it carries the token."
            )
        return in_address

    def _cookies(self) -> list[str]:
        """Those of our name. Cookies of other programs on this host come along; SimpleCookie stops at `a={"b":1}`."""
        pairs = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _send(self, status: int, reply: Reply, *, with_token: bool = False) -> None:
        self.send_response(status)
        headers = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": "default-src 'none'",
            **HEADERS,
        }
        if with_token:
            headers["Set-Cookie"] = (
                f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        headers |= {
            "Content-Type": f"{reply.kind}; charset=utf-8",
            "Content-Length": str(len(reply.body)),
        }
        for name, value in {**headers, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def _refuse(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        self.close_connection = True  # a body that may follow is not read
        self._send(
            status,
            Reply(f"{text}\n".encode(), "text/plain", {"Connection": "close", **(headers or {})}),
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses carry the token."""


def _address(text: str) -> tuple[str, Query]:
    """The path of an address on this host, word for word, and its query."""
    path, _, query = text.partition("?")
    try:
        return path, parse_qs(query, keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise Refused(400, "The address has too many parts.") from error


def _made(route: Route, board: Board, query: Query) -> Reply:
    try:
        return route(board, query)
    except Refused:
        raise
    except (
        Exception
    ) as error:  # whatever lies in a folder: the page must not take it for the end of the board
        log.warning("a request could not be answered", exc_info=True)
        raise Refused(
            500, f"The board cannot show this ({type(error).__name__}); its terminal tells more."
        ) from error


# --- what is served ---


@cache
def asset(name: str) -> bytes:
    if name == "plotly.js":
        return plotly_bundle().encode()
    return files("rather.board").joinpath(name).read_bytes()


def _script(name: str) -> Route:
    return lambda _board, _query: Reply(asset(name), "text/javascript", {"Cache-Control": KEPT})


@cache
def _document(folder: str) -> bytes:
    linked = [f"/{name}?{hash_of(asset(name))}" for name in ("plotly.js", "board.js")]
    style = f"<style>{asset('board.css').decode()}</style>"
    return page(
        TITLE, style + BODY, data={"folder": folder, "most": MOST_RUNS}, linked=linked
    ).encode()


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _page(board: Board, _: Query) -> Reply:
    document = _document(str(board.runs.folder))
    found = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]+)"', document)
    assert found
    return Reply(
        document, "text/html", {"Content-Security-Policy": f"{found[1].decode()}; {FRAMED}"}
    )


def _json(value: Any) -> Reply:
    return Reply(as_json(value).encode())


def _runs(board: Board, _: Query) -> Reply:
    return _json({"runs": board.runs.rows()})


def _run(board: Board, query: Query) -> Reply:
    ((_, path),) = _asked(board, query, most=1)
    return _json(board.runs.details(path))


def _curves(board: Board, query: Query) -> Reply:
    asked = _asked(board, query)
    metrics = query.get("metric", [])[:MOST_RUNS]
    return _json({run: board.runs.curves(run, path, metrics) for run, path in asked})


def _differences(board: Board, query: Query) -> Reply:
    configs = []
    for _, path in _asked(board, query):
        try:
            configs.append(read_config(path))
        except Problem:
            configs.append({})
    return _json({"differences": differences(configs)})


def _pair(board: Board, query: Query) -> Reply:
    ((_, path),) = _asked(board, query, most=1)
    dataset, index = query.get("set", ["train"])[0], _whole(query.get("index", ["0"])[0])
    search = query["search"][0][:200] if "search" in query else None
    return _json(board.inspector.ask(Question(path, dataset, index, search)))


def _report(board: Board, query: Query) -> Reply:
    ((_, path),) = _asked(board, query, most=1)
    try:
        return Reply((path / REPORT).read_bytes(), "text/html", {"Content-Security-Policy": ALONE})
    except OSError as error:
        raise Refused(404, f"The run has no {REPORT} that can be read.") from error


def _asked(board: Board, query: Query, most: int = MOST_RUNS) -> list[tuple[str, Path]]:
    """The runs that a request names by their ids."""
    asked = list(dict.fromkeys(query.get("run", [])))
    found = [(run, path) for run in asked[:most] if (path := board.runs.path(run))]
    if not found or len(found) < len(asked[:most]):
        raise Refused(404, "There is no such run; it may have been removed.")
    return found


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise Refused(400, "index: a pair is named by its number, counted from 0.")
    return int(text)


ROUTES: Mapping[str, Route] = {
    "/": _page,
    "/plotly.js": _script("plotly.js"),
    "/board.js": _script("board.js"),
    "/api/runs": _runs,
    "/api/run": _run,
    "/api/curves": _curves,
    "/api/differences": _differences,
    "/api/pair": _pair,
    "/report": _report,
}
