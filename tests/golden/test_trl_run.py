"""rather.trl trains as real TRL 1.16 did: tokens, losses and gradient norms of ten whole epochs.

See make_trl_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from rather.trl import DPOConfig, DPOTrainer
from tests.golden.trl_run import SETTINGS, SHAPES, STEPS, make_model, make_rows


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


RUNS = golden("trl_run_1_16.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trl_run"))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_losses_and_grad_norms_are_trls(model: Path, tmp_path: Path, shape: str) -> None:
    expected = RUNS[shape]
    # TRL ignored it, and rather.trl refuses what TRL ignores.
    settings = {key: value for key, value in SETTINGS.items() if key != "label_smoothing"}
    trainer = DPOTrainer(
        str(model),
        args=DPOConfig(output_dir=str(tmp_path), disable_tqdm=True, **settings),
        train_dataset=Dataset.from_list(make_rows(shape)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    for ours, theirs in zip(trainer.train_dataset, expected["tokens"], strict=True):
        assert {column: ours[column] for column in theirs} == theirs
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == STEPS
    assert [line["loss"] for line in lines] == pytest.approx(expected["loss"], abs=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]  # there was something to agree about
