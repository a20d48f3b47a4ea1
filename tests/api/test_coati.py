"""ColossalChat's trainer: constructor, loader, metric names, files; one and two ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
from rather.coati import Booster, DPOTrainer, Plugin
from rather.errors import ConfigError
from tests.api.test_trainer import rows
from tests.padded import random_pairs
from tests.tiny import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


def loader(folder: Path, count: int, seed: int) -> DataLoader[Any]:
    data: Any = [rows(pair) for pair in random_pairs(count, 60, seed=seed)]
    collate = DataCollatorForPreferenceDataset(
        tokenizer=AutoTokenizer.from_pretrained(folder), max_length=64
    )
    return DataLoader(
        data, batch_size=2, sampler=StatefulDistributedSampler(data, seed=1), collate_fn=collate
    )


def trainer_of(folder: Path, model: Any, **changes: Any) -> DPOTrainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {
        "actor": model,
        "ref_model": copy.deepcopy(model),
        "booster": Booster(Plugin("zero2")),
        "actor_optim": optimizer,
        "plugin": Plugin("zero2"),
        "actor_lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "max_epochs": 2,
        "beta": 0.1,
        "apply_loss_mask": True,
        "accumulation_steps": 2,
    }
    return DPOTrainer(**{**options, **changes})


def test_seed_003_the_usage_example(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trainer_of(
        folder, model, save_interval=2, save_dir=tmp_path / "saved", coordinator=None
    )
    history = trainer.fit(
        train_preference_dataloader=loader(folder, 12, 1),
        eval_preference_dataloader=loader(folder, 4, 2),
        log_dir=tmp_path / "logs",
        use_wandb=False,
    )
    assert len(history) == 6
    assert set(history[0]) == {
        "loss",
        "chosen_rewards",
        "rejected_rewards",
        "accuracy",
        "margin",
        "lr",
    }
    saved = sorted(path.name for path in (tmp_path / "saved").glob("epoch-*"))
    assert saved == ["epoch-0_step-2", "epoch-1_step-2", "epoch-1_step-6"]
    assert json.loads((tmp_path / "saved" / saved[-1] / "running_states.json").read_text()) == {
        "epoch": 1,
        "step": 6,
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / saved[-1] / "modeling")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert "accuracy: " in (tmp_path / "saved" / "eval_result_epoch1.txt").read_text()
    assert list((tmp_path / "logs" / "DPO").glob("*/events.out.tfevents*"))
    [file] = (tmp_path / "logs" / "DPO").glob("*/metrics.jsonl")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["train/loss"] for line in told if "train/loss" in line] == [
        record["loss"] for record in history
    ]
    assert [line["step"] for line in told if "eval/accuracy" in line] == [3, 6]


def test_start_epoch_continues_with_the_order_of_that_epoch(folder: Path) -> None:
    """Two epochs at once, or the second alone from where the first ended: the same losses."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = trainer_of(folder, model).fit(loader(folder, 12, 1))
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = trainer_of(folder, model, max_epochs=1)
    begun = first.fit(loader(folder, 12, 1))
    reference, optimizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        first.trainer.policy.optimizer.optimizer,
    )
    second = trainer_of(folder, model, ref_model=reference, actor_optim=optimizer, start_epoch=1)
    begun += second.fit(loader(folder, 12, 1))
    assert [each["loss"] for each in begun] == pytest.approx(
        [each["loss"] for each in whole], abs=1e-6
    )


def test_only_the_end_is_exported_with_an_interval_of_0(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer_of(folder, model, max_epochs=1, save_dir=tmp_path).fit(loader(folder, 8, 1))
    assert [path.name for path in tmp_path.glob("epoch-*")] == ["epoch-0_step-2"]


def test_without_a_reference_it_is_simpo(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    simpo = trainer_of(folder, model, ref_model=None, length_normalization=True, gamma=0.5)
    assert simpo.trainer.config.loss_names == ["simpo"]
    assert len(simpo.fit(loader(folder, 4, 1))) == 2


def test_without_the_loss_mask_every_token_counts(folder: Path) -> None:
    """SimPO averages over the scored tokens, so that the prompt does not cancel out."""

    def first_loss(batches: DataLoader[Any], *, masked: bool) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder)
        simpo = {"ref_model": None, "length_normalization": True}
        trainer = trainer_of(folder, model, max_epochs=1, apply_loss_mask=masked, **simpo)
        return trainer.fit(batches)[0]["loss"]

    all_scored = loader(folder, 4, 1)
    for row in all_scored.dataset:
        for side in ("chosen", "rejected"):
            row[f"{side}_loss_mask"] = [1] * len(row[f"{side}_input_ids"])
    without_mask = first_loss(loader(folder, 4, 1), masked=False)
    assert without_mask == first_loss(all_scored, masked=True)
    assert without_mask != pytest.approx(first_loss(loader(folder, 4, 1), masked=True), abs=1e-4)


@pytest.mark.parametrize(
    ("plugin", "said"),
    [(Plugin("zero9"), "is not one of"), (Plugin("zero2", tp_size=2), "has no degrees of its own")],
)
def test_unknown_plugins_are_refused(folder: Path, plugin: Plugin, said: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=said):
        trainer_of(folder, model, plugin=plugin, booster=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"save_interval": 2}, "give save_dir too"),
        ({"save_dir": "saved", "tokenizer": None}, "give the tokenizer too"),
    ],
)
def test_missing_save_arguments_are_refused_before_training(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(folder, AutoModelForCausalLM.from_pretrained(folder), **changes)


def test_zero2_cpu_keeps_its_strategy() -> None:
    assert Plugin("zero2_cpu").strategy().strategy_name == "zero2_cpu"
