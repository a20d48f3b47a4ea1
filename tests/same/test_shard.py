"""ddp, zero1, zero2, zero3 and hsdp give what one process gives."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rather.config.schema import ModelArgs, TrainingArgs
from rather.config.strategies import Layout
from rather.data.batch import PairFacts
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.optim.optimizer import Optimizer
from rather.parallel import load
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.shard import Stage, shard
from rather.train import rank_trainer
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.cells import cells
from tests.padded import random_pairs
from tests.same.canonical import (
    MANY_STEPS,
    STEPS,
    VARIANTS,
    Outcome,
    Setup,
    alone,
    assert_same,
    joined,
    make_policy,
    make_trainer,
    pairs_of,
    train,
    whole,
)
from tests.same.pool import pool
from tests.tiny import CalledCuda, make_model

Sizes = dict[str, int]


def sharded(sizes: Sizes, stage: Stage, setup: Setup, **changes: Any) -> RankTrainer:
    mesh, policy = Mesh.build(**sizes), make_policy(setup)
    shard(policy, mesh, stage, **changes)
    return make_trainer(setup, mesh, policy, WholeModelRunner(policy, stage))


def run(sizes: Sizes, stage: Stage, setup: Setup, changes: dict[str, Any] | None = None) -> Outcome:
    return train(sharded(sizes, stage, setup, **changes or {}), setup)


@pytest.mark.parametrize(
    ("sizes", "stage", "steps"),
    cells(
        [
            ({"replicate": 2}, "ddp", STEPS),
            ({"shard": 2}, "zero2", STEPS),
            ({"shard": 2}, "zero3", STEPS),
            ({"replicate": 2, "shard": 2}, "zero3", STEPS),
        ],
        [
            ({"replicate": 4}, "ddp", STEPS),
            ({"shard": 2}, "zero1", STEPS),
            ({"replicate": 2, "shard": 2}, "zero3", MANY_STEPS),
        ],
    ),
    ids=["dp2", "zero2", "zero3", "hsdp", "dp4", "zero1", "hsdp, many steps"],
)
def test_the_canonical_run(sizes: Sizes, stage: Stage, steps: int) -> None:
    setup = Setup(steps=steps)
    assert_same(joined(pool(prod(sizes.values())).run(run, sizes, stage, setup)), alone(setup))


@pytest.mark.parametrize("variant", ["aot", "simpo", "untied", "qwen3"])
def test_losses_and_families_on_zero3(variant: str) -> None:
    setup = Setup(steps=2, **VARIANTS[variant])
    assert_same(joined(pool(2).run(run, {"shard": 2}, "zero3", setup)), alone(setup))


def log_probs(stage: Stage, count_is_known: bool) -> tuple[Tensor, dict[str, float]]:
    """Return the log-probs of one step's pairs after the step, and their metrics."""
    setup = Setup(steps=2)
    trainer = sharded({"replicate" if stage == "ddp" else "shard": 2}, stage, setup)
    batches = pack(pairs_of(setup)[0], 80, ranks=2)
    facts, own = PairFacts.of_step(batches), batches[trainer.mesh.rank("dp") :: 2]
    reference = {"sum": facts.length * -4.0}
    trainer.train_step(own, reference, facts)
    columns = dict(trainer.log_probs(own, len(facts.weight) if count_is_known else None))
    return columns["sum"], trainer.score(facts, columns, reference)


@pytest.mark.parametrize(
    ("stage", "count_is_known"),
    cells([("zero2", False)], [("zero3", True)]),
)
def test_log_probs_of_all_ranks_follow_a_step(stage: Stage, count_is_known: bool) -> None:
    setup = Setup(steps=2)
    trainer, batches = make_trainer(setup), pack(pairs_of(setup)[0], 80)
    facts = PairFacts.of_step(batches)
    reference = {"sum": facts.length * -4.0}
    before = trainer.log_probs(batches)["sum"]
    trainer.train_step(batches, reference)
    after = trainer.log_probs(batches)["sum"]
    assert not torch.allclose(before, after, rtol=1e-5)
    for sums, metrics in pool(2).run(log_probs, stage, count_is_known):
        assert torch.allclose(sums, after, rtol=1e-6)
        assert metrics == pytest.approx(
            trainer.score(facts, {"sum": after}, reference), rel=1e-5, abs=1e-6
        )


def moving_reference(setup: Setup, trainer: RankTrainer) -> tuple[list[Tensor], dict[str, Any]]:
    """Return log-probs of a frozen model before and after its weights are mixed with others, and
    the weights that this rank stores."""
    trainer.optimizer = None
    dp = trainer.mesh.size("dp")
    own = pack(pairs_of(setup)[0], 80, ranks=dp)[trainer.mesh.rank("dp") :: dp]
    others = {name: weight * 1.1 for name, weight in make_policy(setup).named_parameters()}
    before = trainer.log_probs(own)["sum"]
    trainer.mix_weights(others, 0.5)
    return [before, trainer.log_probs(own)["sum"]], dict(trainer.weight_pieces())


def sharded_reference(setup: Setup) -> tuple[list[Tensor], dict[str, Any]]:
    return moving_reference(setup, sharded({"shard": 2}, "zero2", setup))


def test_a_moving_reference_keeps_no_gathered_weights() -> None:
    """TR-DPO changes a reference between passes without gradients. No backward pass releases the
    weights that such a pass gathers, so they must be released before shards are read or changed."""
    setup = Setup(layers=2)
    expected, weights = moving_reference(setup, make_trainer(setup))
    assert not torch.allclose(*expected, rtol=1e-3)
    results = pool(2).run(sharded_reference, setup)
    for found, _ in results:
        for got, wanted in zip(found, expected, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-6)
    stored = whole([pieces for _, pieces in results])
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight), name


def test_shards_on_the_host() -> None:
    setup = Setup(steps=4)
    assert_same(
        joined(pool(2).run(run, {"shard": 2}, "zero2", setup, {"offload": True})), alone(setup)
    )


def test_a_mesh_of_one_rank_uses_the_multi_rank_path() -> None:
    setup = Setup(steps=4)
    assert_same(joined(pool(1).run(run, {}, "zero3", setup)), alone(setup))


def frozen_on_one_rank(folder: Path, stage: int) -> Tensor:
    """Return the log-probs of a reference as a GPU in a group of one rank computes them."""
    layout = Layout(1, stage=stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "cpu_has_bf16", lambda: True)
        patch.setattr(rank_trainer, "device_of", CalledCuda)
        mesh = build_mesh(layout, "cpu")
        args = ModelArgs(dtype="bf16")
        policy = load.load_divided(str(folder), args, "cpu", mesh, layout, trains=False)
        trainer = RankTrainer(policy, configure(["sigmoid"], {}), mesh=mesh)
    return trainer.log_probs(pack(random_pairs(3, 60), 80))["sum"]


@pytest.mark.defect("R1")
def test_a_frozen_model_in_a_group_of_one_gpu(tmp_path: Path) -> None:
    """FSDP2 shards its weights, so linear layers must not join them."""
    folder = make_model(tmp_path / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "cpu_has_bf16", lambda: True)
        policy = load.load_policy(str(folder), ModelArgs(dtype="bf16"), "cpu")
    trainer = RankTrainer(policy, configure(["sigmoid"], {}))
    expected = trainer.log_probs(pack(random_pairs(3, 60), 80))["sum"]
    for stage in (0, 3):
        (found,) = pool(1).run(frozen_on_one_rank, folder, stage)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def rounded(setup: Setup, dtype: torch.dtype) -> RankTrainer:
    """In one process: parameters in half precision, with exact masters."""
    policy = make_policy(setup)
    exact = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    trainer = make_trainer(setup, policy=policy)
    trainer.optimizer = Optimizer(
        policy.named_parameters(),
        TrainingArgs(),
        schedule=lambda _: setup.lr,
        max_grad_norm=1.0,
        exact=exact,
    )
    return trainer


def test_half_precision_keeps_exact_shards() -> None:
    """The first step is that of one process in bfloat16, which float32 misses by 1e-3. Later steps
    and weights are close to it: their masters are exact."""
    setup = Setup(steps=2, lr=1e-4, layers=2)
    expected = train(rounded(setup, torch.bfloat16), setup)
    got = joined(pool(2).run(run, {"shard": 2}, "zero3", setup, {"compute": torch.bfloat16}))
    assert got.losses[0] == pytest.approx(expected.losses[0], rel=3e-4)
    assert got.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=5e-4)
    assert got.losses[1] == pytest.approx(expected.losses[1], rel=0.01)
    assert got.grad_norms[1] == pytest.approx(expected.grad_norms[1], rel=0.01)
    assert {weight.dtype for weight in got.weights.values()} == {torch.float32}
    # Adam moves each weight by up to lr a step: two unrelated runs differ by about lr.
    off = torch.cat(
        [(got.weights[name] - w).abs().flatten() for name, w in expected.weights.items()]
    )
    assert off.mean() < 0.1 * setup.lr
    assert (off > 0.5 * setup.lr).double().mean() < 0.005
