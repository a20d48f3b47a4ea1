"""Failures, hangs and deadlines of a process, as plain data that can be sent to the driver.

No torch in here: the process of a device imports this before its environment is set.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rather import errors
from rather.config.redaction import redact
from rather.config.schema import Timeouts
from rather.errors import HangError, MemoryShortage, RatherError, WorkerError, WorkerLost

log = logging.getLogger(__name__)

# --- failures ---

ON_RAY = "RATHER_ON_RAY"  # in the environment of a rank that Ray runs: cpu or cuda
GRACE = 3.0  # seconds in which other ranks may still report a cause, or the same failure
KILLED = "It crashed, or was killed from outside, often for lack of host memory."
RESUME = "Run the same command again to resume from the last checkpoint."
CUT = "(timeouts.link): its network is cut, or it is off."
ECHOES = (
    *("gloo", "nccl", "tcpstore", "broken pipe"),
    *("connection closed by peer", "connection reset by peer"),
)
SHORTAGES = ("out of memory", "can't allocate memory", "cannot allocate memory")
SHORTAGE_FIXES = (
    "Lower max_tokens_per_microbatch_in_train (of a reference: "
    "max_tokens_per_microbatch_in_infer), set recompute_granularity: full in strategy_config, or "
    "shard more: strategy_name zero3 (fsdp2_infer), or a larger tp_size."
)


@dataclass(frozen=True)
class Failure:
    """Why a call failed, as text: the exception classes of a worker may not exist in the driver."""

    kind: str  # name of the exception; for Rather's own, the nearest class in rather.errors
    text: str
    trace: str
    at: float
    is_echo: bool = False  # another rank went away, and this one only noticed
    note: str = ""  # added by the worker: where memory goes

    @staticmethod
    def of(error: Exception) -> Failure:
        text, bases = redact(str(error)) or type(error).__name__, type(error).__mro__
        known = [base.__name__ for base in bases if base.__module__ == errors.__name__]
        trace = redact("".join(traceback.format_exception(error)))
        note = "".join(f"\n{each}" for each in getattr(error, "__notes__", ()))
        echo = isinstance(error, RuntimeError) and any(word in text.lower() for word in ECHOES)
        kind = (known or [type(error).__name__])[0]
        return Failure(kind, text, trace, time.time(), echo and not _is_shortage(kind, text), note)

    @property
    def is_expected(self) -> bool:
        """Whether one sentence explains it to a user; anything else needs its trace."""
        return self.known is not None or _is_shortage(self.kind, self.text)

    @property
    def known(self) -> type[RatherError] | None:
        found = getattr(errors, self.kind, None)
        return found if isinstance(found, type) and issubclass(found, RatherError) else None

    def error(self, where: str) -> RatherError:
        """Return it as an exception. One of Rather's own keeps its class and exit code."""
        place = f"{where}: " if where else ""
        if self.known:
            return self.known(f"{place}{self.text}")
        if _is_shortage(self.kind, self.text):
            fixes = self.note or SHORTAGE_FIXES
            return MemoryShortage(f"{place}{self.text.splitlines()[0]} {fixes}")
        # An echo here means that a connection broke and no process reported why.
        found = WorkerLost if self.is_echo else WorkerError
        return found(f"{place}{self.kind}: {self.text}")


def _is_shortage(kind: str, text: str) -> bool:
    return kind == "MemoryError" or any(word in text.lower() for word in SHORTAGES)


def death(signal: int | None) -> str:
    """Return what to say about a process that ended without a report."""
    how = f" (signal {signal})" if signal else ""
    return f"its process died{how}. {KILLED}"


class Cause(NamedTuple):
    """Why a job ends, and the rank to name."""

    failure: Failure
    where: str = ""

    @property
    def error(self) -> RatherError:
        return self.failure.error(self.where)

    @property
    def trace(self) -> str:
        """Return what to show before the error."""
        return "" if self.failure.is_expected else self.failure.trace

    def log_trace(self) -> None:
        if self.trace:
            log.error("%s", self.trace)


def first_rank(failures: Mapping[int, Failure]) -> int:
    """Return the rank whose failure caused the others."""
    return min(failures, key=lambda rank: (failures[rank].is_echo, failures[rank].at))


def first_cause(
    failures: Mapping[int, Failure], names: Sequence[str], role: str | None = ""
) -> Cause:
    """Return the failure that caused the others; `names` are those of all ranks.

    If all ranks failed with the same words, `role` is named; outside any role, the first rank.
    """
    rank = first_rank(failures)
    texts = {(each.kind, each.text) for each in failures.values()}
    where = names[rank]
    if len(names) > 1 and len(failures) == len(names) and len(texts) == 1:
        where = f"{role}, all {len(names)} ranks" if role else names[0]
    return Cause(failures[rank], where)


def set_environment(given: Mapping[str, str]) -> None:
    """Set the environment; the allocator reads it once, at the first use of a GPU."""
    os.environ.update(given)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        # Micro-batches differ in size, which would fragment segments of a fixed size.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


# --- calls of a rank, and their deadlines ---

_METHODS = {
    "start": "open_pairs initialize embedding_rows plan",
    "step": "train_step compute_log_probs await_log_probs forget release",
    "eval": "score",
    "save": "numbers write_state finish_writing read_state write_weights mix_weights save_model "
    "peak_memory",
}
PHASES = {method: phase for phase, methods in _METHODS.items() for method in methods.split()}
# Those whose first call compiles and fills caches.
FIRST = ("train_step", "compute_log_probs", "await_log_probs")
STEPS = (*FIRST, "score")


def phase_of(role: str, method: str) -> str:
    """Return the key of `timeouts` for a call. Log-probs of the policy belong to evaluations."""
    return "eval" if (role, method) == ("actor_train", "compute_log_probs") else PHASES[method]


class Limit(NamedTuple):
    seconds: float
    key: str  # of `timeouts`

    @staticmethod
    def longest(timeouts: Timeouts) -> Limit:
        """Return the longest limit of a call."""
        return max(Limit(getattr(timeouts, key), key) for key in ("first_step", *_METHODS))


# --- hangs ---

ANSWER = 3.0  # seconds in which a process that still runs describes what it does
LIBRARIES = (str(Path(os.__file__).parent), f"{os.sep}site-packages{os.sep}")
DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
# Files between a call of torch.distributed and its work.
DISPATCH = ("_ops.py", "c10d_logger.py", "_contextlib.py")


@dataclass(frozen=True)
class StackSnapshot:
    """What a process does right now; it may have come from another machine."""

    call: str
    seconds: float
    place: str  # the innermost line outside torch and the standard library
    collective: str | None  # the function of torch.distributed in which it waits for others
    stacks: str

    @property
    def where(self) -> str:
        return f"{self.collective} ({self.place})" if self.collective else self.place


Snapshots = Mapping[str, StackSnapshot | None]  # by rank; None: it did not answer


class Pulse:
    """The call in which this process is. One thread works, another may take snapshots."""

    def __init__(self) -> None:
        self.call, self.since, self.thread = "nothing", time.monotonic(), threading.get_ident()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        before = self.call, self.since, self.thread
        self.call, self.since, self.thread = call, time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self.call, self.since, self.thread = before

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def snapshot(self) -> StackSnapshot:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident())
        stacks = {ident: traceback.extract_stack(frame) for ident, frame in frames.items()}
        working = stacks.pop(self.thread, traceback.StackSummary())
        listing = [f"thread {names.get(self.thread)} (works):\n{''.join(working.format())}"]
        for ident, stack in stacks.items():
            listing.append(f"thread {names.get(ident, ident)}:\n{''.join(stack.format())}")
        # On CUDA the backward pass has threads of its own, so any thread may be the one that waits.
        waits = filter(None, map(_collective, (working, *stacks.values())))
        place = "no code of its own"
        for frame in working:
            if not any(library in frame.filename for library in LIBRARIES):
                place = f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"
        return StackSnapshot(self.call, self.seconds, place, next(waits, None), "\n".join(listing))


def _collective(stack: traceback.StackSummary) -> str | None:
    for frame in reversed(stack):
        if not frame.filename.endswith(DISPATCH):
            waits = DISTRIBUTED in frame.filename and "_checkpoint" not in frame.filename
            return frame.name if waits else None
    return None


def hang_error(late: Snapshots, others: Snapshots, limit: Limit, log_dir: Path) -> HangError:
    """Name the rank to blame among those that are late, and write the stacks of all to a file."""
    name, why = blame(late)
    text = f"{name}: no answer within {limit.seconds:.0f} s (timeouts.{limit.key}): {why}."
    parts = [text]
    for each, snapshot in {**late, **others}.items():
        does = f"{snapshot.call} for {snapshot.seconds:.0f} s" if snapshot else "no answer"
        parts.append(f"== {each}: {does}\n{snapshot.stacks if snapshot else ''}".rstrip())
    file = log_dir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    report = "\n\n".join(parts)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{report}\n", encoding="utf-8")
    except OSError as error:
        log.error("%s: %s; the stacks of all ranks:\n%s", file, error.strerror or error, report)
        return HangError(text)
    return HangError(f"{text} The stacks of all ranks are in {file}.")


def blame(ranks: Snapshots) -> tuple[str, str]:
    """Return the rank that holds the others up, and why.

    Blame an unresponsive rank; else a rank outside the collective the others wait in; else the rank
    at the rarest stack location.
    """
    where: dict[str, str] = {}
    waiting: Counter[str] = Counter()
    for name, snapshot in ranks.items():
        if snapshot is None:
            why = "its process does not answer at all: it is stopped, or stuck outside Python"
            return name, why
        where[name] = snapshot.where
        if snapshot.collective:
            waiting[snapshot.where] += 1
    apart = [name for name in where if where[name] not in waiting]
    if waiting and apart:
        usual = waiting.most_common(1)[0][0]
        return apart[0], f"it is in {where[apart[0]]}, and others wait for it in {usual}"
    count = Counter(where.values())
    usual = count.most_common(1)[0][0]  # among equally common ones, that of the first rank
    rarest = min(where, key=lambda name: (where[name] == usual, count[where[name]]))
    if where[rarest] != usual:
        return rarest, f"it is in {where[rarest]}, others in {usual}"
    everyone = "" if len(ranks) == 1 else f", and so are all {len(ranks)} ranks"
    return list(where)[-1], f"it is in {usual}{everyone}"
