"""Faults on demand: a run broken at a named place, for tests and for people who want to see what happens then.

    RATHER_FAULT="step=7,phase=backward,role=actor_train,rank=1,kind=kill" rather train dpo.yaml

Several are separated by `;`. Each strikes once per run folder, told by a file in <run_dir>/.faults that is made before
it strikes: the run that goes on from there is not struck again.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from rather.errors import ConfigError

VARIABLE = "RATHER_FAULT"
MARKERS = ".faults"
ROLES = ("driver", "actor_train", "reference")
KINDS = {
    "kill": "SIGKILL to the process",
    "raise": "an exception that nobody expects",
    "hang": "the process stands still for ever",
    "slow": "it stands still for `seconds` (5 where not given)",
    "enospc": "the error of a full disk",
    "nan": "a number that is none, in phases forward (the loss) and backward (the gradient)",
}
PHASES = {
    "data": "before any row is read",
    "data.tokenised": "all rows are tokenised, their file is not yet in the cache",
    "data.rename": "before the tokenised file gets its name in the cache",
    "data.rename.done": "it has its name, its report is not yet beside it",
    "data.done": "file and report are in the cache",
    "reference": "before the reference computes log-probs",
    "reference.done": "its log-probs are known, nothing of them is written",
    "cache.own": "before log-probs are appended to the run's own file",
    "cache.own.done": "after it",
    "cache.shared": "before log-probs are appended to the cache that runs share",
    "cache.shared.done": "after it",
    "cache.sync": "before the run's own file is brought to the disk",
    "cache.sync.done": "after it",
    "forward": "before the forward pass of a micro-batch, of either model",
    "backward": "the loss of a micro-batch is known, its backward pass comes next",
    "backward.done": "the gradients of all micro-batches are added up",
    "all_reduce": "before ranks add up norms and metrics",
    "all_reduce.done": "after it",
    "optimizer": "before the weights change",
    "optimizer.done": "after it",
    "follow": "before the reference moves towards the policy (sync_ref_model)",
    "follow.done": "after it",
    "evaluate": "before an evaluation",
    "evaluate.reference": "the policy's log-probs of a chunk are known, the reference's are asked next",
    "evaluate.done": "after an evaluation, before its record is written",
    "metrics": "before a line is appended to metrics.jsonl",
    "metrics.done": "after it",
    "metrics.sync": "before metrics.jsonl is brought to the disk",
    "save": "before a checkpoint is begun",
    "save.clean": "before something that an interrupted save left is removed",
    "save.clean.aside": "before an older checkpoint, moved aside by an interrupted save, is put back or removed",
    "save.clean.done": "nothing of an interrupted save is left",
    "save.folder": "before its temporary folder is made",
    "save.write": "before a file of it is written",
    "save.write.sync": "the file is written, not yet brought to the disk",
    "save.write.done": "the file is on the disk",
    "save.note": "a rank has written its files, before it says so",
    "save.note.done": "after it",
    "save.sync": "all files are written, their folder is not yet brought to the disk",
    "save.aside": "before an older checkpoint of the same step is moved aside",
    "save.aside.done": "after it",
    "save.rename": "before the temporary folder becomes the checkpoint",
    "save.rename.done": "after it",
    "save.latest": "before LATEST is replaced",
    "save.latest.done": "after it",
    "save.aside.delete": "before what was moved aside is deleted",
    "save.prune": "before an old checkpoint is renamed to be deleted",
    "save.prune.delete": "it is renamed, not yet deleted",
    "save.prune.done": "it is deleted",
    "save.done": "the checkpoint is complete, old ones are deleted",
    "export": "before the model is exported",
    "export.written": "its files are written under a temporary name",
    "export.aside": "the model that was there before is moved aside",
    "export.rename.done": "the new one has its name",
    "export.done": "after the export",
    "finish": "before the run is marked as finished",
    "finish.done": "after it",
}
NAN_PHASES = ("forward", "backward")


class InjectedFault(RuntimeError):
    """What kind=raise raises."""


@dataclass
class Fault:
    """Where it strikes, and how. What is not given fits everywhere."""

    phase: str
    kind: str
    step: int | None = None
    role: str | None = None
    rank: int | None = None
    visit: int = 1  # the number of times that the place is reached in this process
    seconds: float = 5.0
    reached: int = 0

    def fits(self, phase: str, step: int, role: str, rank: int) -> bool:
        here = {"phase": phase, "step": step, "role": role, "rank": rank}
        return all(getattr(self, name) in (None, value) for name, value in here.items())

    @property
    def name(self) -> str:
        """That of its marker."""
        keys = ("step", "phase", "role", "rank", "visit", "kind")
        return ",".join(
            f"{key}={value}" for key in keys if (value := getattr(self, key)) is not None
        )


@dataclass(frozen=True)
class _Process:
    """What is armed here."""

    faults: tuple[Fault, ...]
    run_dir: Path
    role: str
    rank: int


class _Here(threading.local):
    """Of this thread: the role of the worker that is called, and the step that it works on."""

    role: str | None = None
    step: int | None = None


_armed: _Process | None = None
_here = _Here()
_main_step = 0


def arm(run_dir: Path, role: str, rank: int) -> None:
    """Reads RATHER_FAULT; `role` is that of points which no worker reaches. Without a fault every point is one `if`."""
    global _armed
    faults = parsed(os.environ.get(VARIABLE, ""))
    _armed = _Process(faults, Path(run_dir), role, rank) if faults else None


def at_step(number: int) -> None:
    """What this thread does from now on belongs to step `number`; threads without one follow the main thread."""
    global _main_step
    _here.step = number
    if threading.current_thread() is threading.main_thread():
        _main_step = number


def step() -> int:
    return _main_step if _here.step is None else _here.step


def point(phase: str) -> None:
    """A place at which a fault may strike."""
    if _armed:
        for fault in _due(_armed, phase, nan=False):
            _strike(fault)


def wants_nan(phase: str) -> bool:
    """Whether a number made here should be none."""
    return bool(_armed and _due(_armed, phase, nan=True))


Method = TypeVar("Method", bound=Callable[..., Any])


def by_role(method: Method) -> Method:
    """Points that a worker's method reaches belong to the worker's role, also where a process holds both."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _here.role = _here.role, self.role
        try:
            return method(self, *args, **kwargs)
        finally:
            _here.role = before

    return call  # type: ignore[return-value]


def parsed(text: str) -> tuple[Fault, ...]:
    """The faults of RATHER_FAULT."""
    return tuple(_fault(part.strip()) for part in text.split(";") if part.strip())


def _fault(text: str) -> Fault:
    words = dict(_word(part.strip()) for part in text.split(","))
    for key in ("phase", "kind"):
        if key not in words:
            raise ConfigError(
                f"{VARIABLE}: '{text}' names no {key}; add {key}=, such as phase=backward,kind=kill"
            )
    fault = Fault(**words)
    if fault.kind == "nan" and fault.phase not in NAN_PHASES:
        raise ConfigError(
            f"{VARIABLE}: kind=nan strikes in phase {' or '.join(NAN_PHASES)}, not in '{fault.phase}'"
        )
    if "seconds" in words and fault.kind != "slow":
        raise ConfigError(
            f"{VARIABLE}: seconds belongs to kind=slow; leave it out of kind={fault.kind}"
        )
    return fault


NUMBERS: Mapping[str, tuple[type[int] | type[float], int]] = {  # and the least that is allowed
    "step": (int, 0), "rank": (int, 0), "visit": (int, 1), "seconds": (float, 0),
}  # fmt: skip
CHOICES = {"phase": tuple(PHASES), "kind": tuple(KINDS), "role": ROLES}


def _word(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if key in NUMBERS:
        kind, least = NUMBERS[key]
        with suppress(ValueError):
            if (number := kind(value)) >= least:
                return key, number
        raise ConfigError(f"{VARIABLE}: {key} '{value}' is no number from {least} on")
    if key not in CHOICES:
        raise ConfigError(
            f"{VARIABLE}: '{text}' is unknown; it takes {', '.join([*NUMBERS, *CHOICES])}"
        )
    if value not in CHOICES[key]:
        raise ConfigError(
            f"{VARIABLE}: {key} '{value}' is unknown; there are {', '.join(CHOICES[key])}"
        )
    return key, value


def _due(process: _Process, phase: str, *, nan: bool) -> list[Fault]:
    """Those that strike here and now. Of several processes at the same place, one."""
    role = _here.role or process.role
    found = []
    for fault in process.faults:
        if (fault.kind == "nan") == nan and fault.fits(phase, step(), role, process.rank):
            fault.reached += 1
            if fault.reached == fault.visit and _is_first(process.run_dir / MARKERS / fault.name):
                found.append(fault)
    return found


def _is_first(marker: Path) -> bool:
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _strike(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "raise":
        raise InjectedFault(f"{VARIABLE}: {fault.name}")
    elif fault.kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    else:
        while True:
            time.sleep(3600)
