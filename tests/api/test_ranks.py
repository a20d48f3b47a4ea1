"""DPOTrainer in a process group: each dp rank brings its own pairs; steps equal one process's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather import DPOConfig, DPOTrainer
from rather.api.collate import DataCollatorForPreferenceDataset
from rather.cluster.group import shared_folder
from rather.coati import DPOTrainer as CoatiTrainer
from rather.coati import Plugin
from rather.config.schema import StrategyArgs, TrainingArgs
from rather.data.batch import TokenPair
from rather.errors import ConfigError, DataError
from tests.api.conftest import rows
from tests.padded import random_pairs
from tests.same.pool import pool

STEPS, LENGTH = 3, 128


def steps_of(dp: int, rank: int) -> list[list[list[TokenPair]]]:
    """Two micro-batches of four pairs a step; of two ranks each has one of them."""
    every = [
        [random_pairs(4, 60, seed=10 * step + part) for part in range(2)] for step in range(STEPS)
    ]
    return [step[rank::dp] for step in every]


def train(folder: Path, strategy: dict[str, Any] | None, dp: int, saved: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank() if strategy else 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    steps = steps_of(dp, rank % dp)
    trainer = DPOTrainer(
        model=model,
        train_config=DPOConfig(beta=0.5),
        ref_model=copy.deepcopy(model),
        args=TrainingArgs(
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_accumulation_steps=2 // dp,
            adam_epsilon=1e-6,
        ),
        strategy=StrategyArgs(**strategy) if strategy else None,
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )
    assert trainer.reference is not None
    known = trainer.compute_reference_log_probs(trainer.reference.policy, steps[0], LENGTH, 2)
    taken = [trainer.training_step(trainer.policy.policy, iter(step), LENGTH) for step in steps]
    trainer.save_model(folder.parent / saved)
    return {
        "losses": [float(loss) for loss, *_ in taken],
        "norms": [norm for *_, norm, _ in taken],
        "micro_batches": [len(metrics) for _, metrics, *_ in taken],
        "known": None
        if known is None
        else torch.cat([each["reference_chosen_logps"] for each in known]),
    }


def coati_losses(folder: Path, plugin: str | None, dp: int = 1) -> list[float]:
    """ColossalChat's form with an optimizer of torch's, made before the model is divided."""
    rank = torch.distributed.get_rank() if plugin else 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = CoatiTrainer(
        actor=model, ref_model=copy.deepcopy(model), booster=None, actor_optim=optimizer,
        plugin=Plugin(plugin) if plugin else None, actor_lr_scheduler=None, tokenizer=tokenizer,
        accumulation_steps=2 // dp,
    )  # fmt: skip
    collate = DataCollatorForPreferenceDataset(tokenizer)
    batches = [
        collate([rows(pair) for pair in part]) for step in steps_of(dp, rank % dp) for part in step
    ]
    return [record["loss"] for record in trainer.fit(batches)]


@pytest.mark.parametrize("plugin", ["ddp", "zero2", "gemini"])
def test_coati_on_two_ranks(folder: Path, plugin: str) -> None:
    alone = coati_losses(folder, None)
    assert len(set(alone)) == STEPS
    for losses in pool(2).run(coati_losses, folder, plugin, 2):
        assert losses == pytest.approx(alone, rel=1e-4)


def same_pairs(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = DPOTrainer(model, DPOConfig(max_steps=2), copy.deepcopy(model))
    with pytest.raises(DataError) as refused:
        trainer.fit([rows(pair) for pair in random_pairs(4, 60, seed=1)])
    return str(refused.value)


def test_ranks_with_the_same_pairs_are_refused(folder: Path) -> None:
    for said in pool(2).run(same_pairs, folder):
        assert "all ranks brought the same pairs" in said


def scales(folder: Path) -> list[float]:
    """Return loss scale and norm in float16, with Rather's optimizer and with torch's."""
    found = []
    for given in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if given else None
        trainer = DPOTrainer(
            model, DPOConfig(max_steps=1), copy.deepcopy(model), optimizer=optimizer
        )
        rank = torch.distributed.get_rank()
        *_, skipped, norm, _ = trainer.training_step(
            model, iter([random_pairs(2, 60, seed=rank)]), LENGTH
        )
        assert trainer.policy.optimizer is not None
        assert not skipped
        found += [trainer.policy.optimizer.scale, norm]
    with pytest.raises(
        ConfigError, match="train_batch_size on several ranks: not supported by DPOTrainer"
    ):
        DPOTrainer(model, DPOConfig(train_batch_size=4), model)
    return found


def test_float16_has_a_loss_scale_on_ranks_too(folder: Path) -> None:
    for ours, norm, given, other in pool(2).run(scales, folder):
        assert ours == given == 2.0**16
        assert norm == pytest.approx(other, rel=1e-2)


@pytest.mark.parametrize(
    ("strategy", "dp"),
    [
        ({"strategy_name": "ddp"}, 2),
        ({"strategy_name": "zero3"}, 2),
        ({"strategy_name": "ddp", "pp_size": 2}, 1),
    ],
    ids=["dp2", "zero3", "pp2"],
)
def test_ranks_take_the_steps_of_one_process(
    folder: Path, strategy: dict[str, Any], dp: int
) -> None:
    alone = train(folder, None, 1, "alone")
    ranks = pool(2).run(train, folder, strategy, dp, "divided")
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert rank["micro_batches"] == alone["micro_batches"] == [2] * STEPS
    known = [rank["known"] for rank in ranks if rank["known"] is not None]
    assert len(known) == dp, "only the last stage of a pipeline answers"
    assert torch.allclose(torch.cat(known), alone["known"], atol=1e-6)
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder.parent / name) for name in ("alone", "divided")
    )
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-4


def shared_folder_below(file: Path) -> str:
    try:
        with shared_folder(file / "model"):
            return "made"
    except OSError as error:
        return type(error).__name__


def test_a_shared_folder_that_cannot_be_made_fails_on_all_ranks(tmp_path: Path) -> None:
    """The rank that makes it would otherwise go on alone, and the others wait for it."""
    (tmp_path / "file").touch()
    assert pool(2).run(shared_folder_below, tmp_path / "file") == 2 * ["NotADirectoryError"]
    assert pool(2).run(shared_folder_below, tmp_path / "folder") == 2 * ["made"]
