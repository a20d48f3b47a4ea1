"""Pairs with images on several ranks: dp, zero3 and tp give what one process gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rather.config.schema import ActorModelArgs
from rather.config.strategies import Layout
from rather.data.batch import PairFacts, TokenPair
from rather.data.pack import pack
from rather.data.pixel_loader import PixelLoader
from rather.model.policy import PolicyModel
from rather.model.vision import PARTS, Vision
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import Mesh, build_mesh
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.model.images import RandomPixels, image_pairs, make_seeing
from tests.same.canonical import (
    Outcome,
    Setup,
    assert_same,
    joined,
    make_trainer,
)
from tests.same.pool import pool

SETUP = Setup(steps=2)


@dataclass(frozen=True)
class Case:
    family: str
    layout: dict[str, Any]
    frozen: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)


TWO = {
    "zero1": {"dp": 2, "stage": 1, "shard": 2},
    "zero3": {"dp": 2, "stage": 3, "shard": 2},
    "tp": {"dp": 1, "tp": 2},
}
CASES = {
    "zero3 qwen3_vl": Case("qwen3_vl", TWO["zero3"]),
    "hsdp qwen2_5_vl": Case("qwen2_5_vl", {"dp": 4, "stage": 3, "shard": 2}),
    "tp qwen2_5_vl": Case("qwen2_5_vl", TWO["tp"]),
    "zero3 frozen": Case("qwen2_5_vl", TWO["zero3"], PARTS),
    "zero3 lora": Case("smolvlm", TWO["zero3"], PARTS, {"lora_rank": 2}),
    "zero3 llava_next": Case("llava_next", TWO["zero3"]),
    "zero1 qwen3_5": Case("qwen3_5", TWO["zero1"]),
}
FAST = ["zero3 qwen3_vl"]


def steps_of(family: str) -> list[list[TokenPair]]:
    pairs = image_pairs(family, 12, seed=3)
    return [pairs[:8], pairs[8:]]


def see(policy: PolicyModel, family: str, *, sums_gradients: bool) -> None:
    loader = PixelLoader(RandomPixels(family))
    policy.vision = Vision(policy.causal_lm, loader, sums_gradients=sums_gradients)


def train(trainer: RankTrainer, family: str) -> Outcome:
    outcome = Outcome([], [], [], {})
    dp, rank = trainer.mesh.size("dp"), trainer.mesh.rank("dp")
    for pairs in steps_of(family):
        batches = pack(pairs, 60, ranks=dp)
        facts = PairFacts.of_step(batches)
        result = trainer.train_step(batches[rank::dp], {"sum": facts.length * -4.2}, facts)
        outcome.losses.append(result.loss)
        outcome.grad_norms.append(result.grad_norm)
        outcome.logps.append(result.policy)
    outcome.weights = trainer.weight_pieces()
    return outcome


def divided(folder: Path, case: Case) -> Outcome:
    layout = Layout(**case.layout)
    mesh = build_mesh(layout, "cpu")
    args = ActorModelArgs(**case.args)
    policy = load_divided(str(folder), args, "cpu", mesh, layout, trains=True, frozen=case.frozen)
    assert isinstance(policy, PolicyModel)
    see(policy, case.family, sums_gradients=mesh.sums_gradients)
    return train(make_trainer(SETUP, mesh, policy, layout.stage), case.family)


@cache
def checkpoint(family: str, folder: Path) -> Path:
    make_seeing(family)[0].causal_lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", cells(FAST, [name for name in CASES if name not in FAST]))
def test_the_layout_does_not_matter(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = checkpoint(case.family, tmp_path / "base")
    policy = load_policy(str(folder), ActorModelArgs(**case.args), "cpu", frozen=case.frozen)
    see(policy, case.family, sums_gradients=True)
    expected = train(make_trainer(SETUP, Mesh(), policy), case.family)
    trained = {key for key in expected.weights if "vis" in key}
    assert bool(trained) == (not case.frozen)
    results = pool(case.layout["dp"] * case.layout.get("tp", 1)).run(divided, folder, case)
    assert_same(joined(results), expected)
