"""Layouts on simulated ranks: their shards make up the model, and no weights are allocated."""

from __future__ import annotations

import multiprocessing
import sys
from math import prod
from typing import Any

import pytest

from tests.house.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

from common import SHAPES, ExpertShape, Shape
from layouts import (
    ALLOWED_ERROR,
    EXACT,
    MODELS,
    PAIR,
    TOKENS,
    assert_tiled,
    laid_out,
    layout_of,
    megatron,
    step_of,
    strategy,
    verdict,
    whole_shapes,
)

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


def test_the_pieces_of_experts_are_the_model() -> None:
    """8 experts over 2 x 2 ranks, on 8 ranks with a pipeline."""
    shape = ExpertShape("qwen3_moe", 64, 4, 8, 4, 24, 130, False, 8, 2, 8)
    written = megatron(1, 2, expert_model_parallel_size=2)
    held = laid_out(shape, layout_of(written, 8), range(8))
    assert_tiled(whole_shapes(shape), [each.pieces for each in held])


def test_rolls_mixture_of_experts_on_16_devices() -> None:
    """Half of the layers, and an eighth of their experts: two moments and a float32 gradient."""
    plan = layout_of(megatron(1, 2, expert_model_parallel_size=8), 16)
    held = laid_out(MODELS["30B-A3B"], plan, [0, 15])
    assert all(each.in_memory == 0 for each in held)
    assert sum(prod(s) for s in whole_shapes(MODELS["30B-A3B"]).values()) == 30_532_122_624
    for each in held:
        experts = sum(prod(p.sizes) for name, p in each.pieces.items() if ".experts." in name)
        assert experts == 24 * 16 * 3 * 768 * 2048


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


@pytest.mark.wide
@pytest.mark.parametrize(
    "written", [strategy("hsdp", shard_size=4), strategy("zero3", tp_size=2, cp_size=2)]
)
def test_a_step_on_fake_tensors_keeps_what_the_plan_says(written: dict[str, Any]) -> None:
    shape = Shape("llama", 256, 4, 8, 4, 512, 1000, False)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(step_of, (shape, written, 8, 3))
    assert taken.error("activations") == pytest.approx(0, abs=ALLOWED_ERROR)
    assert taken.gradients == taken.weights == taken.optimizer / 2  # all float32
    weights = sum(prod(each) for each in whole_shapes(shape).values())
    # Forward and backward gather the weights in float32, of a half of them under tp.
    assert taken.collectives["allgather_base"][1] == pytest.approx(
        2 * 4 * weights / (2 if "tp_size" in str(written) else 1), rel=0.3
    )


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 4])
def test_a_pipeline_stage_takes_a_step_on_fake_boundary_tensors(rank: int) -> None:
    shape = Shape("llama", 256, 4, 8, 4, 512, 1000, False)
    written = megatron(2, 2, sequence_parallel=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(step_of, (shape, written, 8, rank))
    for name in EXACT:  # of two layers; norms are whole under tp
        assert taken.error(name) == pytest.approx(0, abs=1e-9)
    assert taken.error("activations") == pytest.approx(0, abs=ALLOWED_ERROR)
    # Hidden states in float32, of which each of two tensor-parallel ranks has half of the tokens.
    assert taken.boundary == (0 if rank == 0 else TOKENS // PAIR * (PAIR - 1) // 2 * 256 * 4)
