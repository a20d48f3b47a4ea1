"""The pair inspector: log-probs of each token of a pair by the reference, the policy as it began, and as trained.

One thread answers, newest question first, and holds the models of one run at a time. Nothing is written into the run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from rather.board.runs import CONFIG, FINISHED
from rather.config.redaction import redact
from rather.errors import RatherError

if TYPE_CHECKING:
    from rather.board.session import Session

log = logging.getLogger(__name__)

MOST_WAITING = 16
MOST_KEPT = 32  # answers: one of 32,768 tokens a side takes 10 MB
PATIENCE = 30.0  # seconds: whoever waits asks again all the time, and who has gone away does not
FRESH = 30.0  # seconds in which an answer stands, though its run has saved since: it may save faster than models load

Stamp = tuple[int, ...]
Answer = dict[str, Any]


class Question(NamedTuple):
    """About a pair by its number or, with `search`, about which pairs hold a text."""

    run_dir: Path
    dataset: str
    place: int  # of the pair, or where the search begins
    search: str | None = None


class Known(NamedTuple):
    answer: Answer
    stamp: Stamp  # of the run, when it was opened for this
    time: float


def stamp_of(run_dir: Path) -> Stamp:
    """Changes with the newest weights of a run, and with its config."""
    times = []
    for name in ("LATEST", FINISHED, CONFIG):
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


class Inspector:
    """`ask` returns at once: what is known of the answer, or what is being done for it."""

    def __init__(
        self, open_session: Callable[[Path, Callable[[str], None]], Session] | None = None
    ) -> None:
        self._open = open_session or _session
        self._waiting: OrderedDict[Question, float] = OrderedDict()  # when each was last asked
        self._answers: OrderedDict[Question, Known] = OrderedDict()
        self._changed = Condition()
        self._doing: tuple[Question, str] | None = None
        self._thread: Thread | None = None
        self._session: tuple[Path, Stamp, Session] | None = None

    def ask(self, question: Question) -> Answer:
        with self._changed:
            known = self._answers.pop(question, None)
            if known and (
                monotonic() - known.time < FRESH or known.stamp == stamp_of(question.run_dir)
            ):
                if (
                    known.answer["state"] == "done"
                ):  # what was refused is tried when it is asked again
                    self._answers[question] = known
                return known.answer
            if self._doing and self._doing[0] == question:
                return {"state": "working", "doing": self._doing[1]}
            self._waiting[question] = monotonic()
            self._waiting.move_to_end(question)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
            if self._thread is None:
                self._thread = Thread(target=self._work, name="inspector", daemon=True)
                self._thread.start()
            self._changed.notify()
            return {"state": "working", "doing": "waiting for its turn"}

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                question, asked = self._waiting.popitem()
                if (
                    monotonic() - asked > PATIENCE
                ):  # for nobody, it may cost the models of the run that is looked at
                    continue
                self._doing = question, "opening the run"
            stamp = stamp_of(question.run_dir)
            answer = self._answered(question, stamp)
            with self._changed:
                self._doing = None
                self._answers[question] = Known(answer, stamp, monotonic())
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)

    def _answered(self, question: Question, stamp: Stamp) -> Answer:
        began = monotonic()
        try:
            session = self._session_of(question.run_dir, stamp)
            if question.search is None:
                told = session.pair(question.dataset, question.place)
            else:
                told = session.search(question.dataset, question.search, question.place)
            return {"state": "done", **told, "seconds": monotonic() - began}
        except RatherError as error:
            return {"state": "refused", "why": redact(str(error))}
        except Exception as error:  # libraries raise anything on a folder that they cannot use
            log.warning("the pairs of %s cannot be shown", question.run_dir, exc_info=True)
            return {"state": "refused", "why": redact(f"{type(error).__name__}: {error}")}

    def _session_of(self, run_dir: Path, stamp: Stamp) -> Session:
        if self._session and self._session[:2] == (run_dir, stamp):
            return self._session[2]
        if self._session:
            self._session[2].close()
            self._session = None
        session = self._open(run_dir, self._tell)
        self._session = run_dir, stamp, session
        return session

    def _tell(self, doing: str) -> None:
        with self._changed:
            if self._doing:
                self._doing = self._doing[0], doing


def _session(run_dir: Path, tell: Callable[[str], None]) -> Session:
    tell("loading PyTorch")
    from rather.board.session import Session

    return Session(run_dir, tell)
