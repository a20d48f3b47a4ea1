"""Errors a user can meet. Each is a sentence with the fix in it, and each ends the command with
its own exit code."""

from __future__ import annotations

from collections.abc import Sequence

LIMITS = "see 'What Rather does not do' (docs/limits.md)"  # ends messages about missing features


class RatherError(Exception):
    """The base of everything Rather raises on purpose; any other exception is a bug."""

    exit_code = 1


class ConfigError(RatherError):
    """The configuration cannot be used. Holds every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(RatherError):
    """The pairs cannot be used: files missing, too many bad rows, a template that fails."""

    exit_code = 3


class CheckpointError(RatherError):
    """A checkpoint is damaged or does not belong to this run."""

    exit_code = 4


class WorkerError(RatherError):
    """A worker failed, died or did not answer; names role, rank, machine and the first cause."""

    exit_code = 5


class WorkerLost(WorkerError):
    """A process or the connection to it went away: another one may do the same work."""


class RayGone(WorkerError):
    """Ray's own server does not answer any more."""


class NonFiniteError(RatherError):
    """The loss or the gradient stopped being a number."""

    exit_code = 6


class MemoryShortage(RatherError):
    """A device has too little memory; the message lists its use and what needs less."""

    exit_code = 8


class BatchTooLarge(MemoryShortage):
    """A micro-batch of a role's only rank did not fit; the call can be repeated with less."""


class HangError(RatherError):
    """A worker did not answer before the deadline; the message names the rank to blame."""

    exit_code = 7


class DiskError(RatherError):
    """The disk is full, or a path is not writable."""

    exit_code = 9


class Ended(BaseException):
    """A signal came before there was anything to save. Not an Exception: handlers ignore it."""

    def __init__(self, signal: int, text: str) -> None:
        self.exit_code = 128 + signal
        super().__init__(text)
