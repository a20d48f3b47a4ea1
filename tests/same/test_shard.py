"""Sharded models between their steps: log-probs, moving references, groups of one, half precision."""

from __future__ import annotations

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
from rather.parallel.mesh import build_mesh
from rather.train import rank_trainer
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.padded import random_pairs
from tests.same.canonical import (
    Outcome,
    Setup,
    joined,
    make_policy,
    make_trainer,
    pairs_of,
    train,
    trainer_on,
    whole,
)
from tests.same.cases import layout_of
from tests.same.pool import pool
from tests.tiny import CalledCuda, make_model

SHORT = Setup(steps=2)


def log_probs(layout: str, count_is_known: bool) -> tuple[Tensor, dict[str, float]]:
    """Return the log-probs of one step's pairs after the step, and their metrics."""
    trainer = trainer_on(layout_of(layout), SHORT)
    batches = pack(pairs_of(SHORT)[0], 80, ranks=2)
    facts, own = PairFacts.of_step(batches), batches[trainer.mesh.rank("dp") :: 2]
    reference = {"sum": facts.length * -4.0}
    trainer.train_step(own, reference, facts)
    columns = dict(trainer.log_probs(own, len(facts.weight) if count_is_known else None))
    return columns["sum"], trainer.score(facts, columns, reference)


@pytest.mark.parametrize(
    ("layout", "count_is_known"), cells([("dp2 zero2", False)], [("dp2 zero3", True)])
)
def test_log_probs_of_all_ranks_follow_a_step(layout: str, count_is_known: bool) -> None:
    trainer, batches = make_trainer(SHORT), pack(pairs_of(SHORT)[0], 80)
    facts = PairFacts.of_step(batches)
    reference = {"sum": facts.length * -4.0}
    before = trainer.log_probs(batches)["sum"]
    trainer.train_step(batches, reference)
    after = trainer.log_probs(batches)["sum"]
    assert not torch.allclose(before, after, rtol=1e-5)
    for sums, metrics in pool(2).run(log_probs, layout, count_is_known):
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
    return moving_reference(setup, trainer_on(layout_of("dp2 zero2"), setup))


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


def rounded(setup: Setup) -> RankTrainer:
    """In one process: parameters in bfloat16, with exact masters."""
    policy = make_policy(setup)
    exact = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16()
    trainer = make_trainer(setup, policy=policy)
    trainer.optimizer = Optimizer(
        policy.named_parameters(),
        TrainingArgs(),
        schedule=lambda _: setup.lr,
        max_grad_norm=1.0,
        exact=exact,
    )
    return trainer


def in_bfloat16(setup: Setup) -> Outcome:
    return train(trainer_on(layout_of("dp2 zero3"), setup, torch.bfloat16), setup)


def test_half_precision_keeps_exact_shards() -> None:
    """The first step is that of one process in bfloat16, which float32 misses by 1e-3. Later steps
    and weights are close to it: their masters are exact."""
    setup = Setup(steps=2, lr=1e-4, layers=2)
    expected = train(rounded(setup), setup)
    got = joined(pool(2).run(in_bfloat16, setup))
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
