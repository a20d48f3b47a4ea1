"""The server of the board: loopback only, GET only, a token for everything.

No path in a request names a file.
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

from rather.errors import ConfigError
from rather.files import own, read_bytes
from rather.run_folder.names import REPORT_PAGE
from rather.tools.board.inspector import Inspector, PairQuestion
from rather.tools.board.runs import FolderProblem, RunList, differences, digest, read_config
from rather.tools.report.page import as_json, page

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
MOST_RUNS = 8  # in one chart: as many as there are colours
MOST_CHARTS = 16
FRAMED = "frame-ancestors 'none'"
# A report comes from a run folder, perhaps a stranger's: its scripts run in an origin of their own,
# from which no request is answered, so they cannot ask the board for anything.
ALONE = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src "
    f"'unsafe-inline'; img-src data: blob:; {FRAMED}"
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


class HttpReply(NamedTuple):
    body: bytes
    kind: str = "application/json"
    headers: Mapping[str, str] = {}


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
        self.hosts = [f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")]
        self.address = f"http://{self.hosts[0]}/?token={self.token}"
        # The port is in the name because browsers send cookies of a host to all its ports.
        self.cookie = f"rather_board_{self.server_port}"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no traceback for a browser that went away, as socketserver would."""
        if not isinstance(sys.exception(), ConnectionError):
            log.warning("a request could not be answered", exc_info=True)

    def requested(self, query: Query) -> dict[str, Path]:
        """Return the runs whose ids are in a request."""
        ids = dict.fromkeys(query.get("run", [])[:MOST_RUNS])
        runs = {run: path for run in ids if (path := self.runs.path(run))}
        if not runs or len(runs) < len(ids):
            raise RequestRefused(404, "There is no such run; it may have been removed.")
        return runs

    def one(self, query: Query) -> Path:
        return next(iter(self.requested(query).values()))


class Handler(BaseHTTPRequestHandler):
    """Answers only the addresses in ROUTES, compared as whole strings."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rather", ""
    timeout = 60  # seconds until an idle connection is closed
    server: Board

    def do_GET(self) -> None:
        try:
            # A stranger's page whose name points to 127.0.0.1 (DNS rebinding) sends that name.
            hosts = self.headers.get_all("Host") or []
            if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
                host = self.server.hosts[0]
                raise RequestRefused(421, f"This is {host}, and the request names another host.")
            path, _, text = self.path.partition("?")
            if text.count("&") > 100:
                raise RequestRefused(400, "The address has too many parts.")
            query = parse_qs(text, keep_blank_values=True)
            with_token = self._check_token(query)
            if path not in ROUTES:
                raise RequestRefused(404, "There is nothing at this address.")
            contents = ROUTES[path](self.server, query)
            reply = (
                contents
                if isinstance(contents, HttpReply)
                else HttpReply(as_json(contents).encode())
            )
        except RequestRefused as refused:
            self._refuse(refused.status, str(refused))
        except Exception as error:  # of whatever is in a folder: the board itself keeps working
            log.warning("a request could not be answered", exc_info=True)
            text = f"The board cannot show this ({type(error).__name__}); see its terminal."
            self._refuse(500, text)
        else:
            self._send(200, reply, with_token=with_token)

    def _refuse_method(self) -> None:
        self._refuse(405, "The board only shows: GET is the only method.", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = (
        _refuse_method
    )

    def _check_token(self, query: Query) -> bool:
        """Require the token in address, header or cookie; return whether it is in the address."""
        in_address = any(map(self.server.knows, query.get("token", [])))
        # Other programs on this host set cookies too; SimpleCookie stops at `a={"b":1}`.
        pairs = (text.strip().partition("=") for text in self.headers.get("Cookie", "").split(";"))
        tokens = [cookie for name, _, cookie in pairs if name == self.server.cookie]
        tokens.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if not in_address and not any(map(self.server.knows, tokens)):
            text = "Open the address that `rather board` printed: it carries the token."
            raise RequestRefused(403, text)
        return in_address

    def _send(self, status: int, reply: HttpReply, *, with_token: bool = False) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": f"{reply.kind}; charset=utf-8", **reply.headers}
        if with_token:
            cookie = f"{self.server.cookie}={self.server.token}"
            headers["Set-Cookie"] = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        for name, header in {**headers, "Content-Length": str(len(reply.body))}.items():
            self.send_header(name, header)
        self.end_headers()
        self.wfile.write(reply.body)

    def _refuse(self, status: int, text: str, **headers: str) -> None:
        self.close_connection = True  # a body that may follow is not read
        headers = {"Connection": "close", **headers}
        self._send(status, HttpReply(f"{text}\n".encode(), "text/plain", headers))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses carry the token."""


# --- what is served ---


@cache
def asset(name: str) -> bytes:
    return files("rather.tools.board").joinpath(name).read_bytes()


def _script() -> HttpReply:
    return HttpReply(asset("board.js"), "text/javascript", {"Cache-Control": CACHED})


def _page(board: Board) -> HttpReply:
    script = f"/board.js?{digest(asset('board.js'))}"
    body = f"<style>{asset('board.css').decode()}</style>{BODY}"
    settings = {"folder": str(board.runs.folder), "most": MOST_RUNS, "charts": MOST_CHARTS}
    document = page("Rather board", body, data=settings, script=script)
    policy = document.partition('"Content-Security-Policy" content="')[2].partition('"')[0]
    headers = {"Content-Security-Policy": f"{policy}; {FRAMED}"}
    return HttpReply(document.encode(), "text/html", headers)


def _curves(board: Board, query: Query) -> Any:
    metrics, runs = query.get("metric", [])[:MOST_CHARTS], board.requested(query)
    return {run: board.runs.curves(run, path, metrics) for run, path in runs.items()}


def _differences(board: Board, query: Query) -> Any:
    configs = []
    for path in board.requested(query).values():
        try:
            configs.append(read_config(path))
        except FolderProblem:
            configs.append({})
    return {"differences": differences(configs)}


def _pair(board: Board, query: Query) -> Any:
    path, index = board.one(query), query.get("index", ["0"])[0]
    if not re.fullmatch(r"\d{1,12}", index):
        raise RequestRefused(400, "index: must be the number of a pair, counted from 0.")
    search = query["search"][0][:200] if "search" in query else None
    name = query.get("set", ["train"])[0]
    return board.inspector.ask(PairQuestion(path, name, int(index), search))


def _report(board: Board, query: Query) -> HttpReply:
    try:
        text = read_bytes(board.one(query) / REPORT_PAGE, opener=own)
    except (OSError, ValueError) as error:
        raise RequestRefused(404, f"The run has no {REPORT_PAGE} that can be read.") from error
    return HttpReply(text, "text/html", {"Content-Security-Policy": ALONE})


# What is not a Reply is sent as JSON.
ROUTES: Mapping[str, Callable[[Board, Query], Any]] = {
    "/": lambda board, _: _page(board),
    "/board.js": lambda *_: _script(),
    "/api/runs": lambda board, _: {"runs": board.runs.rows()},
    "/api/run": lambda board, query: board.runs.details(board.one(query)),
    "/api/curves": _curves,
    "/api/differences": _differences,
    "/api/pair": _pair,
    "/report": _report,
}

# --- the HTML skeleton, which board.js fills ---

BODY = """
<p id="status" role="status">Loading the runs.</p>

<section aria-labelledby="runs">
<h2 id="runs">Runs</h2>
<div class="tools">
<label for="filter">Filter</label>
<input id="filter" type="search" placeholder="words of name, state, model" aria-keyshortcuts="/"
autocomplete="off"> <span id="shown" class="muted"></span>
<button type="button" id="keys" aria-keyshortcuts="?">Keys</button>
</div>
<div class="scroll runs" role="region" aria-label="List of runs" tabindex="0">
<table><caption class="unseen">All runs of the folder; check the boxes of runs to compare</caption>
<thead><tr>
<th scope="col"><span class="unseen">compare</span></th>
<th scope="col" data-key="name"><button type="button">run</button></th>
<th scope="col" data-key="state"><button type="button">state</button></th>
<th scope="col" data-key="step"><button type="button">step</button></th>
<th scope="col" data-key="loss"><button type="button">loss</button></th>
<th scope="col" data-key="accuracy"><button type="button">accuracy</button></th>
<th scope="col" data-key="held_out"><button type="button">held-out accuracy</button></th>
<th scope="col" data-key="seconds"><button type="button">took</button></th>
<th scope="col" data-key="changed"><button type="button">updated</button></th>
<th scope="col" data-key="model"><button type="button">model</button></th>
<th scope="col" data-key="loss_type"><button type="button">loss type</button></th>
<th scope="col" data-key="notes"><button type="button">notes</button></th>
</tr></thead><tbody id="rows"></tbody></table>
</div>
</section>

<section aria-labelledby="run">
<h2 id="run">Selected run</h2>
<div id="opened"></div>
</section>

<section aria-labelledby="curves">
<h2 id="curves">Curves</h2>
<p id="compared" class="muted"></p>
<div class="tools"><label for="metric">Add a chart</label><select id="metric"></select>
<label for="smoothing">Smoothing</label>
<input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0">
<output id="smoothed" for="smoothing">off</output></div>
<div id="charts" class="grid"></div>
</section>

<section aria-labelledby="differences">
<h2 id="differences">Differences</h2>
<div id="different"></div>
</section>

<section aria-labelledby="pairs">
<h2 id="pairs">Pairs</h2>
<p class="muted">Each token of an answer, coloured by how much more or less likely the policy makes
it than the reference does. The first pair of a run takes a while because its models are loaded.</p>
<p>Run: <strong id="inspected"></strong></p>
<form id="ask" class="tools">
<label for="set">Set</label><select id="set"><option>train</option></select>
<label for="index">Pair</label><input id="index" type="number" min="0" value="0" step="1">
<button type="submit">Show</button>
<button type="button" id="previous" aria-keyshortcuts="p">Previous</button>
<button type="button" id="next" aria-keyshortcuts="n">Next</button>
</form>
<form id="find" class="tools" role="search">
<label for="text">Find pairs with</label><input id="text" type="search" maxlength="200"
autocomplete="off"> <button type="submit">Find</button>
</form>
<p class="muted"><span id="doing" role="status"></span> <span id="waited"
aria-hidden="true"></span></p> <div id="hits"></div>
<div id="pair"></div>
</section>

<dialog id="help" aria-labelledby="help-name">
<p id="help-name"><strong>Keys</strong></p>
<dl>
<dt><kbd>/</kbd></dt><dd>filter the runs</dd>
<dt><kbd>↑ ↓</kbd></dt><dd>previous or next run in the list</dd>
<dt><kbd>Enter</kbd></dt><dd>open the run; Space on its checkbox compares it</dd>
<dt><kbd>← →</kbd></dt><dd>previous or next token of an answer</dd>
<dt><kbd>↑ ↓</kbd></dt><dd>the other answer, at the same token</dd>
<dt><kbd>n p</kbd></dt><dd>next or previous pair</dd>
<dt><kbd>?</kbd></dt><dd>show this help</dd>
<dt><kbd>Esc</kbd></dt><dd>close this help</dd>
</dl>
<form method="dialog"><button>Close</button></form>
</dialog>
"""
