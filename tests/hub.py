"""A stand-in of the hub's HTTP interface: what `huggingface_hub` asks of it to find and download the files of a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/([^?]+))?")
FILE = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Repositories by name: each revision is a commit, and each commit has files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(repr([repo, files]).encode()).hexdigest()
        self.commits[commit] = files
        self.revisions[repo, revision] = self.revisions[repo, commit] = commit
        return commit


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        match = API.fullmatch(path) or FILE.fullmatch(path)
        repo, kind, last = match.groups() if match else ("", "", "")
        is_file = bool(match and match.re is FILE)
        revision, _, folder = ("main", "", "") if last is None else last.partition("/")
        commit = self.server.revisions.get((repo, kind if is_file else revision), "")
        files = self.server.commits.get(commit, {})
        if not commit or (is_file and last not in files) or (kind == "tree" and folder):
            missing = "EntryNotFound" if commit else "RepoNotFound"
            self.answer(404, b"", {"X-Error-Code": missing, "X-Error-Message": "not found"})
        elif is_file:
            etag = hashlib.sha1(files[last]).hexdigest()
            self.answer(200, files[last], {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
        else:
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo, "sha": commit, "siblings": siblings, "tags": []}
            self.answer(200, json.dumps(tree if kind == "tree" else info).encode(), {})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
