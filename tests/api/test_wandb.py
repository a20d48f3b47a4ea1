"""use_wandb of both trainers, with W&B's real package and nothing sent."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rather.config.schema import TrainingArgs
from tests.api import test_coati, test_trainer
from tests.padded import random_pairs
from tests.tiny import make_model
from tests.tracking.test_trackers import finish_writing, wandb_records

pytest.importorskip("wandb", reason="wandb is not installed; pip install 'rather[wandb]'")


def losses(folder: Path, name: str) -> list[float]:
    """Of the only run in a folder, as W&B's own file has them."""
    [file] = folder.glob("**/offline-run-*/*.wandb")
    kept = [
        record.history
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    rows: list[dict[str, Any]] = [
        {"/".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in kept
    ]
    return [row[name] for row in rows if name in row]


def test_the_run_reaches_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    folder = make_model(tmp_path / "base")
    data = [test_trainer.rows(pair) for pair in random_pairs(6, 60, seed=1)]
    args = TrainingArgs(per_device_train_batch_size=2)
    own = test_trainer.trainer_of(AutoModelForCausalLM.from_pretrained(folder), args=args)
    first = own.fit(data, log_dir=tmp_path / "own", use_wandb=True)
    coordinator = SimpleNamespace(is_master=lambda: True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    coati = test_coati.trainer_of(folder, model, max_epochs=1, coordinator=coordinator)
    second = coati.fit(test_coati.loader(folder, 8, 1), log_dir=tmp_path / "coati", use_wandb=True)
    finish_writing()
    assert losses(tmp_path / "own", "loss") == [record["loss"] for record in first]
    assert losses(tmp_path / "coati", "train/loss") == [record["loss"] for record in second]
