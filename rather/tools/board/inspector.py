"""The pair inspector: log-probs of a pair's tokens under reference, initial and trained policy.

One thread at a time computes, and the models of one run at a time are in memory. Nothing is
written to the run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from rather.config.found import NO_TRUST, Trust
from rather.config.redaction import redact
from rather.errors import RatherError
from rather.files import JsonObject
from rather.run_folder.names import CONFIG, FINISHED
from rather.tools.board.runs import stamp

if TYPE_CHECKING:
    from rather.tools.board.session import Session

log = logging.getLogger(__name__)

MOST_KEPT = 32  # answers that no page has fetched: one of 32,768 tokens a side takes 10 MB


class PairQuestion(NamedTuple):
    """A pair by its number or, with `search`, which pairs contain a text."""

    run_dir: Path
    dataset: str
    place: int  # of the pair, or where the search begins
    search: str | None = None


class Inspector:
    """`ask` returns at once: an answer, or what is being done for it. The page asks again.

    So no queue is needed: while one question is computed, the others wait in their pages, and a
    page that was closed asks no more.
    """

    def __init__(self, trust: Trust = NO_TRUST) -> None:
        self._trust = trust
        self._answers: dict[PairQuestion, JsonObject] = {}  # until they are fetched
        self._lock = Lock()
        self._current: PairQuestion | None = None
        self._session: Session | None = None
        self._opened: object = None  # the folder and the stamps of its files

    def ask(self, question: PairQuestion) -> JsonObject:
        with self._lock:
            if answer := self._answers.pop(question, None):
                return answer
            if self._current is None:
                self._current = question
                Thread(target=self._compute, args=(question,), daemon=True).start()
            doing = self._session.doing if self._session else "opening the run"
            is_current = self._current == question
            return {"state": "working", "doing": doing if is_current else "waiting for its turn"}

    def _compute(self, question: PairQuestion) -> None:
        began = monotonic()
        try:
            session = self._session_of(question.run_dir)
            if question.search is None:
                contents = session.pair(question.dataset, question.place)
            else:
                contents = session.search(question.dataset, question.search, question.place)
            answer = {"state": "done", **contents, "seconds": monotonic() - began}
        except Exception as error:  # libraries raise anything on a folder that they cannot use
            why = str(error)
            if not isinstance(error, RatherError):
                log.warning("the pairs of %s cannot be shown", question.run_dir, exc_info=True)
                why = f"{type(error).__name__}: {error}"
            answer = {"state": "refused", "why": redact(why)}
        with self._lock:
            self._current = None
            self._answers[question] = answer
            if len(self._answers) > MOST_KEPT:
                del self._answers[next(iter(self._answers))]

    def _session_of(self, run_dir: Path) -> Session:
        # What changes with the newest weights of the run, and with its config.
        files = tuple(stamp(run_dir / name) for name in ("LATEST", FINISHED, CONFIG))
        if self._session is None or self._opened != (run_dir, files):
            if self._session:
                self._session.close()
            self._session = None
            self._session, self._opened = self.open_session(run_dir), (run_dir, files)
        return self._session

    def open_session(self, run_dir: Path) -> Session:
        from rather.tools.board.session import Session  # imports torch

        return Session(run_dir, self._trust)
