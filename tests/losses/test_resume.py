"""Every loss, and a reference that moves, go on from a checkpoint to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rather.config.run_config import DPOConfig
from rather.errors import CheckpointError
from rather.pipeline.pipeline import DPOPipeline
from tests.losses.formulas import PAIRWISE
from tests.runs import assert_equal, assert_resumes, saved, steps, trained
from tests.tiny import make_config, make_model, make_pairs, metrics, rows_of, untimed, write_rows

pytestmark = pytest.mark.usefixtures("no_self_check")
RUN: dict[str, Any] = {
    "save_steps": 3,
    "actor_train__training_args__num_train_epochs": 3.0,  # 4 steps an epoch: the cut is inside the first
    "actor_train__training_args__per_device_train_batch_size": 3,
    "actor_train__training_args__lr_scheduler_type": "constant",
    "actor_train__training_args__learning_rate": 3e-3,
}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"pref_loss": name} for name in PAIRWISE},
    "sigmoid and sft": {
        "pref_loss": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.5],
        "ld_alpha": 0.4,
    },
    "weighted": {"use_weighting": True, "rpo_alpha": 0.5, "f_divergence_type": "js"},
    "soft labels": {"soft_labels": True},
    "kto": {"task": "unpaired"},
    "bco": {"task": "unpaired", "pref_loss": "bco"},  # its running mean is in the checkpoint
    "task sft": {"task": "sft"},
    "reward": {"task": "reward"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, and 12 pairs with a margin and a label each."""
    folder = tmp_path_factory.mktemp("resume")
    make_model(
        folder / "base",
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
    )
    draw = random.Random(0)
    for name, count in (("pairs", 12), ("held_out", 4)):
        file = make_pairs(folder / f"{name}.jsonl", count)
        rows = rows_of(file)
        for row in rows:
            row |= {"margin": draw.random(), "soft_label": 0.5 + draw.random() / 2}
        write_rows(file, rows)
    return folder


def train(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return trained(folder, name.replace(" ", "-"), **{**RUN, **changes})


def tensors(config: DPOConfig, step: int) -> dict[str, Tensor]:
    moving = ["reference"] if config.sync_ref_model else []
    return saved(config, step, "model", "optimizer", "rng", *moving)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_loss_resumes_to_the_same_bits(folder: Path, name: str) -> None:
    """Six steps, and the last three once more from the checkpoint between them."""
    changes = {**RUN, "max_steps": 6, "validation__data_args__file_name": None}
    config = make_config(folder, exp_name=name.replace(" ", "-"), **changes, **OBJECTIVES[name])
    assert_resumes(config, 3)
    assert [line["step"] for line in steps(config)] == [1, 2, 3, 4, 5, 6]
    head = "model/causal_lm.model.embed_tokens.weight"
    assert not torch.equal(saved(config, 3)[head], saved(config, 6)[head])


@pytest.fixture(scope="module")
def moving(folder: Path) -> DPOConfig:
    """TR-DPO over six steps, without a break."""
    return train(folder, "moving", max_steps=6, eval_steps=3, **SYNCED)


def test_a_moving_reference_resumes_to_the_same_bits(folder: Path, moving: DPOConfig) -> None:
    """Stopped a step after a sync, and a step before one."""
    train(folder, "stopped", max_steps=3, eval_steps=3, **SYNCED)
    rest = train(folder, "stopped", max_steps=6, eval_steps=3, **SYNCED)
    assert untimed(metrics(rest)) == untimed(metrics(moving))
    assert_equal(tensors(rest, 6), tensors(moving, 6))


def test_the_synced_reference_is_in_the_checkpoint(folder: Path, moving: DPOConfig) -> None:
    """After step 2 it was mixed once: 0.6 of the policy then, 0.4 of the base model."""
    early = train(folder, "early", max_steps=2, **SYNCED)
    saved, base = tensors(early, 2), dict(starting_model(early).named_parameters())
    for name, start in base.items():
        policy, reference = saved[f"model/{name}"], saved[f"reference/{name}"]
        torch.testing.assert_close(
            reference, 0.4 * start.detach().cpu().to(reference) + 0.6 * policy.to(reference)
        )
        assert torch.equal(tensors(moving, 3)[f"reference/{name}"], reference)  # no sync at step 3
    moved = [
        not torch.equal(tensors(moving, 6)[f"reference/{name}"], saved[f"reference/{name}"])
        for name in base
    ]
    assert all(moved)


def starting_model(config: DPOConfig) -> torch.nn.Module:
    fresh = DPOPipeline(config)
    fresh.initialize()
    return fresh.actor_train.trainer.policy


def test_a_fixed_reference_is_not_saved(folder: Path) -> None:
    fixed = train(folder, "fixed", max_steps=1)
    with pytest.raises(CheckpointError, match="reference"):
        saved(fixed, 1, "reference")


def test_evaluation_after_a_sync_uses_the_new_reference(folder: Path) -> None:
    """With the whole policy mixed in, policy and reference are one model again: every log-ratio
    is 0."""
    settings = {"max_steps": 4, "eval_steps": 1, **SYNCED, "ref_model_mixup_alpha": 1.0}
    evaluated = metrics(train(folder, "evaluated", **settings))
    margins = {
        line["step"]: line["eval/rewards/margins"] for line in evaluated if "eval/loss" in line
    }
    assert margins[2] == margins[4] == 0
    assert abs(margins[1]) > 1e-4
    assert abs(margins[3]) > 1e-4


def test_training_after_a_sync_uses_the_new_reference(folder: Path) -> None:
    synced = train(folder, "trained", **{"max_steps": 4, **SYNCED, "ref_model_mixup_alpha": 1.0})
    margin = {line["step"]: line["rewards/margins"] for line in metrics(synced) if "loss" in line}
    assert margin[1] == margin[3] == 0
    assert margin[2] != 0
    assert margin[4] != 0


def test_another_way_to_sync_is_another_run(folder: Path, moving: DPOConfig) -> None:
    for change in (
        {"ref_model_mixup_alpha": 0.5},
        {"ref_model_sync_steps": 3},
        {"sync_ref_model": False},
    ):
        settings = {**SYNCED, **change} if "sync_ref_model" not in change else {}
        with pytest.raises(CheckpointError, match=r"synced reference: .* then, .* now"):
            train(folder, "moving", max_steps=9, **settings)
