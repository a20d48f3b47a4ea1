"""megatron-core on two ranks gives what one process of Rather gives: make test-engines."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from rather.config.strategies import Layout
from tests.engines.ranks import MEGATRON, Cell, Result, run_cells, same_bits
from tests.same.canonical import Setup, alone, assert_same, differences, joined
from tests.same.pool import pool

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron"), reason="megatron-core is not installed: make test-engines"
    ),
    pytest.mark.slow,
]

LAYOUTS = {
    "tp 2": Layout(1, tp=2, name="megatron_train"),
    "dp 2": Layout(2, name="megatron_train", stage=1, shard=2),
}


def cell(layout: str, does: str = "train", **changes: Any) -> Cell:
    return Cell(MEGATRON, LAYOUTS[layout], Setup(steps=3, **changes), does)


TRAINED = {
    "tp 2, llama": cell("tp 2"),
    "tp 2, qwen2 untied": cell("tp 2", family="qwen2", tied=False),
    "tp 2, qwen3": cell("tp 2", family="qwen3"),
    "dp 2 with the distributed optimizer, llama": cell("dp 2"),
    "dp 2 with the distributed optimizer, whole-batch loss": cell("dp 2", losses=("aot",)),
}
OTHERS = {
    f"{layout}, {does}": cell(layout, does, layers=2)
    for layout in LAYOUTS
    for does in ("skip", "resume", "attributes")
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Result]]:
    found: list[dict[str, Result]] = pool(2).run(run_cells, {**TRAINED, **OTHERS})
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_the_canonical_run(results: list[dict[str, Result]], name: str) -> None:
    got = joined([ranks[name].outcomes[0] for ranks in results])
    expected = alone(TRAINED[name].setup)
    print(name, differences(got, expected))
    assert_same(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_leaves_nothing_behind(
    results: list[dict[str, Result]], layout: str
) -> None:
    found = results[0][f"{layout}, skip"]
    assert found.words == ["spike"]
    skipped, never_seen = found.outcomes
    assert (skipped.losses, skipped.grad_norms) == (never_seen.losses, never_seen.grad_norms)
    assert same_bits(skipped.weights, never_seen.weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_has_the_same_bits(results: list[dict[str, Result]], layout: str) -> None:
    resumed, whole = results[0][f"{layout}, resume"].outcomes
    assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms)
    assert same_bits(resumed.weights, whole.weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_private_attributes_are_there(results: list[dict[str, Result]], layout: str) -> None:
    assert results[0][f"{layout}, attributes"].words == []
