"""Where the run is killed: for every phase one fault that strikes, in words of tests/faults/inject.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.faults.inject import PHASES

EVERY, AT_SAVES = range(1, 7), (2, 4, 6)
STEPS: dict[str, Sequence[int]] = {  # in which a place, and those below it, are reached; where nothing is said, in all
    "save.clean": (), "save": AT_SAVES, "cache.sync": AT_SAVES, "metrics.sync": AT_SAVES, "follow": AT_SAVES,
    "evaluate": (0, 3, 6), "data": (), "export": (), "finish": (),
}  # fmt: skip
BEFORE = {  # what must have been killed before: a checkpoint, a model, that is there already
    "save.clean": "save.sync",
    "save.clean.aside": "save.aside.done",
    "save.aside": "save.rename.done",
    "save.aside.done": "save.rename.done",
    "export.aside": "export.done",
}
FILES = 6  # of a checkpoint of one process, with LATEST: model, optimizer, rng, state, manifest
COLD: dict[str, Any] = {"actor_train__data_args__cache_dir": None}
FOLLOWING: dict[str, Any] = {
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.5,
}


def steps_of(phase: str) -> Sequence[int]:
    """Empty where a place belongs to no step."""
    return next(
        (STEPS[name] for name in STEPS if phase == name or phase.startswith(f"{name}.")), EVERY
    )


def kill(phase: str, **words: Any) -> str:
    """A fault of this phase, after those that it needs."""
    steps = steps_of(phase)
    fault = {
        "step": steps[len(steps) // 2] if steps else None,
        "phase": phase,
        **words,
        "kind": "kill",
    }
    own = ",".join(f"{key}={value}" for key, value in fault.items() if value is not None)
    return f"{kill(BEFORE[phase], **words)};{own}" if phase in BEFORE else own


def changes_for(fault: str) -> dict[str, Any]:
    """Of the run: a reference that moves, pairs that are not tokenised yet."""
    if "phase=follow" in fault:
        return FOLLOWING
    return COLD if "phase=data" in fault else {}


ONE = [kill(phase) for phase in PHASES]
ONE += [
    kill(f"save.write{end}", visit=visit) for visit in range(2, FILES + 1) for end in ("", ".sync")
]
ONE += [kill("forward", role="reference"), kill("forward", visit=3), kill("backward", visit=2)]
ONE += [kill("evaluate", step=0), kill("metrics.done", step=6), kill("save.prune.delete", step=6)]

# One place of each family of phases; make test-faults has the others.
FAMILIES = (
    kill("data.rename"), kill("optimizer.done"), kill("cache.own.done"), kill("follow.done"),
    kill("save.clean.aside"), kill("save.aside.done"), kill("finish"),
)  # fmt: skip
# A kill while the save of two steps ago is still written: it costs this save only.
DURING_A_SAVE = "step=2,phase=save.note,kind=hang;step=4,phase=backward,kind=kill"
MORE_FAMILIES = (
    DURING_A_SAVE,
    kill("forward", visit=3), kill("evaluate.reference"), kill("metrics.done"),
    kill("save.write.sync", visit=3), kill("save.rename"), kill("save.prune.delete"), kill("export.written"),
)  # fmt: skip
OF_EVERY_RANK = (
    "forward", "backward", "backward.done", "all_reduce", "all_reduce.done", "optimizer", "optimizer.done",
    "reference", "reference.done", "follow", "follow.done", "evaluate", "evaluate.reference", "evaluate.done",
    "save", "save.write", "save.write.sync", "save.write.done", "save.note", "save.note.done", "export", "export.done",
)  # fmt: skip
TWO_RANKS = [kill("backward", rank=1), kill("follow.done", rank=1)]
MORE_TWO_RANKS = [
    kill("optimizer.done", rank=1),
    kill("save.write.sync", rank=1),
    kill("save.rename.done", rank=0),
    kill("save.write.done", step=6, rank=1),  # with nothing after it that would notice
]

RAY = [
    kill("data.tokenised", role="driver"),
    kill("forward", step=1, role="reference"),
    kill("save.write", step=2, role="actor_train"),
    kill("optimizer.done", step=4, role="actor_train"),
    kill("save.rename.done", step=4, role="driver"),
    kill("evaluate.reference", step=6, role="driver"),
    kill("export.written", role="actor_train"),
]
