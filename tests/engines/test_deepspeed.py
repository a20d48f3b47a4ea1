"""DeepSpeed's ZeRO on two ranks gives what one process of Rather gives: make test-engines."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from rather.config.strategies import Layout
from tests.engines.ranks import DEEPSPEED, Cell, Result, run_cells, same_bits
from tests.same.canonical import Setup, alone, assert_same, differences, joined
from tests.same.pool import pool

pytestmark = [
    pytest.mark.skipif(
        not find_spec("deepspeed"), reason="deepspeed is not installed: make test-engines"
    ),
    pytest.mark.slow,
]

SHARDED = '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'


def cell(stage: int, does: str = "train", **changes: Any) -> Cell:
    setup = Setup(steps=3, **changes)
    layout = Layout(2, name=f"zero{stage}", stage=stage, shard=2)
    return Cell(DEEPSPEED, layout, setup, does, SHARDED if stage == 3 else "{}")


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3 untied": {"family": "qwen3", "tied": False},
    "whole-batch loss": {"losses": ("aot",)},
    "router loss": {"family": "qwen3_moe", "router_loss": 0.05, "layers": 2},
}
TRAINED = {
    f"ZeRO-{stage}, {name}": cell(stage, **changes)
    for stage in (1, 2, 3)
    for name, changes in VARIANTS.items()
    if stage > 1 or name == "llama"
}
OTHERS = {
    f"ZeRO-{stage}, {does}": cell(stage, does, layers=2)
    for stage in (1, 2, 3)
    for does in ("skip", "resume", "attributes")
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Result]]:
    """The results of each rank: one process group for all cells, because DeepSpeed keeps one."""
    found: list[dict[str, Result]] = pool(2).run(run_cells, {**TRAINED, **OTHERS})
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_the_canonical_run(results: list[dict[str, Result]], name: str) -> None:
    got = joined([ranks[name].outcomes[0] for ranks in results])
    expected = alone(TRAINED[name].setup)
    print(name, differences(got, expected))
    assert_same(got, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_leaves_nothing_behind(results: list[dict[str, Result]], stage: int) -> None:
    found = results[0][f"ZeRO-{stage}, skip"]
    assert found.words == ["spike"]
    skipped, never_seen = found.outcomes
    assert (skipped.losses, skipped.grad_norms) == (never_seen.losses, never_seen.grad_norms)
    assert same_bits(skipped.weights, never_seen.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resume_has_the_same_bits(results: list[dict[str, Result]], stage: int) -> None:
    resumed, whole = results[0][f"ZeRO-{stage}, resume"].outcomes
    assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms)
    assert same_bits(resumed.weights, whole.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_private_attributes_are_there(results: list[dict[str, Result]], stage: int) -> None:
    assert results[0][f"ZeRO-{stage}, attributes"].words == []
