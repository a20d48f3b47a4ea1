"""Where answers come from: the model in this process, your server, or a server started here."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

from rather.commands.generate import AnswerRequest, generate_answers
from rather.commands.generate_by_server import ServerOptions, generate_by_server
from rather.errors import ConfigError, ServerError, ServerSilent
from rather.files import own, read_bytes, regular
from rather.judges.openai_client import Server, first_choice
from rather.tools.child_process import tied
from rather.tools.rounds.settings import ServerKeys

PAUSE = 1.0  # seconds between two questions to a server that starts
LAST_LINES, LAST_BYTES = 5, 10_000  # of a server's output, in an error
ENDING = 20.0  # seconds until a server that was asked to end is killed


class AnswerSource:
    """Writes the answers of one model. A server is started when first needed; close ends it."""

    def __init__(self, model: str, keys: ServerKeys | None, folder: Path, number: int) -> None:
        self.model, self.keys, self.folder, self.number = model, keys, folder, number
        self.process: subprocess.Popen[bytes] | None = None
        self.url: str | None = None

    def __enter__(self) -> AnswerSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, prompts: Path, out: Path, request: AnswerRequest) -> None:
        """Write the answers to a file of prompts; continue a file that was begun."""
        if self.keys is None:
            generate_answers(self.model, prompts, out, request, force=True)
            return
        url = self._address(self.keys)
        options = ServerOptions(url, self.model, self.keys.concurrency, timeout=self.keys.timeout)
        generate_by_server(self.model, prompts, out, request, options, force=True)

    def _address(self, keys: ServerKeys) -> str:
        if self.url is None:
            self.url = keys.url or self._start(keys)
            if keys.url and self.number:
                self._check_model(keys.url)
        return self.url

    def _check_model(self, url: str) -> None:
        """Refuse a server that still runs the model of another round."""
        listed = Server(url, 30).get("models").get("data")
        names = [entry.get("id") for entry in listed or [] if isinstance(entry, dict)]
        if not {self.model, str(Path(self.model).absolute())} & set(names):
            raise ServerError(
                f"rounds.server.url: {url} runs {', '.join(map(str, names)) or 'no model'}. Start "
                f"it with {self.model} and run the same command again."
            )

    # --- a server of this command ---

    def _start(self, keys: ServerKeys) -> str:
        """Start the server and wait for its first completion: /health may say nothing."""
        assert keys.start is not None
        port = _port(self.folder / "port")
        words = shlex.split(keys.start)
        command = [word.replace("{model}", self.model).replace("{port}", port) for word in words]
        log = self.folder / "server.log"
        with open(log, "wb", opener=own) as log_file:
            self.process = subprocess.Popen(
                tied(command), stdout=log_file, stderr=log_file, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        server = Server(url, keys.timeout)
        body = {"model": self.model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        deadline = time.monotonic() + keys.start_timeout
        problem = ""
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise ConfigError(
                    f"rounds.server.start: ended with exit code {code}: {_tail(log)} ({log})"
                )
            try:
                first_choice(server.post("completions", body, tries=1))
            except ServerSilent as error:
                problem = str(error)
                time.sleep(PAUSE)
            except ServerError as error:
                raise ServerError(f"rounds.server.start: {error} {_tail(log)} ({log})") from None
            else:
                return url
        raise ServerError(
            f"rounds.server.start: no completion within {keys.start_timeout:g} s ({problem}); see "
            f"{log}."
        )

    def close(self) -> None:
        """End the server that was started here, and all processes of its session."""
        if self.process is None:
            return
        for name in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, name)
            try:
                self.process.wait(ENDING)
                break
            except subprocess.TimeoutExpired:
                continue
        self.process, self.url = None, None


def _port(file: Path) -> str:
    """Return a free port; the one of an earlier start if it is still free.

    The address belongs to the answers that a killed command has written already.
    """
    earlier = read_bytes(file).decode() if file.is_file() else ""
    for port in (int(earlier) if earlier.isdecimal() else 0, 0):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            free_port = str(free.getsockname()[1])
        file.write_text(free_port)
        return free_port
    raise ServerError("rounds.server.start: no port of this machine is free.")


def _tail(log: Path) -> str:
    with open(log, "rb", opener=regular) as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read(LAST_BYTES).decode(errors="replace").splitlines()
    return " | ".join(lines[-LAST_LINES:])
