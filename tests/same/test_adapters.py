"""Adapters train alike, and leave the reference alone, however the model under them is divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rather.cluster.worker import RankInfo, make_worker
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs
from rather.config.strategies import Layout
from rather.data.pack import pack
from rather.data.template import load_tokenizer
from rather.model.adapters import as_reference
from rather.parallel.load import Start, load_divided, load_policy, stored_dtype
from rather.parallel.mesh import build_mesh
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.padded import random_pairs
from tests.same.canonical import (
    Outcome,
    Setup,
    assert_same,
    joined,
    make_policy,
    make_step,
    make_trainer,
    pairs_of,
    train,
)
from tests.same.cases import layout_of
from tests.same.pool import pool
from tests.tiny import make_config

SETUP = Setup(steps=3, lr=3e-4, layers=4, family="qwen2")  # with biases


@dataclass(frozen=True)
class Case:
    """How the model lies on its ranks, and which adapter it has."""

    layout: str
    args: dict[str, Any] = field(default_factory=dict)
    copies: int = 0  # of the optimizer's state on all ranks together, where it is counted

    @property
    def start(self) -> Start:
        """PiSSA begins away from the base, so its start is kept as the reference."""
        return Start(5, kept=self.args.get("init_lora_weights") == "pissa")


FAST = [Case("dp2 zero3", copies=1), Case("tp2")]
WIDE = [
    Case("dp2", copies=2),
    Case("dp2 zero3", {"init_lora_weights": "pissa"}),
    Case("dp2 zero3", {"use_dora": True}),
    Case("dp2 zero3 recomputed", {"modules_to_save": "norm"}),
    Case("tp2 sequence", {"use_rslora": True}),
    Case("pp2 zero_bubble virtual2"),
    Case("cp2", copies=2),
    Case("dp2 zero3 tp2"),
]


def args_of(case: Case) -> ActorModelArgs:
    return ActorModelArgs(lora_rank=3, lora_alpha=12, **case.args)


def reference(trainer: RankTrainer) -> Tensor:
    """By the policy as it began, after it was trained."""
    step = make_step(pairs_of(SETUP)[0], trainer.mesh.size("dp"))
    with as_reference(trainer.policy):
        return trainer.log_probs(step.dealt[trainer.mesh.rank("dp")], len(step.facts.weight))["sum"]


def outcome_of(trainer: RankTrainer) -> tuple[Outcome, Tensor]:
    """Train; return what came of the adapter, and what the reference says afterwards."""
    outcome = train(trainer, SETUP)
    adapters = {name: piece for name, piece in outcome.weights.items() if ".default." in name}
    return replace(outcome, weights=adapters), reference(trainer)


def divided(folder: str, case: Case) -> tuple[Outcome, Tensor, int]:
    layout = layout_of(case.layout)
    mesh = build_mesh(layout, "cpu")
    policy = load_divided(folder, args_of(case), "cpu", mesh, layout, trains=True, start=case.start)
    trainer = make_trainer(SETUP, mesh, policy, layout.stage)
    found = outcome_of(trainer)
    assert trainer.optimizer is not None
    return *found, sum(m.numel() for m in trainer.optimizer.moments().values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("adapted")
    make_policy(SETUP).causal_lm.save_pretrained(made)
    return str(made)


@cache
def alone(folder: str, **args: Any) -> tuple[Outcome, Tensor]:
    case = Case("dp1", args)
    policy = load_policy(folder, args_of(case), "cpu", start=case.start)
    return outcome_of(make_trainer(SETUP, policy=policy))


@pytest.mark.parametrize(
    "case",
    cells(FAST, WIDE),
    ids=[f"{case.layout} {' '.join(case.args)}".strip() for case in FAST + WIDE],
)
def test_the_layout_does_not_matter(folder: str, case: Case) -> None:
    expected, began = alone(folder, **case.args)
    results = pool(layout_of(case.layout).devices).run(divided, folder, case)
    assert_same(joined([outcome for outcome, _, _ in results]), expected)
    base = make_trainer(SETUP, policy=load_policy(folder, ActorModelArgs(), "cpu"))
    step = make_step(pairs_of(SETUP)[0], 1)
    close = 1e-4 if case.start.kept else 1e-6
    assert torch.allclose(began, base.log_probs(step.dealt[0])["sum"], rtol=close)
    for _, columns, _ in results:
        assert torch.allclose(columns, began, rtol=1e-6)
    if case.copies:  # two moments for each trained weight, and none for a frozen one
        trained = sum(weight.numel() for weight in expected.weights.values())
        assert sum(moments for _, _, moments in results) == 2 * trained * case.copies


def in_half(folder: str, layout: Layout) -> tuple[set[Any], set[Any], list[float]]:
    """The dtypes in which frozen and trained weights are held, and the losses."""
    mesh = build_mesh(layout, "cpu")
    args = ActorModelArgs(lora_rank=3, dtype="bf16")
    policy = load_divided(folder, args, "cpu", mesh, layout, trains=True, start=Start(5))
    held = {
        wide: {p.dtype for p in policy.parameters() if p.requires_grad == wide}
        for wide in (False, True)
    }
    trainer = make_trainer(SETUP, mesh, policy, layout.stage)
    return held[False], held[True], train(trainer, SETUP).losses


def test_frozen_shards_stay_in_the_precision_they_are_computed_in(folder: str) -> None:
    args = ActorModelArgs(lora_rank=3, dtype="bf16")
    policy = load_policy(folder, args, "cpu", start=Start(5))
    expected = train(make_trainer(SETUP, policy=policy), SETUP).losses
    dtype = stored_dtype(args, "cpu")
    close = 2e-5 if dtype == torch.float32 else 3e-4  # a CPU without bfloat16 only rounds weights
    assert alone(folder)[0].losses[0] != pytest.approx(expected[0], rel=3 * close)
    for frozen, trained, losses in pool(2).run(in_half, folder, layout_of("dp2 zero3")):
        assert frozen == {dtype}
        assert trained == {torch.float32}
        assert losses[0] == pytest.approx(expected[0], rel=close)
        assert losses == pytest.approx(expected, rel=2e-3)


# --- both roles of a run ---


def roles(config: DPOConfig) -> tuple[list[float], Tensor, bool]:
    """Trains as ranks under torchrun do: losses, the reference's log-probs afterwards, and whether
    it is the policy."""
    member = RankInfo(dist.get_rank(), dist.get_world_size(), "cpu")
    policy, reference = (make_worker(name, config, member) for name in ("actor_train", "reference"))
    reference.neighbour = policy
    policy.initialize(4)
    reference.initialize(4)
    steps = [random_pairs(12, 60, seed=seed, longest=12) for seed in range(4)]
    packed = [pack(pairs, 64, ranks=policy.layout.dp) for pairs in steps]
    losses = []
    for batches in packed:
        result = policy.train_step(batches, reference.compute_log_probs(batches))
        losses.append(result.sums["loss"])
    policy.save_model(
        config.run_dir / "model",
        load_tokenizer(config.actor_train.tokenizer_path, None, False),
        "card",
    )
    return (
        losses,
        reference.compute_log_probs(packed[0])["sum"],
        reference.trainer is policy.trainer,
    )


@pytest.mark.parametrize("kind", ["tp", "pissa"])
def test_roles_share_one_model_and_leave_one_adapter(tmp_path: Path, kind: str) -> None:
    args = {"lora_rank": 3, "init_lora_weights": "pissa" if kind == "pissa" else True}
    strategy = {"tp_size": 2} if kind == "tp" else {"strategy_name": "fsdp2_train"}

    def config_of(name: str, **changes: Any) -> DPOConfig:
        changes |= {f"actor_train__model_args__{key}": value for key, value in args.items()}
        training = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        return make_config(tmp_path, exp_name=name, actor_train__training_args=training, **changes)

    strategies = {f"actor_train__strategy_args__{key}": value for key, value in strategy.items()}
    both = config_of("both", actor_train__device_mapping=[0, 1], **strategies)
    alone = config_of("alone")
    ((expected, began, _),) = pool(1).run(roles, alone)
    assert expected[0] == pytest.approx(12 * math.log(2), abs=1e-5 if kind == "pissa" else 1e-9)
    for losses, columns, shared in pool(2).run(roles, both):
        assert shared
        assert losses == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(columns, began, rtol=1e-6)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(each.run_dir / file) for each in (alone, both))
        assert one.keys() == other.keys()
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5
