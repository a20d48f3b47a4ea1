"""The server of the board: loopback only, GET only, a token for everything; no path in a request
names a file.
"""

from __future__ import annotations

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
from rather.board.runs import FolderProblem, RunList, differences, digest, read_config
from rather.board.template import BODY
from rather.errors import ConfigError
from rather.report import as_json, page, plotly_bundle
from rather.report.folder import REPORT_PAGE

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
MOST_RUNS = 8  # in one chart: as many as there are colours
TITLE = "Rather board"
FRAMED = "frame-ancestors 'none'"
# A report comes from a run folder, perhaps a stranger's: its scripts run in an origin of their
# own, from which no
# request is answered, so they cannot ask the board for anything.
ALONE = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; "
    f"img-src data: blob:; {FRAMED}"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
CACHED = "private, max-age=31536000, immutable"  # assets have their digest in their address

Query = Mapping[str, list[str]]


class Reply(NamedTuple):
    body: bytes
    kind: str = "application/json"
    headers: Mapping[str, str] = {}


Route = Callable[["Board", Query], Reply]


class RequestRefused(Exception):
    """An HTTP status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Board(ThreadingHTTPServer):
    """Serves the runs under a folder. `address` is the one to open: it carries the token."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, inspector: Inspector | None = None) -> None:
        self.runs, self.inspector = RunList(folder), inspector or Inspector()
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot be used ({error.strerror}); choose another, or omit it for "
                "a free one."
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        # The port is in the name because browsers send cookies of a host to all its ports.
        self.cookie = f"rather_board_{self.server_port}"

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no traceback for a browser that went away, as socketserver would."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            log.warning("a request could not be answered", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Answers only the addresses in ROUTES, compared as whole strings."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rather", ""
    timeout = 60  # seconds until an idle connection is closed
    server: Board

    def do_GET(self) -> None:
        try:
            self._check_host()
            path, _, text = self.path.partition("?")
            if text.count("&") > 100:
                raise RequestRefused(400, "The address has too many parts.")
            query = parse_qs(text, keep_blank_values=True)
            with_token = self._check_token(query)
            if path not in ROUTES:
                raise RequestRefused(404, "There is nothing at this address.")
            reply = ROUTES[path](self.server, query)
        except RequestRefused as refused:
            self._refuse(refused.status, str(refused))
        except (
            Exception
        ) as error:  # caused by whatever is in a folder: the board itself keeps working
            log.warning("a request could not be answered", exc_info=True)
            self._refuse(
                500, f"The board cannot show this ({type(error).__name__}); see its terminal."
            )
        else:
            self._send(200, reply, with_token=with_token)

    def _refuse_method(self) -> None:
        self._refuse(405, "The board only shows: GET is the only method.", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = (
        _refuse_method
    )

    def _check_host(self) -> None:
        """Refuse DNS rebinding: a stranger's page whose name points to 127.0.0.1 sends its own
        host name.
        """
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            own = f"{ADDRESS}:{self.server.server_port}"
            raise RequestRefused(421, f"This is {own}, and the request names another host.")

    def _check_token(self, query: Query) -> bool:
        """Require the token in the address, a header or the cookie; return whether it was in the
        address.
        """
        in_address = any(map(self.server.knows, query.get("token", [])))
        # Other programs on this host set cookies too; SimpleCookie stops at `a={"b":1}`.
        pairs = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        others = [value for name, _, value in pairs if name == self.server.cookie]
        others.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if not in_address and not any(map(self.server.knows, others)):
            text = "Open the address that `rather board` printed: it carries the token."
            raise RequestRefused(403, text)
        return in_address

    def _send(self, status: int, reply: Reply, *, with_token: bool = False) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": f"{reply.kind}; charset=utf-8", **reply.headers}
        if with_token:
            cookie = f"{self.server.cookie}={self.server.token}"
            headers["Set-Cookie"] = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        for name, value in {**headers, "Content-Length": str(len(reply.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def _refuse(self, status: int, text: str, **headers: str) -> None:
        self.close_connection = True  # a body that may follow is not read
        self._send(
            status, Reply(f"{text}\n".encode(), "text/plain", {"Connection": "close", **headers})
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses carry the token."""


# --- what is served ---


@cache
def asset(name: str) -> bytes:
    if name == "plotly.js":
        return plotly_bundle().encode()
    return files("rather.board").joinpath(name).read_bytes()


def _script(name: str) -> Route:
    return lambda _board, _query: Reply(asset(name), "text/javascript", {"Cache-Control": CACHED})


@cache
def _document(folder: str) -> bytes:
    linked = [f"/{name}?{digest(asset(name))}" for name in ("plotly.js", "board.js")]
    body = f"<style>{asset('board.css').decode()}</style>{BODY}"
    return page(TITLE, body, data={"folder": folder, "most": MOST_RUNS}, linked=linked).encode()


def _page(board: Board, _: Query) -> Reply:
    document = _document(str(board.runs.folder))
    found = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]+)"', document)
    assert found
    policy = f"{found[1].decode()}; {FRAMED}"
    return Reply(document, "text/html", {"Content-Security-Policy": policy})


def _json(value: Any) -> Reply:
    return Reply(as_json(value).encode())


def _runs(board: Board, _: Query) -> Reply:
    return _json({"runs": board.runs.rows()})


def _run(board: Board, query: Query) -> Reply:
    return _json(board.runs.details(_one(board, query)))


def _curves(board: Board, query: Query) -> Reply:
    metrics = query.get("metric", [])[:MOST_RUNS]
    found = _requested(board, query)
    return _json({run: board.runs.curves(run, path, metrics) for run, path in found.items()})


def _differences(board: Board, query: Query) -> Reply:
    configs = []
    for path in _requested(board, query).values():
        try:
            configs.append(read_config(path))
        except FolderProblem:
            configs.append({})
    return _json({"differences": differences(configs)})


def _pair(board: Board, query: Query) -> Reply:
    index, name = query.get("index", ["0"])[0], query.get("set", ["train"])[0]
    path = _one(board, query)
    if not re.fullmatch(r"\d{1,12}", index):
        raise RequestRefused(400, "index: must be the number of a pair, counted from 0.")
    search = query["search"][0][:200] if "search" in query else None
    return _json(board.inspector.ask(Question(path, name, int(index), search)))


def _report(board: Board, query: Query) -> Reply:
    try:
        text = (_one(board, query) / REPORT_PAGE).read_bytes()
    except OSError as error:
        raise RequestRefused(404, f"The run has no {REPORT_PAGE} that can be read.") from error
    return Reply(text, "text/html", {"Content-Security-Policy": ALONE})


def _one(board: Board, query: Query) -> Path:
    return next(iter(_requested(board, query).values()))


def _requested(board: Board, query: Query) -> dict[str, Path]:
    """Return the runs whose ids are in a request."""
    ids = dict.fromkeys(query.get("run", [])[:MOST_RUNS])
    found = {run: path for run in ids if (path := board.runs.path(run))}
    if not found or len(found) < len(ids):
        raise RequestRefused(404, "There is no such run; it may have been removed.")
    return found


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
