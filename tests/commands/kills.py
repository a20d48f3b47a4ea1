"""Kills of commands that write a journal: in the middle of a line, in this process or in a fork."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rather.commands.journal import Journal


class Killed(BaseException):
    """Ends a command as SIGKILL does: nothing handles it."""


def die() -> None:
    raise Killed


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(line: int, share: float = 0.0, die: Callable[[], None] = die) -> Callable[..., None]:
    """Return an `append` that writes a line of the journal without a share of it, and dies."""
    append, lines = Journal.append, [0]

    def append_or_die(journal: Journal, entry: Any) -> None:
        lines[0] += 1
        append(journal, entry)
        if lines[0] > line:
            size = len(json.dumps(entry))
            os.truncate(journal.path, journal.path.stat().st_size - int(share * size))
            die()

    return append_or_die


def killed_in_fork(line: int, share: float, work: Callable[..., Any], *args: Any) -> int:
    """Run `work` in a fork, which has imported everything, until it is killed; return its status."""
    child = os.fork()
    if child == 0:
        Journal.append = die_at(line, share, kill)  # type: ignore[method-assign]
        work(*args)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(line: int, share: float, work: Callable[..., Any], *args: Any) -> None:
    """Run `work` in this process until it dies at a line of its journal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", die_at(line, share))
        with pytest.raises(Killed):
            work(*args)
