"""The pair inspector: log-probs of a pair's tokens under reference, initial and trained policy.

One thread at a time computes, and the models of one run at a time are in memory. Nothing is
written to the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from rather.board.runs import stamp
from rather.config.redaction import redact
from rather.errors import RatherError
from rather.report.folder import CONFIG, FINISHED, Record

if TYPE_CHECKING:
    from rather.board.session import Session

log = logging.getLogger(__name__)

MOST_KEPT = 32  # answers: one of 32,768 tokens a side takes 10 MB
# Seconds an answer stays valid although its run has saved since: models may load more slowly.
FRESH = 30.0

Stamp = tuple[object, ...]


class Question(NamedTuple):
    """A pair by its number or, with `search`, which pairs contain a text."""

    run_dir: Path
    dataset: str
    place: int  # of the pair, or where the search begins
    search: str | None = None


class Known(NamedTuple):
    answer: Record
    stamp: Stamp  # of the run when it was opened
    time: float


def stamp_of(run_dir: Path) -> Stamp:
    """Return what changes with the newest weights of a run, and with its config."""
    return tuple(stamp(run_dir / name) for name in ("LATEST", FINISHED, CONFIG))


class Inspector:
    """`ask` returns at once: an answer, or what is being done for it. The page asks again.

    So no queue is needed: while one question is computed, the others wait in their pages, and a
    page that was closed asks no more.
    """

    def __init__(
        self, open_session: Callable[[Path, Callable[[str], None]], Session] | None = None
    ) -> None:
        self._open = open_session or _session
        self._answers: dict[Question, Known] = {}
        self._lock = Lock()
        self._current: Question | None = None
        self._doing = ""
        self._session: tuple[Path, Stamp, Session] | None = None

    def ask(self, question: Question) -> Record:
        with self._lock:
            known = self._answers.pop(question, None)
            if known and (
                monotonic() - known.time < FRESH or known.stamp == stamp_of(question.run_dir)
            ):
                if (
                    known.answer["state"] == "done"
                ):  # a refused question is tried again when asked again
                    self._answers[question] = known
                return known.answer
            if self._current is None:
                self._current, self._doing = question, "opening the run"
                Thread(target=self._compute, args=(question,), daemon=True).start()
            own = self._current == question
            return {"state": "working", "doing": self._doing if own else "waiting for its turn"}

    def _compute(self, question: Question) -> None:
        stamp, began = stamp_of(question.run_dir), monotonic()
        try:
            session = self._session_of(question.run_dir, stamp)
            if question.search is None:
                found = session.pair(question.dataset, question.place)
            else:
                found = session.search(question.dataset, question.search, question.place)
            answer = {"state": "done", **found, "seconds": monotonic() - began}
        except RatherError as error:
            answer = {"state": "refused", "why": redact(str(error))}
        except Exception as error:  # libraries raise anything on a folder that they cannot use
            log.warning("the pairs of %s cannot be shown", question.run_dir, exc_info=True)
            answer = {"state": "refused", "why": redact(f"{type(error).__name__}: {error}")}
        with self._lock:
            self._current = None
            self._answers[question] = Known(answer, stamp, monotonic())
            if len(self._answers) > MOST_KEPT:
                del self._answers[next(iter(self._answers))]

    def _session_of(self, run_dir: Path, stamp: Stamp) -> Session:
        if self._session and self._session[:2] != (run_dir, stamp):
            self._session[2].close()
            self._session = None
        if self._session is None:
            self._session = run_dir, stamp, self._open(run_dir, self._set_doing)
        return self._session[2]

    def _set_doing(self, doing: str) -> None:
        self._doing = doing


def _session(run_dir: Path, progress: Callable[[str], None]) -> Session:
    progress("loading PyTorch")
    from rather.board.session import Session

    return Session(run_dir, progress)
