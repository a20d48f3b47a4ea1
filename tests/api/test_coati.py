"""ColossalChat's trainer: constructor, loader, metric names, files; one and two ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
from rather.coati import Booster, DPOTrainer, Plugin
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError
from tests.api import test_trainer
from tests.api.conftest import TOKENS, rows
from tests.commands.conftest import json_of, rows_of
from tests.padded import random_pairs
from tests.tracking.test_trackers import finish_writing, needs, wandb_records


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


def test_seed_003_the_usage_example(folder: Path, model: Any, tmp_path: Path) -> None:
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
    names = {"loss", "chosen_rewards", "rejected_rewards", "accuracy", "margin", "lr"}
    assert set(history[0]) == names
    saved = sorted(path.name for path in (tmp_path / "saved").glob("epoch-*"))
    assert saved == ["epoch-0_step-2", "epoch-1_step-2", "epoch-1_step-6"]
    assert json_of(tmp_path / "saved" / saved[-1] / "running_states.json") == {
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
    told = rows_of(file)
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


def test_only_the_end_is_exported_with_an_interval_of_0(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    trainer_of(folder, model, max_epochs=1, save_dir=tmp_path).fit(loader(folder, 8, 1))
    assert [path.name for path in tmp_path.glob("epoch-*")] == ["epoch-0_step-2"]


def test_without_a_reference_it_is_simpo(folder: Path, model: Any) -> None:
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


def test_zero2_cpu_keeps_its_strategy() -> None:
    assert Plugin("zero2_cpu").strategy().strategy_name == "zero2_cpu"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plugin": Plugin("zero9"), "booster": None}, "zero9"),
        ({"plugin": Plugin("zero2", tp_size=2), "booster": None}, "has no degrees of its own"),
        ({"save_interval": 2}, "give save_dir too"),
        ({"save_dir": "saved", "tokenizer": None}, "give the tokenizer too"),
    ],
)
def test_arguments_without_effect_are_refused(
    folder: Path, model: Any, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        trainer_of(folder, model, **changes)


# --- W&B's real package, and nothing sent ---


def wandb_losses(folder: Path, name: str) -> list[float]:
    """Of the only run in a folder, as W&B's own file has them."""
    [file] = folder.glob("**/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in wandb_records(file, "history")
    ]
    return [row[name] for row in rows if name in row]


@needs("wandb")
def test_the_runs_of_both_trainers_reach_wandb(
    folder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    args = TrainingArgs(per_device_train_batch_size=2)
    own = test_trainer.trainer_of(AutoModelForCausalLM.from_pretrained(folder), args=args)
    first = own.fit(TOKENS[:6], log_dir=tmp_path / "own", use_wandb=True)
    coordinator = SimpleNamespace(is_master=lambda: True)
    coati = trainer_of(folder, model, max_epochs=1, coordinator=coordinator)
    second = coati.fit(loader(folder, 8, 1), log_dir=tmp_path / "coati", use_wandb=True)
    finish_writing()
    assert wandb_losses(tmp_path / "own", "loss") == [record["loss"] for record in first]
    assert wandb_losses(tmp_path / "coati", "train/loss") == [record["loss"] for record in second]
