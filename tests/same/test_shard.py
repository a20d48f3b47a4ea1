"""ddp, zero1, zero2, zero3 and hsdp give what one process gives."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from rather.config.schema import TrainingArgs
from rather.data.batch import PairFacts
from rather.data.pack import pack
from rather.optim.optimizer import Optimizer
from rather.parallel.mesh import Mesh
from rather.parallel.shard import Sharding, Stage, shard
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.cells import cells
from tests.same.canonical import (
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
    variant_name,
)
from tests.same.pool import pool

Sizes = dict[str, int]


def sharded(sizes: Sizes, stage: Stage, setup: Setup, **changes: Any) -> RankTrainer:
    mesh, policy = Mesh.build(**sizes), make_policy(setup)
    shard(policy, mesh, Sharding(stage, **changes))
    return make_trainer(setup, mesh, policy, WholeModelRunner(policy, stage))


def run(sizes: Sizes, stage: Stage, setup: Setup, changes: dict[str, Any] | None = None) -> Outcome:
    return train(sharded(sizes, stage, setup, **changes or {}), setup)


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        ({"replicate": 2}, "ddp"),
        pytest.param({"replicate": 4}, "ddp", marks=pytest.mark.wide),
        ({"shard": 2}, "zero1"),
        ({"shard": 2}, "zero2"),
        ({"shard": 2}, "zero3"),
        ({"replicate": 2, "shard": 2}, "zero3"),
    ],
    ids=["dp2", "dp4", "zero1", "zero2", "zero3", "hsdp"],
)
@STEPS
def test_the_canonical_run(sizes: Sizes, stage: Stage, steps: int) -> None:
    setup = Setup(steps=steps)
    assert_same(joined(pool(prod(sizes.values())).run(run, sizes, stage, setup)), alone(setup))


@pytest.mark.parametrize("changes", VARIANTS, ids=variant_name)
def test_losses_and_families_on_zero3(changes: dict[str, Any]) -> None:
    setup = Setup(steps=6, **changes)
    assert_same(joined(pool(2).run(run, {"shard": 2}, "zero3", setup)), alone(setup))


def log_probs(stage: Stage, told: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of one step's pairs, dealt out; then a step, and the log-probs after it."""
    setup = Setup(steps=2)
    trainer = sharded({"replicate" if stage == "ddp" else "shard": 2}, stage, setup)
    batches = pack(pairs_of(setup)[0], 80, ranks=2)
    facts, own = PairFacts.of_step(batches), batches[trainer.mesh.rank("dp") :: 2]
    trainer.log_probs(own)
    reference = {"sum": facts.length * -4.0}
    trainer.train_step(own, reference, facts)
    columns = dict(trainer.log_probs(own, len(facts.weight) if told else None))
    return columns, trainer.score(facts, columns, reference)


@pytest.mark.parametrize(
    ("stage", "told"),
    cells([("ddp", True), ("zero2", False), ("zero3", True)], keep=[("zero2", False)]),
)
def test_log_probs_of_all_ranks_follow_the_weights(stage: Stage, told: bool) -> None:
    """Weights that were gathered for a pass without gradients must not outlive an update."""
    setup = Setup(steps=2)
    trainer, batches = make_trainer(setup), pack(pairs_of(setup)[0], 80)
    facts = PairFacts.of_step(batches)
    reference = {"sum": facts.length * -4.0}
    before = trainer.log_probs(batches)["sum"]
    trainer.train_step(batches, reference)
    after = trainer.log_probs(batches)["sum"]
    assert not torch.allclose(before, after, rtol=1e-5)
    for columns, sums in pool(2).run(log_probs, stage, told):
        assert torch.allclose(columns["sum"], after, rtol=1e-6)
        assert sums == pytest.approx(
            trainer.score(facts, {"sum": after}, reference), rel=1e-5, abs=1e-6
        )


def test_shards_on_the_host() -> None:
    setup = Setup(steps=4)
    assert_same(
        joined(pool(2).run(run, {"shard": 2}, "zero2", setup, {"offload": True})), alone(setup)
    )


def test_a_mesh_of_one_rank_takes_the_way_of_many() -> None:
    setup = Setup(steps=4)
    assert_same(joined(pool(1).run(run, {}, "zero3", setup)), alone(setup))


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
    """bfloat16 rounds each product to 3 digits; weights move by the same updates all the same."""
    setup = Setup(steps=2, lr=1e-4, layers=2)
    expected = train(rounded(setup, torch.bfloat16), setup)
    got = joined(pool(2).run(run, {"shard": 2}, "zero3", setup, {"compute": torch.bfloat16}))
    assert got.losses == pytest.approx(expected.losses, rel=0.05)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=0.05)
    for name, weight in expected.weights.items():
        assert got.weights[name].dtype == torch.float32
        assert (got.weights[name] - weight).abs().max() < 2 * setup.steps * setup.lr
        assert (got.weights[name] - weight).abs().mean() < 0.5 * setup.lr
