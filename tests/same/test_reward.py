"""A reward model on every axis: scores, gradients and weights of one process."""

from __future__ import annotations

import pytest
import torch

from rather.config.strategies import Layout
from rather.parallel.apply import divide
from rather.parallel.mesh import build_mesh
from rather.parallel.shard import STAGES
from rather.train.rank_trainer import WholeModelRunner
from tests.cells import cells
from tests.same.canonical import (
    Outcome,
    Setup,
    alone,
    assert_same,
    joined,
    make_policy,
    make_trainer,
    train,
)
from tests.same.pool import pool

SETUP = Setup(losses=("bradley_terry",), steps=3, layers=4)
LAYOUTS = {
    "dp2": Layout(2, stage=0),
    "zero3": Layout(2, stage=3, shard=2),
    "tp2": Layout(1, tp=2),
    "sequence parallel": Layout(1, tp=2, sequence_parallel=True),
    "pp2": Layout(1, pp=2),
    "cp2": Layout(1, cp=2),
}


def run(layout: Layout) -> Outcome:
    mesh = build_mesh(layout, "cpu")
    policy = divide(make_policy(SETUP), mesh, layout, compute=torch.float32)
    runner = None if layout.pp > 1 else WholeModelRunner(policy, STAGES[layout.stage])  # type: ignore[arg-type]
    return train(make_trainer(SETUP, mesh, policy, runner), SETUP)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", cells(list(LAYOUTS), keep=["sequence parallel", "pp2", "cp2"]))
def test_the_layout_does_not_matter(name: str) -> None:
    assert_same(joined(pool(2).run(run, LAYOUTS[name])), alone(SETUP))
