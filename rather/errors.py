"""Errors a user can meet. Each is a sentence with the fix in it, and each ends the command with
its own exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SPACE = ("no space left on device", "file too large (os error")  # by libraries in Rust
NO_MEMORY = (  # by torch, Arrow, the dynamic linker, and threads without room for a stack
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory",
    "bad_alloc", "failed to map segment", "can't start new thread",
)  # fmt: skip
# Bytes for PyTorch, its libraries and a tiny model. With less, OpenBLAS may call exit(1) at any
# time.
LEAST_ADDRESSES = 3 << 30
LIMITS = "see 'What Rather does not do' (docs/limits.md)"  # ends messages about missing features


def counted(number: int, unit: str) -> str:
    """Return '2 pairs' or '1 pair'; `unit` is a plural."""
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"


class RatherError(Exception):
    """The base of everything Rather raises on purpose; any other exception is a bug."""

    exit_code = 1


class ConfigError(RatherError):
    """The config or the command line cannot be used; every problem of a config is listed."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(RatherError):
    """The data cannot be used: a missing file, too many bad rows, or only pairs of weight 0."""

    exit_code = 3


class CheckpointError(RatherError):
    """A checkpoint is damaged or belongs to another run."""

    exit_code = 4


class WorkerError(RatherError):
    """Workers failed more often than `max_failures` allows; the first cause is named.

    The message has role, rank and machine.
    """

    exit_code = 5


class WorkerLost(WorkerError):
    """A process or the connection to it went away: another one may do the same work."""


class RayGone(WorkerError):
    """Ray's own server does not answer any more."""


class ServerError(WorkerError):
    """A server for answers or verdicts refused a request, or did not answer any of several."""


class ServerSilent(ServerError):
    """A server cannot be reached, or did not answer in time."""


class NonFiniteError(RatherError):
    """Loss or gradient became NaN or Inf, or every step was skipped; the weights are unchanged."""

    exit_code = 6


class MemoryShortage(RatherError):
    """Out of memory; during training the message lists what uses it and three ways to need less."""

    exit_code = 8


class BatchTooLarge(MemoryShortage):
    """A micro-batch of a role's only rank did not fit; the call can be repeated with less."""


class HangError(RatherError):
    """A call to the workers missed its deadline; the rank that blocked the others is named."""

    exit_code = 7


class DiskError(RatherError):
    """The disk is full, a path is not writable, or the last upload to an object store failed."""

    exit_code = 9


def user_error(error: BaseException) -> RatherError | None:
    """Return what the system refused, as an error with an exit code; None for a bug in Rather.

    A full disk and a lack of memory have many names, and libraries raise their own errors because
    of them. Other refused paths are those that a user named; a file that Rather misses is a bug.
    """
    for cause in _causes(error):
        number = getattr(cause, "errno", None)
        text = str(cause).strip().partition("\n")[0]
        if number in FULL_DISK or any(words in text.lower() for words in NO_SPACE):
            place = getattr(cause, "filename", None)
            reason = getattr(cause, "strerror", None) or text
            return DiskError(
                f"{f'{place}: ' if place else ''}{reason}. Free some disk space, or raise the limit "
                "on the size of files (ulimit -f), and run the same command again."
            )
        is_memory = isinstance(cause, MemoryError) or number == errno.ENOMEM
        if is_memory or any(words in text.lower() for words in NO_MEMORY):
            return MemoryShortage(
                f"out of memory ({text or type(cause).__name__}). Free some, raise the limit of "
                "this process (ulimit -v), or use a machine with more."
            )
    if not isinstance(error, OSError) or error.filename is None:
        return None
    if error.errno not in (errno.ENOENT, errno.EEXIST):
        return DiskError(f"{error.filename}: {error.strerror}.")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those while or because of which it was raised."""
    while error is not None:
        yield error
        is_hidden = error.__suppress_context__  # raise ... from None
        error = error.__cause__ or (None if is_hidden else error.__context__)


def check_address_space() -> None:
    """Refuse a limit (ulimit -v) within which libraries end the process without a message."""
    if sys.platform != "linux":
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < LEAST_ADDRESSES:
        raise MemoryShortage(
            f"the limit on the address space of this process (ulimit -v) is {limit >> 20} MiB, and "
            f"PyTorch needs up to {LEAST_ADDRESSES >> 20} MiB to load; raise the limit."
        )


class Ended(BaseException):
    """A signal came before there was anything to save. Not an Exception: handlers ignore it."""

    def __init__(self, signal: int, text: str) -> None:
        self.exit_code = 128 + signal
        super().__init__(text)
