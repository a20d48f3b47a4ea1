"""Rules: functions of a user's Python file that score answers, run by a child process with limits.

A rule may execute the answer that it scores. An endless loop, `exit()` or a crash must cost no more
than the score of that answer. Questions and replies are lines of JSON on a socket of their own,
which the prints of a rule do not reach. A reply is a result and a problem, of which one is null.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from rather.child import start_child
from rather.config import plugins
from rather.errors import ConfigError, DataError
from rather.files import JsonObject, parse_json

SECONDS = 10.0  # for one answer
IMPORT_SECONDS = 300.0  # for the file of a rule, which may import large libraries
MOST_SCORE = 1e6
MOST_REPLY = 1 << 20  # bytes
MOST_TEXT = 500  # characters of an error
OPTION = "--with"  # names the file
FIXED = ("prompt", "answer", "row")  # what parameters of these names mean

NO_ANSWER = "Write score(prompt, answer, ...); parameters of other names are columns of the row."

# ---- in the parent


class Unscored(NamedTuple):
    """Why an answer has no score: the rule and its line, what happened, and the row."""

    reason: str


class Rule:
    """A rule in a child process, which is started again after it had to be killed.

    `columns` maps parameters to columns of other names. When this process ends, in whatever way,
    the child ends with all that it has started.
    """

    def __init__(
        self, file: str, name: str, columns: Mapping[str, str], seconds: float | None = None
    ) -> None:
        """Start the child, which imports the file; raise ConfigError if it cannot."""
        path = str(Path(file))
        self.label, self.seconds = f"{OPTION} {path}:{name}", seconds or SECONDS
        source = plugins.read_function_file(Path(path), OPTION)  # restarts run the same text
        self._setup = [source, path, name]
        parameters, self.required, self.takes_all = self._start()
        self.meanings = {name: name for name in FIXED if name in parameters}
        if "answer" not in parameters:
            first = parameters[:2]
            if len(first) < 2 or first[0] == "row" or first[1] in FIXED:
                raise ConfigError(f"{self.label}: {NO_ANSWER}")
            self.meanings |= zip(first, FIXED, strict=False)
        self.columns = {name: name for name in parameters if name not in self.meanings}
        for name, column in columns.items():
            if not (name in self.columns or self.takes_all):
                raise ConfigError(
                    f"--column {name}={column}: {self.label} has no parameter for it."
                )
            self.columns[name] = column
            self.required.append(name)

    def check(self, row: JsonObject, place: str) -> None:
        """Refuse a row that lacks a column which the rule needs."""
        for name in self.meanings:
            if name in row and name not in FIXED:
                raise ConfigError(f"{self.label}: `{name}` is a column ({place}). {NO_ANSWER}")
        for name in self.required:
            column = self.columns.get(name)
            if column and column not in row:
                raise DataError(
                    f"{place}: has no column `{column}`, which {self.label} needs; its columns are "
                    f"{', '.join(row)}. Name one of them: --column {name}=COLUMN, or judge.columns "
                    "in a YAML."
                )

    def score(self, prompt: Any, answer: str, row: JsonObject, place: str) -> float | Unscored:
        """Return the score of an answer whose row was checked."""
        fixed = {"prompt": prompt, "answer": answer, "row": row}
        values: JsonObject = {}
        if self.takes_all:
            values = {name: row[name] for name in row if name not in FIXED}
        values |= {name: row[column] for name, column in self.columns.items() if column in row}
        values |= {name: fixed[meaning] for name, meaning in self.meanings.items()}
        if not self._end.alive:
            self._start()
        score, problem = self._ask(values, self.seconds)
        if isinstance(score, float):
            if abs(score) <= MOST_SCORE:
                return score
            problem = f": the score is {score:g}, not from -{MOST_SCORE:g} to {MOST_SCORE:g}"
        return Unscored(f"{self.label}{problem} (at {place})")

    def _start(self) -> Any:
        """Start the child; return its parameters, the required ones, and whether it takes all."""
        self._connection, childs = socket.socketpair()
        lifeline, ours = os.pipe()
        with childs:
            process = start_child(__name__, (childs.fileno(), lifeline))
        os.close(lifeline)
        self._end = weakref.finalize(self, _kill, process, self._connection, ours)
        signature_of_rule, problem = self._ask(self._setup, IMPORT_SECONDS)
        if signature_of_rule is None:
            raise ConfigError(f"{self.label.rpartition(':')[0]}{problem}")
        return signature_of_rule

    def _ask(self, question: Any, seconds: float) -> tuple[Any, str]:
        """Return the reply of the child, or what has become of it."""
        deadline, line = time.monotonic() + seconds, bytearray()
        try:
            text = json.dumps(question, default=str)  # a date becomes text
            self._connection.settimeout(seconds)
            self._connection.sendall(text.encode() + b"\n")
            while not line.endswith(b"\n"):
                self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._connection.recv(1 << 16)
                if not received or len(line) > MOST_REPLY:
                    raise ConnectionError
                line += received
            result, problem = parse_json(line.decode())
        except TimeoutError:
            self._end()
            return None, f": took longer than {seconds:g} s"
        except (OSError, ValueError, TypeError):
            code: int = self._end()  # type: ignore[assignment]
            if code == -signal.SIGKILL:
                return None, ": its process was killed, or damaged the connection"
            return (
                None,
                f": its process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})",
            )
        except BaseException:  # after Ctrl-C, the next question would get the answer to this one
            self._end()
            raise
        return result, problem


def _kill(process: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> int:
    """Kill a child with all that it has started; return its exit code."""
    # Before it is waited for: until then, no other group can have its number.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    connection.close()
    os.close(lifeline)
    return process.wait()


# ---- in the child


def main(handle: int, lifeline: int) -> None:
    """Import the rule, then score answers until the parent closes the connection."""
    lead_group(lifeline)
    limit_data()
    own_id = os.getpid()
    with socket.socket(fileno=handle) as connection, connection.makefile("rb") as questions:

        def reply(result: Any, problem: str = "") -> None:
            if os.getpid() != own_id:  # the rule has forked, and this is the copy
                os._exit(0)
            connection.sendall(json.dumps([result, problem]).encode() + b"\n")

        source, path, name = json.loads(questions.readline())
        try:
            file = plugins.ImportedFile(*source)
            function = plugins.function_of(file, Path(path), name, OPTION)
            reply(parameters_of(function))
            for line in questions:
                try:
                    returned = function(**json.loads(line))
                    if not hasattr(type(returned), "__float__"):  # texts have none
                        raise TypeError(f"returned {type(returned).__name__}, not a number")
                    reply(float(returned))
                except BaseException as error:  # also exit()
                    reply(None, problem_of(error, path))
        except ConfigError as error:
            reply(None, str(error).removeprefix(f"{OPTION} {path}"))
        except BaseException as error:
            reply(None, problem_of(error, path))


def lead_group(lifeline: int) -> None:
    """Form a group of processes, which the kernel kills when the parent's end of a pipe closes.

    Only Linux can. A thread could not: some loops, as of regular expressions, stop all threads.
    """
    os.setsid()
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def limit_data() -> None:
    """Let this process fill half of the machine's memory.

    The limit is not on addresses, as that of `limit_memory` in rather/files.py: libraries for GPUs
    reserve more of them than there is memory.
    """
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def parameters_of(function: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return all parameters, those without a default, and whether the rest of the row is taken."""
    parameters = signature(function).parameters.values()
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    named = [shape for shape in parameters if shape.kind not in variadic]
    required = [shape.name for shape in named if shape.default is shape.empty]
    takes_all = any(shape.kind == Parameter.VAR_KEYWORD for shape in parameters)
    return [shape.name for shape in named], required, takes_all


def problem_of(error: BaseException, path: str) -> str:
    """Return the line of the rule's file and the error, as one line without surrogates."""
    lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path]
    text = " ".join(traceback.format_exception_only(error)[-1].split())[:MOST_TEXT]
    place = f", line {lines[-1]}" if lines else ""
    return f"{place}: {text}".encode(errors="backslashreplace").decode()
