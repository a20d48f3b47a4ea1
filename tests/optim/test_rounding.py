"""Dithered rounding: its vectors, its exactness, and that the layout does not matter."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import nn

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.config.schema import TrainingArgs
from rather.optim.optimizer import Optimizer
from rather.optim.rounding import NEAREST, Rounding, exact, hash_key, rounded, thresholds

NAME = "model.layers.0.mlp.up_proj.weight"
VECTORS = {0: 17510, 1: 16193, 2: 61990, 1048576: 42234, 4294967301: 55718}
HASH_KEY_OF_A = (966719552, 792880731)


def reference(name: str, index: int) -> int:
    """Compute one threshold in plain integers."""
    first, second = hash_key(name)
    mask = 0xFFFFFFFF
    bits = ((index & mask) ^ first) * 0x9E3779B1 & mask
    bits ^= bits >> 15
    bits = (bits + second + (index >> 32) * 0xC2B2AE35) * 0x85EBCA6B & mask
    bits ^= bits >> 13
    return (bits * 0xC2B2AE35 & mask) >> 16


def test_written_vectors() -> None:
    """Files hold weights rounded with these numbers: they must never change."""
    found = {index: reference(NAME, index) for index in (0, 1, 2, 1 << 20, (1 << 32) + 5)}
    assert found == VECTORS
    assert thresholds(NAME, ShardSpec.full((3,))).tolist() == [VECTORS[i] for i in range(3)]
    assert hash_key("a") == HASH_KEY_OF_A


def test_indices_beyond_32_bits() -> None:
    spec = ShardSpec((3, 1 << 31), (2, 5), (1, 1))
    assert thresholds(NAME, spec).tolist() == [VECTORS[(1 << 32) + 5]]


@pytest.mark.parametrize("wrapped", [f"causal_lm.{NAME}", f"causal_lm.base_model.model.{NAME}"])
def test_wrappers_do_not_change_the_name(wrapped: str) -> None:
    assert hash_key(wrapped) == hash_key(NAME)
    for inside in ("base_layer.", "original_module.", "modules_to_save.default."):
        assert hash_key(wrapped.replace("up_proj.", f"up_proj.{inside}")) == hash_key(NAME)


@pytest.mark.parametrize("shape", [(7, 12), (5,), (4, 6, 10)])
def test_blocks_of_a_tensor_have_the_thresholds_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = ShardSpec.full(shape)
    values = thresholds(NAME, whole).view(shape)
    for dim in range(len(shape)):
        rows = whole.narrow(0, 1, shape[0] - 2)
        block = rows if dim == 0 else rows.narrow(dim, 2, 3)
        assert thresholds(NAME, block).view(block.sizes).equal(values[block.slices])
        flat = values[block.slices].reshape(-1)
        assert thresholds(NAME, block, 1, 3).equal(flat[1:3])


def test_thresholds_are_uniform_and_independent() -> None:
    count = 1 << 20
    values = (thresholds(NAME, ShardSpec.full((count,))).double() - 32767.5) / 65536 * 12**0.5
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.var() - 1) < 0.01
    for lag in (1, 2, 8, 64, 576, 768, 4096, 65536):
        assert abs((values[:-lag] * values[lag:]).mean()) < 5 / count**0.5, lag


def test_the_master_is_recovered_from_weight_and_low_bits() -> None:
    bits = torch.randint(
        -(1 << 31), (1 << 31) - 1, (1 << 16,), generator=torch.Generator().manual_seed(0)
    )
    master = bits.int().view(torch.float32)
    master = master[master.isfinite()]
    spec = ShardSpec.full(master.shape)
    for threshold in (thresholds(NAME, spec), NEAREST):
        weight = rounded(master, threshold)
        low = master.view(torch.int32).to(torch.int16)
        assert exact(weight, low, threshold).view(torch.int32).equal(master.view(torch.int32))


def test_weights_on_the_grid_stay() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    again = rounded(every.float(), thresholds(NAME, ShardSpec.full(every.shape)))
    kept = every.isnan() | (again.view(torch.int16) == every.view(torch.int16))
    assert kept.all()
    assert again.isnan().equal(every.isnan())


def test_a_tenth_of_a_step_moves_one_weight_in_ten() -> None:
    base = torch.full((1 << 18,), 1.0)
    step = 2.0**-7
    master = base + step / 10
    moved = rounded(master, thresholds(NAME, ShardSpec.full(master.shape))).float() - base
    assert moved.mean().item() == pytest.approx(step / 10, rel=0.02)
    assert set(moved.tolist()) == {0.0, step}
    assert not (rounded(master, NEAREST).float() - base).any()


def test_nonfinite_values_stay() -> None:
    special = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), struct.unpack("<f", b"\x01\x00\x80\x7f")[0]]
    )
    for threshold in (0, NEAREST, 0xFFFF):
        found = rounded(special, threshold)
        assert found[:2].tolist() == [float("inf"), -float("inf")]
        assert found[2:].isnan().all()


def test_training_keeps_float32_masters_and_their_dithered_image() -> None:
    torch.manual_seed(0)
    start = (torch.randn(40, 7) * 0.02).bfloat16()
    spec = ShardSpec((90, 14), (30, 7), (40, 7))  # a block of a larger weight
    rounding = Rounding("dithered", {"weight": spec})
    half, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    args = TrainingArgs(learning_rate=1.0, weight_decay=0.1)
    optimizers = [
        Optimizer(
            [("weight", p)], args, schedule=lambda _: 1e-6, max_grad_norm=0.0, rounding=rounding
        )
        for p in (half, wide)
    ]
    assert half.equal(start)
    for _ in range(5):
        gradient = torch.randn(40, 7).bfloat16()
        for parameter, optimizer in zip((half, wide), optimizers, strict=True):
            (parameter * gradient.to(parameter.dtype)).sum().backward()
            optimizer.step(1.0)
            optimizer.zero_grad()
    assert optimizers[0].masters["weight"].equal(wide.detach())
    own = thresholds("weight", spec).view(half.shape)
    assert half.detach().equal(rounded(wide.detach(), own))
    large = start.abs() > 0.01  # half a step of these is more than all updates together
    assert (half != start)[large].any()
    assert not (wide.detach().bfloat16() != start)[large].any()
