"""Every call of a rank ends by the deadline of its phase: on Ray, under torchrun, in one
process."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rather.cluster import health, launch
from rather.cluster.bridge import ReferenceApart
from rather.cluster.cluster import Cluster
from rather.cluster.supervision import Watchdog
from rather.cluster.worker import ActorWorker
from rather.commands.terminal import guarded
from rather.config.run_config import DPOConfig
from rather.config.schema import Timeouts
from rather.data.pack import pack
from rather.errors import DataError, HangError
from rather.pipeline import pipeline
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.test_hang import alone
from tests.faults import inject
from tests.padded import random_pairs
from tests.tiny import fork_context, make_config

DEADLINE = 2.0  # seconds
ROLES = ("actor_train", "reference")
NOWHERE = Path("nowhere")
BATCHES = pack(random_pairs(2, 60), budget=10**6)

# Call of a role -> key of `timeouts`, and the call itself. Reference log-probs belong to steps, the
# policy's to sets.
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "open_pairs": ("start", lambda role: role.open_pairs(None)),
    "initialize": ("start", lambda role: role.initialize(1)),
    "embedding_rows": ("start", lambda role: role.embedding_rows()),
    "plan": ("start", lambda role: role.plan(9)),
    "train_step": ("step", lambda role: role.train_step(BATCHES, None)),
    "compute_log_probs": ("eval or step", lambda role: role.compute_log_probs(BATCHES)),
    "score": ("eval", lambda role: role.score(None, {}, None)),
    "forget": ("step", lambda role: role.forget()),
    "write_state": ("save", lambda role: role.write_state(NOWHERE)),
    "finish_writing": ("save", lambda role: role.finish_writing()),
    "read_state": ("save", lambda role: role.read_state(NOWHERE, {})),
    "write_weights": ("save", lambda role: role.write_weights(NOWHERE, "model")),
    "mix_weights": ("save", lambda role: role.mix_weights(NOWHERE, 0.5)),
    "save_model": ("save", lambda role: role.save_model(NOWHERE, None, "")),
    "peak_memory": ("save", lambda role: role.peak_memory()),
    "numbers": ("save", lambda role: role.numbers()),
}


# What a rank does without the others, or under the deadline of another call.
ALONE = {
    "build_loss",
    "set_environment",
    "pack",
    "park",
    "release",
    "folder_problem",
    "memory_need",
    "explain_memory",
}
ALONE |= {"answer", "compare_file", "build_policy", "build_optimizer", "build_runner"}
# Of a reference apart: what does not wait for it. `await_log_probs` has the deadlines of a step.
AHEAD = {"ask_log_probs", "await_log_probs", "drop_questions", "take_seconds", "close"}


def expected(role: str, call: str) -> tuple[str, str]:
    """Of the first such call in a process, and of those after it."""
    key = CALLS[call][0]
    if key == "eval or step":
        key = "eval" if role == "actor_train" else "step"
    computes = call in ("train_step", "compute_log_probs")
    return ("first_step" if computes else key), key


def calls_of(cls: type) -> set[str]:
    return {
        name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    return make_config(tmp_path_factory.mktemp("deadlines"))


# --- which ---


def test_each_call_of_a_script_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch, config: DPOConfig
) -> None:
    """It is the longest of the config, in `_collect`: a script may call what it likes."""
    timeouts = Timeouts(start=1.0, first_step=1.0, step=1.0, eval=1.0, save=2.0)
    assert health.Limit.longest(timeouts) == (2.0, "save")
    calls = {"initialize", "train_step", "compute_log_probs"}
    assert calls_of(Cluster) == calls
    # An import before its token is set would spoil it for others.
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=lambda value: value))
    handle = SimpleNamespace(
        add=SimpleNamespace(remote=lambda *_: "add"),
        call=SimpleNamespace(remote=lambda role, method, *_: method),
    )
    seats = [SimpleNamespace(handle=handle, node="")]
    manager: Any = SimpleNamespace(
        named={}, kind="cpu", seats=lambda *_: seats, introduce=lambda _: None
    )
    cluster = Cluster("actor_train", None, manager, config.actor_train, pipeline_config=config)
    waited: list[str] = []
    monkeypatch.setattr(cluster, "_collect", waited.extend)
    for name in calls:
        CALLS[name][1](cluster)
    assert sorted(waited) == ["add", *sorted(calls)]


class Telling:
    """In the place of a role: each call tells the deadline under which it is."""

    def __init__(self, role: str, watchdog: Watchdog) -> None:
        self.role = role
        for name in calls_of(ActorWorker):
            setattr(self, name, lambda *_: watchdog.limit.key if watchdog.limit else None)


@pytest.mark.parametrize("role", ROLES)
def test_in_a_rank_each_call_ends_by_the_deadline_of_its_phase(
    config: DPOConfig, role: str
) -> None:
    assert calls_of(ActorWorker) == {*CALLS, *ALONE}
    assert calls_of(ReferenceApart) <= {*CALLS, *ALONE, *AHEAD}
    watchdog = Watchdog(config.timeouts, config.log_dir, 2, None)
    telling = Telling(role, watchdog)
    watchdog.watch(telling, health.PHASES)
    for name in CALLS:
        call = CALLS[name][1]
        assert (call(telling), call(telling)) == expected(role, name), name
    assert watchdog.limit is None


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_for_tokens_under_a_deadline_of_its_own(
    monkeypatch: pytest.MonkeyPatch, config: DPOConfig, rank: int
) -> None:
    watchdog = Watchdog(config.timeouts, config.log_dir, 2, None)
    seen: list[str | None] = []

    def note(*_: Any) -> Any:
        seen.append(watchdog.limit and watchdog.limit.key)
        return SimpleNamespace(train=[])

    monkeypatch.setattr(launch, "broadcast", note)
    for name in ("prepare", "refuse_other_bases"):
        monkeypatch.setattr(pipeline, name, note)
    run: Any = pipeline.DPOPipeline.__new__(pipeline.DPOPipeline)
    nobody: Any = None
    run.roles = launch.Roles(nobody, None, "cpu", rank=rank, drivers=2, watchdog=watchdog)
    run.config = config
    with pytest.raises(DataError, match="0 pairs to train on"):
        run._prepare()
    assert seen == [None] * (rank == 0) + ["prepare", "prepare"]


# --- what happens ---

PHASE = {  # -> what stands still, and the key of its deadline
    "first step": ("step=1,phase=backward,role=actor_train", "first_step"),
    "evaluation": (
        "step=2,phase=forward,role=actor_train,visit=2",
        "eval",
    ),  # the first visit is the step itself
    "reference": ("step=2,phase=forward,role=reference", "step"),
    "save": ("phase=save.write,role=actor_train", "save"),
}


def struck(folder: Path, phase: str, **changes: Any) -> tuple[DPOConfig, str]:
    """A run in which one phase stands still and has a short deadline, and the fault for it."""
    fault, key = PHASE[phase]
    config = make_config(
        folder,
        exp_name=phase.replace(" ", "-"),
        max_steps=2,
        eval_steps=2,
        save_steps=2,
        max_failures=0,
        checkpoint_config={"async_save": "off"},
        reference__cache={"enabled": False},
        timeouts={key: DEADLINE},
        **changes,
    )
    return config, f"{fault},kind=hang"


def with_a_fault(config: DPOConfig, fault: str, stderr: Path) -> int:
    inject.attach(fault, config.run_dir)
    return alone(config, stderr)


@pytest.mark.wide
def test_in_one_process_the_deadline_is_that_of_the_phase(tmp_path: Path) -> None:
    """At the same time, for they only wait."""
    context = fork_context()
    children = {}
    for phase in ("first step", "evaluation", "reference"):
        args = (*struck(tmp_path, phase), tmp_path / phase)
        children[phase] = context.Process(target=with_a_fault, args=args, daemon=True)
        children[phase].start()
    for phase, child in children.items():
        child.join(200)
        assert child.exitcode == HangError.exit_code, phase
        assert (
            f"no answer within 2 s (timeouts.{PHASE[phase][1]})" in (tmp_path / phase).read_text()
        )


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_on_ray_the_deadline_is_that_of_the_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, fault = struck(tmp_path, "reference", reference__device_mapping=[1])
    with inject.attached(fault, config.run_dir, ray=True):
        assert guarded(lambda: DPOPipeline(config).run()) == HangError.exit_code
    told = r"rather: reference rank 0 of 1 \(on .+\): no answer within 2 s \(timeouts.step\)"
    assert re.search(
        rf"^{told}: it is in inject.py:\d+, stand_still\.", capsys.readouterr().err, re.MULTILINE
    )
