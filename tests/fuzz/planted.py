"""Bugs that are planted on purpose, each of another class: the fuzzer must find them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from rather.checkpoint import manifest
from rather.commands import verify
from rather.config import load
from rather.data import prepare
from rather.errors import ConfigError
from rather.judges import server
from rather.tools.board.serve import Board
from rather.tracking import json_lines
from tests.fuzz.harness import Fuzzer


class Bug(NamedTuple):
    kind: str  # of the inputs that show it
    problem: str  # as the fuzzer reports it, a regular expression
    patches: Callable[[], list[Any]]


def _loses_the_row_before_a_bad_one() -> list[Any]:
    chunks_of = prepare.chunks_of

    def losing(*given: Any) -> Iterator[Any]:
        for chunk in chunks_of(*given):
            ends = [str(raw).rstrip("'").endswith("}") for _, raw in chunk.rows]
            kept = zip(chunk.rows, [*ends[1:], True], ends, strict=True)
            yield replace(chunk, rows=tuple(row for row, *good in kept if all(good)))

    return [patch.object(prepare, "chunks_of", losing)]


def _hashes_nothing() -> list[Any]:
    damages = manifest.damages

    def by_size(*given: Any, full: bool) -> Iterator[Any]:
        return (found for found in damages(*given, full=full) if "SHA-256" not in found[1])

    return [patch.object(place, "damages", by_size) for place in (verify, manifest)]


def _lets_errors_of_json_escape() -> list[Any]:
    return [patch.object(json_lines, "parse_object", json_lines.json.loads)]


def _writes_through_links() -> list[Any]:
    begin = json_lines.JsonLines.__init__

    def ending_the_last_line(self: Any, path: Path) -> None:
        begin(self, path)
        if path.is_file() and path.stat().st_size < 1e6 and not path.read_bytes().endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")

    return [patch.object(json_lines.JsonLines, "__init__", ending_the_last_line)]


def _never_ends_at_an_odd_byte() -> list[Any]:
    read = load.load

    def spinning(path: Path, *given: Any) -> Any:
        while any(byte > 126 or byte == 9 for byte in path.read_bytes()):
            pass
        return read(path, *given)

    return [patch.object(load, "load", spinning)]


def _has_an_exit_code_of_its_own() -> list[Any]:
    return [patch.object(ConfigError, "exit_code", 42)]


def _answers_without_a_token() -> list[Any]:
    return [patch.object(Board, "knows", lambda self, token: len(token) < 40)]


def _believes_a_server() -> list[Any]:
    return [patch.object(server, "first_choice", lambda answer: answer["choices"][0])]


BUGS: dict[str, Bug] = {
    "a row is lost": Bug("rows", "are lost, but only", _loses_the_row_before_a_bad_one),
    "hashes are not compared": Bug(
        "checkpoints", "is called good|has other weights", _hashes_nothing
    ),
    "a traceback": Bug("run folders", "printed a traceback", _lets_errors_of_json_escape),
    "links are followed": Bug("run folders", "changed files outside", _writes_through_links),
    "a loop without an end": Bug("configs", "did not end in time", _never_ends_at_an_odd_byte),
    "an exit code": Bug("configs", "undocumented exit code 42", _has_an_exit_code_of_its_own),
    "a weak token": Bug("board requests", "has no token", _answers_without_a_token),
    "a server is believed": Bug("servers", "printed a traceback", _believes_a_server),
}


def find_planted(world: Any, seed: int, seconds: float) -> list[str]:
    """Run the fuzzer on each bug until it is found; return those that were not."""
    from tests.fuzz.kinds import KINDS

    missed, end = [], time.monotonic() + seconds
    for name, bug in BUGS.items():
        began, fuzzer = time.monotonic(), Fuzzer(world, {bug.kind: KINDS[bug.kind]}, seed)
        patches = bug.patches()
        for each in patches:
            each.start()
        try:
            fuzzer.run(max(1.0, end - time.monotonic()), until=bug.problem)
        finally:
            for each in patches:
                each.stop()
        if not fuzzer.found(bug.problem):
            missed.append(name)
        took, inputs = time.monotonic() - began, sum(fuzzer.inputs.values())
        state = "missed" if name in missed else "found"
        print(f"fuzz: planted bug {state}: {name} ({inputs} inputs, {took:.0f} s)", flush=True)
    print(f"fuzz: planted bugs found: {len(BUGS) - len(missed)} of {len(BUGS)}", flush=True)
    return missed
