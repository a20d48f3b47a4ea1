"""Run: models in memory and packed steps, with and without a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint.checkpoint import open_checkpoint
from rather.cluster.launch import Roles, launch
from rather.config.run_config import DPOConfig
from rather.data.prepare import prepare
from rather.errors import CheckpointError, ConfigError
from rather.pipeline.run import Run
from rather.pipeline.steps import Packing, PreparedSteps, Step
from tests.runs import assert_equal
from tests.tiny import make_config, rows_of

IDENTITY = {"loss": {"losses": [["sigmoid", 1.0, {"beta": 0.1}]]}, "seed": [42, 42]}


class CountedSteps:
    """Steps whose number is not known beforehand, with a position of their own."""

    total_steps = None

    def __init__(self, steps: PreparedSteps, fails_at: int = 0) -> None:
        self.inner, self.fails_at = steps, fails_at
        self.asked: list[tuple[int, Mapping[str, Any] | None]] = []

    def steps(self, done: int, position: Mapping[str, Any] | None) -> Iterator[Step]:
        self.asked.append((done, position))
        for step in self.inner.steps(done):
            if step.number == self.fails_at:
                raise RuntimeError("the caller's loader failed")
            yield replace(step, position={"seen": step.number})

    def epoch_at(self, step: int) -> float:
        return self.inner.epoch_at(step)

    def describe_pairs(self, step: Step, places: Sequence[int]) -> list[dict[str, Any]]:
        return [{"place": place} for place in places]


def parts(folder: Path, *, fails_at: int = 0) -> tuple[DPOConfig, Roles, CountedSteps]:
    config = make_config(folder, exp_name="parts", max_steps=5, save_steps=2, logging_steps=1)
    roles = launch(config, with_reference=True)
    prepared = PreparedSteps.of(config, prepare(config))
    for role in (roles.actor_train, roles.reference):
        assert role is not None
        role.initialize(prepared.total_steps)
    packing = Packing(config.actor_train, config.reference, roles.kind, tokens={"train": 4096})
    return config, roles, CountedSteps(replace(prepared, packing=packing), fails_at)


def losses(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def test_without_a_folder_nothing_is_written(shared: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    config, roles, source = parts(shared)
    before = sorted(tmp_path.rglob("*"))
    pipeline = Run(
        config,
        roles,
        source,
        identity=IDENTITY,
        evaluate=lambda: {"answer": 1.0},
        on_record=records.append,
    )
    assert pipeline.run() == 0
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in records if "eval/answer" in record] == [5]
    assert sorted(tmp_path.rglob("*")) == before
    assert not config.run_dir.exists()


def test_a_run_in_a_folder_resumes_to_the_same_bits(shared: Path, tmp_path: Path) -> None:
    whole: list[dict[str, Any]] = []
    config, roles, source = parts(shared)
    run_dir = tmp_path / "whole"
    options: dict[str, Any] = {"identity": IDENTITY}
    Run(config, roles, source, on_record=whole.append, run_dir=run_dir, **options).run()
    assert losses(rows_of(run_dir / "metrics.jsonl")) == losses(whole)
    assert not (run_dir / "model").exists()

    config, roles, source = parts(shared, fails_at=4)
    again = tmp_path / "again"
    with pytest.raises(RuntimeError, match="loader failed"):
        Run(config, roles, source, run_dir=again, **options).run()
    config, roles, source = parts(shared)
    resumed: list[dict[str, Any]] = []
    Run(config, roles, source, on_record=resumed.append, run_dir=again, **options).run()
    assert source.asked == [(2, {"seen": 2})]
    assert losses(resumed) == losses(whole)[2:]
    one, other = (open_checkpoint(path / "checkpoint-5") for path in (run_dir, again))
    assert_equal(one.tensors("model"), other.tensors("model"))
    config, roles, source = parts(shared)
    assert Run(config, roles, source, run_dir=again, **options).run() == 0
    assert source.asked == []  # finished: there is nothing to do


def test_another_identity_is_refused(shared: Path, tmp_path: Path) -> None:
    config, roles, source = parts(shared)
    Run(config, roles, source, identity=IDENTITY, run_dir=tmp_path / "a").run()
    config, roles, source = parts(shared)
    changed = {**IDENTITY, "seed": [7, 7]}
    pipeline = Run(config, roles, source, identity=changed, run_dir=tmp_path / "a")
    with pytest.raises(CheckpointError, match="seed"):
        pipeline.run()


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"on_nonfinite": "rollback"}, "on_nonfinite"), ({"save_best": True}, "save_best")],
)
def test_what_needs_a_folder_is_refused_without_one(
    shared: Path, changes: dict[str, Any], key: str
) -> None:
    config, roles, source = parts(shared)
    with pytest.raises(ConfigError, match=key):
        Run(config.model_copy(update=changes), roles, source, identity=IDENTITY)
