"""Failure: why a call failed in one process, in words, and which of several failures is the cause."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from rather import errors
from rather.config.redaction import redact
from rather.errors import MemoryShortage, RatherError, WorkerError, WorkerLost

GRACE = 3.0  # seconds in which other ranks may still tell a cause, or that they failed alike
ECHOES = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "tcpstore",
)
SHORTAGES = ("out of memory", "can't allocate memory", "cannot allocate memory")
FIXES = {
    "actor_train": (
        "Lower actor_train.max_tokens_per_microbatch_in_train, set recompute_granularity: full in "
        "actor_train.strategy_args.strategy_config, or divide more: strategy_name zero3, or a larger tp_size."
    ),
    "reference": (
        "Lower reference.max_tokens_per_microbatch_in_infer or reference.infer_batch_size, or divide more: "
        "reference.strategy_args.strategy_name fsdp2_infer, or a larger tp_size."
    ),
}


@dataclass(frozen=True)
class Failure:
    """In words: classes of a worker may not exist in the driver."""

    kind: str  # name of the exception; of one of ours the nearest that rather.errors knows
    text: str
    trace: str
    at: float
    is_echo: bool = False  # another rank went away, and this one only noticed
    note: str = ""  # what the worker added: where memory goes

    @staticmethod
    def of(error: Exception) -> Failure:
        text = redact(str(error)) or type(error).__name__
        known = [
            base.__name__
            for base in type(error).__mro__
            if base.__module__ == RatherError.__module__
        ]
        kind = (known or [type(error).__name__])[0]
        echo = isinstance(error, RuntimeError) and any(word in text.lower() for word in ECHOES)
        trace = redact("".join(traceback.format_exception(error)))
        note = "".join(f"\n{each}" for each in getattr(error, "__notes__", ()))
        return Failure(kind, text, trace, time.time(), echo and not _is_shortage(kind, text), note)

    @property
    def is_ours(self) -> bool:
        """A sentence for the user; any other needs its trace."""
        return self.known is not None or _is_shortage(self.kind, self.text)

    @property
    def known(self) -> type[RatherError] | None:
        found = getattr(errors, self.kind, None)
        return found if isinstance(found, type) and issubclass(found, RatherError) else None

    def error(self, where: str, role: str) -> RatherError:
        """As a user is told it. An error of ours keeps its kind, and with it its exit code."""
        place = f"{where}: " if where else ""
        if self.known:
            return self.known(f"{place}{self.text}")
        if _is_shortage(self.kind, self.text):
            return MemoryShortage(f"{place}{self.text.splitlines()[0]} {self.note or FIXES[role]}")
        found = (
            WorkerLost if self.is_echo else WorkerError
        )  # a connection broke, and no process says why
        return found(f"{place}{self.kind}: {self.text}")


def first_cause(failures: Mapping[int, Failure]) -> int:
    """The rank whose failure the others follow from."""
    return min(failures, key=lambda rank: (failures[rank].is_echo, failures[rank].at))


def are_alike(failures: Mapping[int, Failure], ranks: int) -> bool:
    """Whether all of several ranks say the same: then it lies at none of them."""
    return (
        ranks > 1
        and len(failures) == ranks
        and len({(each.kind, each.text) for each in failures.values()}) == 1
    )


def _is_shortage(kind: str, text: str) -> bool:
    return kind == "MemoryError" or any(word in text.lower() for word in SHORTAGES)
