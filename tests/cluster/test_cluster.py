"""Roles on Ray: where they run, what they return, and what is reported when one fails."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rather.cluster import resources
from rather.cluster.cluster import Cluster
from rather.cluster.health import Cause, Failure, first_cause
from rather.cluster.resources import ResourceManager
from rather.config.run_config import DPOConfig
from rather.config.schema import Timeouts
from rather.errors import (
    ConfigError,
    MemoryShortage,
    WorkerLost,
)
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.compare import assert_close, assert_same
from tests.cluster.conftest import SLOTS
from tests.cluster.workers import SLOW
from tests.tiny import make_config, make_model, make_pairs, metrics

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def two_devices(folder: Path, **changes: Any) -> DPOConfig:
    """The reference on a device of its own."""
    return make_config(folder, max_steps=4, save_steps=2, reference__device_mapping=[1], **changes)


def test_roles_on_two_devices_train_as_one_process_does(folder: Path) -> None:
    alone = make_config(folder, max_steps=4, save_steps=2, exp_name="alone")
    apart = two_devices(folder, exp_name="apart")
    assert DPOPipeline(alone).run() == 0
    pipeline = DPOPipeline(apart)
    processes = {
        seat.process.pid
        for role in (pipeline.actor_train, pipeline.reference)
        for seat in role.seats
    }
    assert len(processes) == 2
    assert pipeline.run() == 0
    assert_same(alone, apart)


ZERO3 = {"strategy_name": "zero3"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "apart 2+2": {
        "actor_train__device_mapping": [0, 1],
        "reference__device_mapping": [2, 3],
        "reference__strategy_args": {"strategy_name": "megatron_infer", "tp_size": 2},
    },
    "in turn": {
        "actor_train__device_mapping": [0, 1],
        "actor_train__strategy_args": ZERO3,
        "reference__device_mapping": [1],
        "reference__strategy_args": {"strategy_name": "hf_infer"},
    },
}


STEPS, PAIRS, TOKENS = 5, 14, 40


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of tests/same, and pairs for its steps, the last of which has half as many."""
    folder = tmp_path_factory.mktemp("layouts")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    make_model(folder / "base", hidden_size=64, intermediate_size=96, num_hidden_layers=8, **heads)
    make_pairs(folder / "pairs.jsonl", STEPS * PAIRS - PAIRS // 2)
    make_pairs(folder / "held_out.jsonl", 9, seed=1)
    return folder


def small_steps(folder: Path, name: str, **changes: Any) -> DPOConfig:
    """Many micro-batches a step, and moves of the reference."""
    return make_config(
        folder,
        exp_name=name.replace(" ", "-").replace("+", "-"),
        train_batch_size=PAIRS,
        save_steps=15,
        sync_ref_model=True,
        ref_model_sync_steps=6,
        # Gradients of 1e-9 are noise from the order of sums; with an epsilon below them Adam makes
        # whole steps of it.
        actor_train__training_args={
            "learning_rate": 1e-5,
            "adam_epsilon": 1e-6,
            "num_train_epochs": 1.0,
        },
        actor_train__max_tokens_per_microbatch_in_train=TOKENS,
        **changes,
    )


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_placing_of_the_roles_trains_the_same(shared: Path, name: str) -> None:
    alone = small_steps(shared, "alone")
    if not (alone.run_dir / "model").exists():
        pipeline = DPOPipeline(alone)
        first, last = (pipeline.source.step_pairs(number) for number in (1, STEPS))
        assert (pipeline.total_steps, len(last)) == (STEPS, PAIRS // 2)
        assert len(pipeline.parts.packing.pack(first, "train", TOKENS)) >= 8
        assert pipeline.run() == 0
    config = small_steps(shared, name, **LAYOUTS[name])
    assert DPOPipeline(config).run() == 0
    assert_close(alone, config, "grad_norm", "eval/loss")


def test_a_reference_that_moves_is_asked_after_each_move(folder: Path) -> None:
    moving = {"max_steps": 5, "sync_ref_model": True, "ref_model_sync_steps": 2}
    alone = make_config(folder, exp_name="alone", **moving)
    apart = make_config(folder, exp_name="apart", reference__device_mapping=[1], **moving)
    assert [DPOPipeline(config).run() for config in (alone, apart)] == [0, 0]
    assert_same(alone, apart)


@pytest.mark.wide
@pytest.mark.alone
def test_a_slow_separate_reference_overlaps_with_training(folder: Path) -> None:
    workers = "tests.cluster.workers"
    config = make_config(
        folder,
        max_steps=5,
        reference__device_mapping=[1],
        reference__worker_cls=f"{workers}.SlowReference",
        actor_train__worker_cls=f"{workers}.SlowPolicy",
        validation__data_args={},
    )
    assert DPOPipeline(config).run() == 0
    # The reference has nothing left to do during the last step.
    steady = [line for line in metrics(config) if 1 < line.get("step", 0) < 5]
    for line in steady:
        seconds = line["pairs"] / line["pairs_per_second"]
        assert min(line["time/reference"], line["time/train"]) >= SLOW
        assert seconds == pytest.approx(max(line["time/reference"], line["time/train"]), rel=0.1)


# --- where processes live ---


@pytest.fixture
def manager() -> Iterator[ResourceManager]:
    made = ResourceManager(1, 4, timeouts=Timeouts(start=120.0, connect=8.0))
    yield made
    made.close()


def cluster(
    manager: ResourceManager, folder: Path, what: str, devices: list[int], name: str = "reference"
) -> Cluster:
    path = "tests.cluster.workers.Breaks"
    config = make_config(
        folder,
        actor_train__device_mapping=devices,
        reference__worker_cls=path,
        system_envs={"RATHER_TEST_BREAK": what},
    )
    role = config.reference if name == "reference" else config.actor_train
    return Cluster(name, path, manager, role, pipeline_config=config)


def test_equal_mappings_share_processes_and_others_do_not(
    manager: ResourceManager, folder: Path
) -> None:
    first = cluster(manager, folder, "none", [0, 1])
    same = cluster(manager, folder, "none", [0, 1], name="actor_train")
    other = cluster(manager, folder, "none", [2])
    pids = [{seat.process.pid for seat in each.seats} for each in (first, same, other)]
    assert pids[0] == pids[1]
    assert not pids[0] & pids[2]
    assert len(pids[0]) == 2


def test_too_little_shared_memory_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert resources.shortage_of_shared_memory() is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(
        ConfigError, match=r"has 64 MiB free, and a local Ray needs 256; .+ --shm-size=1g"
    ):
        resources.connected(None, 1, tmp_path)


def test_devices_in_use_are_reported() -> None:
    first = ResourceManager(1, SLOTS - 1)
    try:
        with pytest.raises(ConfigError, match="other jobs use some: 1 are free"):
            ResourceManager(1, 2, timeouts=Timeouts(connect=1.0))
    finally:
        first.close()
    ResourceManager(1, SLOTS).close()  # what was asked for in vain holds nothing


# --- what is told when one fails ---


def test_the_first_cause_is_reported(manager: ResourceManager, folder: Path) -> None:
    broken = cluster(manager, folder, "die", [0, 1])
    who = r"reference rank 1 of 2 \(device 1 on .+\): its process died: .+"
    why = r"It crashed, or was killed from outside, often for lack of host memory\.$"
    with pytest.raises(WorkerLost, match=f"{who} {why}"):
        broken.initialize(1)


def test_a_memory_shortage_names_three_fixes() -> None:
    shortage = Failure.of(torch.OutOfMemoryError("CUDA out of memory.\nMore."))
    said = shortage.error("actor_train rank 1 of 2")
    assert isinstance(said, MemoryShortage)
    assert str(said).startswith("actor_train rank 1 of 2: CUDA out of memory. Lower ")
    assert "More" not in str(said)
    for key in ("max_tokens_per_microbatch_in_train", "recompute_granularity", "strategy_name"):
        assert key in str(said)


def test_the_first_of_several_failures_is_the_cause_and_an_echo_never_is() -> None:
    echo = replace(Failure.of(RuntimeError("[gloo] Connection closed by peer")), at=1.0)
    late, early = (replace(Failure.of(ValueError(f"at {at}")), at=at) for at in (3.0, 2.0))
    assert echo.is_echo
    names = ["a", "b", "c"]
    assert first_cause({0: echo, 1: late, 2: early}, names) == Cause(early, "c")
    alike = dict.fromkeys(range(3), early)
    assert first_cause(alike, names, "reference").where == "reference, all 3 ranks"
    assert first_cause(alike, names).where == "a"


def test_warnings_of_all_ranks_are_logged_once_with_their_ranks(
    manager: ResourceManager, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rather")
    cluster(manager, folder, "warn", [0, 1]).initialize(1)
    told = [
        record.getMessage() for record in caplog.records if record.name.startswith("rather.worker")
    ]
    assert told == [
        "reference rank 0: all say this",
        "reference rank 0: only rank 0 says this",
        "info of rank 0",
        "reference rank 1: only rank 1 says this",
    ]


# --- deadlines ---
