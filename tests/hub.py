"""A stand-in of the hub's HTTP interface: what `huggingface_hub` asks of it to find, download and upload the files of a repository."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

API = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/([^?]+))?")
COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)")
LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
LARGE = (".safetensors", ".gguf")  # files that go to the large file storage
FILE = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Repositories by name: each revision is a commit, and each commit has files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}  # repositories that were created here
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256
        self.tokens: set[str] = set()  # that clients sent
        self.accepted: str | None = None  # the only token that may write; None: any
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
            info["private"] = self.server.private.get(repo, False)
            self.answer(200, json.dumps(tree if kind == "tree" else info).encode(), {})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        token = str(self.headers.get("Authorization", "")).removeprefix("Bearer ")
        self.server.tokens.add(token)
        if self.server.accepted not in (None, token):
            return self.answer_json(401, {"error": f"bad token {token}"})
        if match := COMMIT.fullmatch(path):
            return self.commit(match[1], body) if match[2] == "commit" else self.modes(body)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer_json(200, {"errors": [], "warnings": []})
        if LFS.fullmatch(path):
            return self.batch(json.loads(body))
        self.answer_json(404, {"error": path})

    def create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization'] or 'me'}/{asked['name']}"
        address = {"url": f"{self.server.address}/{repo}"}
        if (repo, "main") in self.server.revisions:
            return self.answer_json(409, {**address, "error": "it exists"})
        self.server.private[repo] = asked.get("visibility") == "private"
        self.server.add(repo, {".gitattributes": b""})
        self.answer_json(200, address)

    def modes(self, body: bytes) -> None:
        """Say which files are large."""
        names = [file["path"] for file in json.loads(body)["files"]]
        files = [
            {
                "path": name,
                "uploadMode": "lfs" if name.endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for name in names
        ]
        self.answer_json(200, {"files": files})

    def batch(self, asked: dict[str, Any]) -> None:
        """Say where each large file that is not stored yet goes."""
        objects = []
        for entry in asked["objects"]:
            address = {"href": f"{self.server.address}/lfs/{entry['oid']}"}
            actions = {} if entry["oid"] in self.server.stored else {"actions": {"upload": address}}
            objects.append({**entry, **actions})
        self.answer_json(200, {"transfer": "basic", "objects": objects})

    def do_PUT(self) -> None:
        self.server.requests.append(f"PUT {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(body).hexdigest()
        assert self.path == f"/lfs/{digest}"
        self.server.stored[digest] = body
        self.answer(200, b"", {})

    def commit(self, repo: str, body: bytes) -> None:
        files = dict(self.server.commits[self.server.revisions[repo, "main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.server.add(repo, files)
        address = f"{self.server.address}/{repo}/commit/{oid}"
        self.answer_json(200, {"commitUrl": address, "commitOid": oid, "success": True})

    def answer_json(self, status: int, value: Any) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
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


TOKEN = "hf_onlyForTheLocalServer0123456789"


@contextmanager
def accepting_uploads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process reads and writes; its client read the environment long ago."""
    with serving() as server:
        server.accepted = TOKEN
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        huggingface_hub.close_session()
        yield server
    huggingface_hub.close_session()
