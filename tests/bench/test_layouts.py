"""Layouts on simulated ranks: their shards make up the model, and no weights are allocated."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.house.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

from common import SHAPES, Shape
from layouts import assert_tiled, laid_out, layout_of, megatron, strategy, verdict, whole_shapes

SMALL = Shape("llama", 64, 8, 8, 4, 100, 130, True)


@pytest.mark.parametrize(
    "written",
    [
        strategy("hsdp", shard_size=4),
        strategy("zero2", tp_size=2, cp_size=2),
        megatron(2, 2, virtual_pipeline_model_parallel_size=2),
    ],
)
def test_the_pieces_of_all_ranks_are_the_model(written: dict[str, Any]) -> None:
    held = laid_out(SMALL, layout_of(written, 8), range(8))
    assert_tiled(whole_shapes(SMALL), [each.pieces for each in held])
    with pytest.raises(AssertionError, match="a gap"):
        assert_tiled(whole_shapes(SMALL), [each.pieces for each in held[1:]])
    with pytest.raises(AssertionError, match="two"):
        assert_tiled(whole_shapes(SMALL), [each.pieces for each in [*held, held[0]]])


def test_7b_on_8_devices_is_laid_out_without_its_weights() -> None:
    """15 GB of weights; float32 shards with two moments and a gradient are 16 bytes of each eighth."""
    plan = layout_of(strategy("fsdp2_train"), 8)
    (first,) = laid_out(SHAPES["7B"], plan, [0])
    assert first.in_memory == 0
    assert first.peak_gib < 1
    assert "1 of 8 ranks" in verdict(SHAPES["7B"], plan, [first])
    count = sum(
        place.whole[0] * (place.whole[1] if len(place.whole) > 1 else 1)
        for place in first.pieces.values()
    )
    assert count == 7_615_616_512  # Qwen2.5-7B
    assert first.weights + first.gradients + first.optimizer == 16 * first.parameters
    assert first.parameters == pytest.approx(count / 8, rel=1e-3)
    assert first.largest_unit == 2 * (2 * 152_064 * 3584 + 3584)  # embedding, head and last norm
