"""Faults attached from outside: Rather's functions, and the file operations they make, are wrapped and break on demand.

    attach("step=7,phase=backward,role=actor_train,rank=1,kind=kill", run_dir)

Several faults are separated by `;`. Each strikes once per run folder: a file in <run_dir>/.faults is made before it
strikes, so that the resumed run is not struck again. Workers on Ray get the same faults through `--import`.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from rather.config import plugins

ROOT = Path(__file__).parents[2]
MARKERS = ".faults"
ROLES = ("driver", "actor_train", "reference")
KINDS = ("kill", "raise", "hang", "slow", "enospc", "nan")
PHASES = {
    "data": "before any row is read",
    "data.tokenised": "all rows are tokenised, their file is not yet in the cache",
    "data.rename": "before the tokenised file gets its name in the cache",
    "data.rename.done": "it has its name, its report is not yet next to it",
    "data.done": "file and report are in the cache",
    "reference": "before the reference computes log-probs",
    "reference.done": "its log-probs are known, none of them are written",
    "cache.own": "before log-probs are appended to the run's own file",
    "cache.own.done": "after that",
    "cache.shared": "before log-probs are appended to the cache that runs share",
    "cache.shared.done": "after that",
    "cache.sync": "before the run's own file is synced to the disk",
    "cache.sync.done": "after that",
    "forward": "before the forward pass of a micro-batch, of either model",
    "backward": "the loss of a micro-batch is known, its backward pass comes next",
    "backward.done": "the gradients of all micro-batches are summed up",
    "all_reduce": "before ranks sum up norms and metrics",
    "all_reduce.done": "after that",
    "optimizer": "before the weights change",
    "optimizer.done": "after that",
    "follow": "before the reference moves towards the policy (sync_ref_model)",
    "follow.done": "after that",
    "evaluate": "before an evaluation",
    "evaluate.reference": "the policy's log-probs of a chunk are known, the reference's are next",
    "evaluate.done": "after an evaluation, before its record is written",
    "metrics": "before a line is appended to metrics.jsonl",
    "metrics.done": "after that",
    "metrics.sync": "before metrics.jsonl is synced to the disk",
    "save": "before a checkpoint is begun",
    "save.clean": "before something that an interrupted save left is removed",
    "save.clean.aside": "before a checkpoint that an interrupted save moved aside is restored",
    "save.clean.done": "nothing of an interrupted save is left",
    "save.folder": "before its temporary folder is made",
    "save.write": "before one of its files is written",
    "save.write.sync": "the file is written, not yet synced to the disk",
    "save.write.done": "the file is on the disk",
    "save.note": "a rank has written its files, before it reports that",
    "save.note.done": "after that",
    "save.sync": "all files are written, their folder is not yet synced to the disk",
    "save.aside": "before an older checkpoint of the same step is moved aside",
    "save.aside.done": "after that",
    "save.rename": "before the temporary folder becomes the checkpoint",
    "save.rename.done": "after that",
    "save.latest": "before LATEST is replaced",
    "save.latest.done": "after that",
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
    "finish.done": "after that",
}


class InjectedFault(RuntimeError):
    """Raised by kind=raise."""


@dataclass
class Fault:
    """Where a fault strikes, and how. A word that is not given matches everything."""

    phase: str
    kind: str
    step: int | None = None
    role: str | None = None
    rank: int | None = None
    visit: int = 1  # strikes when the place is reached for this time in a process
    seconds: float = 5.0
    reached: int = 0

    def __post_init__(self) -> None:
        assert self.phase in PHASES, self.phase
        assert self.kind in KINDS, self.kind
        assert self.role in (None, *ROLES), self.role
        assert self.kind != "nan" or self.phase in ("forward", "backward")

    def matches(self, phase: str) -> bool:
        here = {"phase": phase, "step": step(), "role": _here.role, "rank": _here.rank}
        return all(getattr(self, name) in (None, value) for name, value in here.items())

    @property
    def name(self) -> str:
        """The name of its marker."""
        keys = ("step", "phase", "role", "rank", "visit", "kind")
        words = {key: getattr(self, key) for key in keys}
        return ",".join(f"{key}={word}" for key, word in words.items() if word is not None)


def parse(text: str) -> list[Fault]:
    faults = []
    for part in filter(None, map(str.strip, text.split(";"))):
        words: dict[str, Any] = dict(word.strip().split("=") for word in part.split(","))
        numbers = {key: int(words[key]) for key in ("step", "rank", "visit") if key in words}
        seconds = {key: float(words[key]) for key in ("seconds",) if key in words}
        faults.append(Fault(**{**words, **numbers, **seconds}))
    return faults


class _Here(threading.local):
    """What this thread works for, and the functions of interest that it is in."""

    def __init__(self) -> None:
        self.role, self.rank = "driver", int(os.environ.get("RANK", "0"))
        self.step: int | None = None
        self.inside: list[str] = []


_here = _Here()
_main_step = 0
_faults: list[Fault] = []
_text = ""
_markers: Path | None = None
_run_markers: list[Path] = []  # that pipelines have chosen
_undo: list[Callable[[], None]] = []


def arm(text: str, markers: Path | None = None) -> None:
    """Attach faults to this process.

    Without a folder for `markers`, each pipeline that is built uses its own run folder.
    """
    global _text, _markers
    _faults[:], _text, _markers = parse(text), text, markers
    _here.__init__()  # type: ignore[misc]  # RANK may have changed since the import
    if _undo:
        return
    _wrap_everything()


def _begin_run(_pipeline: Any, config: Any) -> None:
    global _markers
    if _markers is None or _markers in _run_markers:
        _markers = config.run_dir / MARKERS
        _run_markers.append(_markers)
        _faults[:] = parse(_text)


def detach() -> None:
    """Remove all faults and wrappers from this process."""
    _faults.clear()
    _run_markers.clear()
    while _undo:
        _undo.pop()()
    at_step(0)


def attach(text: str, run_dir: Path, *, ray: bool = False) -> None:
    """Attach faults to this process and, with `ray`, to the workers that it starts there."""
    arm(text, run_dir / MARKERS)
    if ray:
        file = plugin(text, run_dir)
        plugins.load([file])
        _undo.append(lambda: _forget_plugin(f"rather_import_{file.stem}"))


def plugin(text: str, run_dir: Path) -> Path:
    """Write a file for `rather train --import` that attaches the faults."""
    name = f"faults_{hashlib.sha256(f'{text} {run_dir}'.encode()).hexdigest()[:12]}"
    file = run_dir.parent / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from rather.losses.losses import loss
from tests.faults import inject
@loss()
def {name}(x):
    '''An imported file must register something.'''
    return x.policy.sum(1)
inject.arm({text!r}, Path({str(run_dir / MARKERS)!r}))
""",
        encoding="utf-8",
    )
    return file


def _forget_plugin(module: str) -> None:
    plugins._loaded[:] = [file for file in plugins._loaded if file.name != module]
    for registry in plugins.REGISTRIES:
        for name in registry.names_from(module):
            registry._entries.pop(name)
            registry._modules.pop(name)


def at_step(number: int) -> None:
    """What this thread does from now on belongs to a step; other threads follow the main thread."""
    global _main_step
    _here.step = number
    if threading.current_thread() is threading.main_thread():
        _main_step = number


def step() -> int:
    return _main_step if _here.step is None else _here.step


def point(phase: str) -> None:
    """A place at which a fault may strike."""
    for fault in _due(phase, nan=False):
        if fault.kind == "kill":
            _await_hangs_before(fault)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "raise":
            raise InjectedFault(fault.name)
        elif fault.kind == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif fault.kind == "slow":
            threading.Event().wait(fault.seconds)
        else:
            stand_still()


def _await_hangs_before(kill: Fault) -> None:
    """Wait for the threads that hang by faults before this one, as a busy machine may be late."""
    assert _markers is not None
    for fault in _faults[: _faults.index(kill)]:
        while fault.kind == "hang" and not (_markers / fault.name).exists():
            threading.Event().wait(0.01)


def stand_still() -> None:
    threading.Event().wait()


def wants_nan(phase: str) -> bool:
    return bool(_due(phase, nan=True))


def _due(phase: str, *, nan: bool) -> list[Fault]:
    """Return the faults that strike here and now. Of several processes at the same place, one is struck."""
    found = []
    for fault in _faults:
        if (fault.kind == "nan") == nan and fault.matches(phase):
            assert _markers is not None
            fault.reached += 1
            if fault.reached == fault.visit and _is_first(_markers / fault.name):
                found.append(fault)
    return found


def _is_first(marker: Path) -> bool:
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


# --- wrapping ---

Hook = Callable[..., Any]


def _wrap(owner: Any, name: str, before: Hook | str = "", after: Hook | str = "") -> None:
    """Wrap a method of a class, or a function of a module and its copies in other modules of Rather.

    `before` and `after` are phases, or are called with the arguments.
    """
    original = vars(owner)[name]

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _do(before, args)
        _here.inside.append(name)
        try:
            result = original(*args, **kwargs)
        finally:
            _here.inside.pop()
        _do(after, args)
        return result

    _replace(owner, name, wrapped)


def _do(hook: Hook | str, args: tuple[Any, ...]) -> None:
    phase = hook(*args) if callable(hook) else hook
    if phase:
        point(phase)


def _replace(owner: Any, name: str, value: Any) -> None:
    original = vars(owner)[name]
    places = [(owner, name)]
    if not isinstance(owner, type):
        modules = [each for key, each in sys.modules.items() if key.startswith("rather")]
        places += [
            (module, bound)
            for module in modules
            for bound, found in list(vars(module).items())
            if found is original
        ]
    for place, bound in places:
        setattr(place, bound, value)
        _undo.append(lambda place=place, bound=bound: setattr(place, bound, original))  # type: ignore[misc]


CALLS = (  # of a role
    "initialize", "train_step", "compute_log_probs", "answer", "mix_weights", "write_state",
    "write_weights", "save_model",
)  # fmt: skip


def _wrap_everything() -> None:
    _wrap_loop()
    _wrap_training()
    _wrap_files()
    _wrap_threads()


def _wrap_loop() -> None:
    from rather.checkpoint import checkpoint
    from rather.cluster.launch import Roles
    from rather.data import prepare
    from rather.data.report import RowCounts
    from rather.pipeline.evaluation import Evaluation
    from rather.pipeline.guard import OutOfMemoryRetry
    from rather.pipeline.hooks import SaveCheckpoints
    from rather.pipeline.loop import TrainingLoop
    from rather.pipeline.pipeline import DPOPipeline
    from rather.pipeline.reference_stream import ReferenceStream
    from rather.pipeline.saving import Saving
    from rather.reference.logprob_cache import BlockFile
    from rather.run_folder import layout
    from rather.tracking.json_lines import AppendedFile

    _wrap(DPOPipeline, "__init__", _begin_run)
    _wrap(TrainingLoop, "_train_to_the_end", lambda self: at_step(self.parts.state.progress.step))
    _wrap(TrainingLoop, "train_step", lambda self, step: at_step(step.number))
    _wrap(ReferenceStream, "_answer", lambda self, step: at_step(step.number))
    _wrap(prepare, "prepare", "data")
    _wrap(RowCounts, "to_json", "data.tokenised")
    _wrap(ReferenceStream, "_ask_model", "reference", "reference.done")
    _wrap(
        BlockFile, "append", lambda self, *_: _cache(self), lambda self, *_: f"{_cache(self)}.done"
    )
    _wrap(BlockFile, "sync", "cache.sync", "cache.sync.done")
    _wrap(Roles, "move_reference", "follow", "follow.done")
    _wrap(Evaluation, "record", "evaluate", "evaluate.done")
    _wrap(OutOfMemoryRetry, "run", after=_evaluates)
    _wrap(AppendedFile, "position")
    _wrap(SaveCheckpoints, "save", "save")
    _wrap(Saving, "_publish", after="save.done")
    _wrap(checkpoint, "clean", after="save.clean.done")
    _wrap(DPOPipeline, "_export_model", "export", "export.done")
    _wrap(layout, "mark_finished", "finish", "finish.done")


def _cache(file: Any) -> str:
    from rather.run_folder.names import REFERENCE_LOG

    return "cache.own" if file.path.name == REFERENCE_LOG else "cache.shared"


def _evaluates(_retry: Any, use: str, *_: Any) -> str:
    return "evaluate.reference" if use == "actor_train" else ""


def _wrap_training() -> None:
    from rather.cluster.worker import ActorWorker
    from rather.model import policy
    from rather.optim.optimizer import Optimizer
    from rather.train.rank_trainer import RankTrainer

    for name in CALLS:
        _replace(ActorWorker, name, _in_its_role(vars(ActorWorker)[name]))
    _wrap(policy, "pair_columns", "forward")
    _wrap(RankTrainer, "_watch_gradient", _before_backward)
    _wrap(RankTrainer, "train_step")
    _replace(RankTrainer, "_score", _with_nan_losses(vars(RankTrainer)["_score"]))
    _wrap(RankTrainer, "_complete_gradients", "backward.done")
    _wrap(RankTrainer, "_reduce_numbers", "all_reduce", "all_reduce.done")
    _wrap(Optimizer, "step", "optimizer", "optimizer.done")


def _in_its_role(method: Callable[..., Any]) -> Callable[..., Any]:
    """What a worker's method does belongs to the worker's role, also if a process has both roles."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _here.role, _here.rank, _here.step
        _here.role, _here.rank = self.role, self.member.rank
        if self.role == "reference" and method.__name__ == "compute_log_probs":
            number = getattr(args[0], "number", None)
            if number is not None:  # its own process knows steps only by the questions
                at_step(number)
        try:
            return method(self, *args, **kwargs)
        finally:
            _here.role, _here.rank, _here.step = before

    return call


def _before_backward(_trainer: Any, sums: Any, *_: Any) -> str:
    if wants_nan("backward"):
        sums.register_hook(lambda gradient: gradient * math.nan)
    return "backward"


def _with_nan_losses(score: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(score)
    def call(*args: Any) -> Any:
        scored = score(*args)
        if "train_step" in _here.inside and wants_nan("forward"):
            scored = replace(scored, losses=scored.losses * math.nan)
        return scored

    return call


def _wrap_files() -> None:
    _wrap(os, "rename", _before_rename, _after_rename)
    _wrap(os, "replace", _before_rename, _after_rename)
    _wrap(os, "fsync", _before_fsync, _after_fsync)
    _wrap(
        os,
        "write",
        lambda fd, *_: _of_metrics(fd, "metrics"),
        lambda fd, *_: _of_metrics(fd, "metrics.done"),
    )
    _wrap(os, "mkdir", lambda path, *_: "save.folder" if _is_draft(path) else "")
    _wrap(shutil, "rmtree", _before_rmtree, _after_rmtree)
    _wrap(
        builtins,
        "open",
        lambda path, mode="r", *_: "save.write" if mode == "xb" and _in_draft(path) else "",
    )


MODELS = ("model", "best_model")


def _before_rename(source: Any, target: Any) -> str:
    old, new = Path(source).name, Path(target).name
    if new.endswith(".note"):
        return "save.note"
    if new == "LATEST":
        return "save.latest"
    if new.endswith(".arrow"):
        return "data.rename"
    if new in MODELS and old.startswith("."):
        return "export.written"
    if old.startswith("checkpoint-"):
        return "save.aside" if new.startswith(".old-checkpoint-") else "save.prune"
    if new.startswith("checkpoint-"):
        return "save.rename" if old.startswith(".tmp-checkpoint-") else "save.clean.aside"
    return ""


def _after_rename(source: Any, target: Any) -> str:
    phase, new = _before_rename(source, target), Path(target)
    if new.suffix == ".json" and new.with_suffix(".arrow").exists():
        return "data.done"
    if new.name.removeprefix(".old-") in MODELS and new.name.startswith("."):
        return "export.aside"
    after = {
        "export.written": "export.rename.done",
        "save.prune": "save.prune.delete",
        "save.clean.aside": "",
    }
    return after.get(phase, f"{phase}.done" if phase else "")


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _is_draft(path: Any) -> bool:
    return Path(path).name.startswith(".tmp-checkpoint-")


def _in_draft(path: Any) -> bool:
    return not isinstance(path, int) and (_is_draft(path) or _is_draft(Path(path).parent))


def _before_fsync(descriptor: int) -> str:
    path = _path_of(descriptor)
    if path.name == "metrics.jsonl":
        return "metrics.sync" if "position" in _here.inside else ""
    if not _in_draft(path):
        return ""
    return "save.sync" if path.is_dir() else "save.write.sync"


def _after_fsync(descriptor: int) -> str:
    return "save.write.done" if _before_fsync(descriptor) == "save.write.sync" else ""


def _of_metrics(descriptor: int, phase: str) -> str:
    return phase if descriptor > 2 and _path_of(descriptor).name == "metrics.jsonl" else ""


def _before_rmtree(path: Any, *_: Any) -> str:
    name = Path(path).name
    cleans = "clean" in _here.inside
    if name.startswith(".old-checkpoint-"):
        return "save.clean.aside" if cleans else "save.aside.delete"
    return "save.clean" if cleans and name.startswith(".tmp-checkpoint-") else ""


def _after_rmtree(path: Any, *_: Any) -> str:
    doomed = Path(path).name.startswith(".tmp-checkpoint-doomed-")
    return "save.prune.done" if doomed and "clean" not in _here.inside else ""


def _wrap_threads() -> None:
    """Threads work for the step and the role of whoever started them."""
    start = threading.Thread.start

    @wraps(start)
    def started(self: threading.Thread) -> None:
        given, run = (_here.role, _here.rank, step()), self.run

        def work() -> None:
            _here.role, _here.rank, _here.step = given
            run()

        self.run = work  # type: ignore[method-assign]
        start(self)

    _replace(threading.Thread, "start", started)


@contextmanager
def attached(text: str, run_dir: Path, *, ray: bool = False, rank: int = 0) -> Iterator[None]:
    """Attach faults for a while."""
    attach(text, run_dir, ray=ray)
    _here.rank = rank
    try:
        yield
    finally:
        detach()
