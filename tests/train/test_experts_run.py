"""Runs of a mixture of experts: metrics, report, health, export in the files' own names, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rather.config.schema import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.tracking.health import read_findings
from tests.model.test_experts import FAMILIES, SMALL
from tests.tiny import make_config, make_model, make_pairs, metrics


def experts_run(folder: Path, family: str = "qwen3_moe", **changes: Any) -> DPOConfig:
    """A run whose base is a tiny mixture of experts in bfloat16, with per-expert names on disk."""
    base = make_model(folder / "base")
    own = {"vocab_size": 63, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **own})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    for name, count in (("pairs", 40), ("held_out", 9)):
        make_pairs(folder / f"{name}.jsonl", count, seed=count)
    return make_config(folder, **changes)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    """A router that a large learning rate and no router loss push to few experts."""
    config = experts_run(
        tmp_path_factory.mktemp("wild"),
        max_steps=13,
        logging_steps=1,
        actor_train__training_args={"learning_rate": 0.05, "per_device_train_batch_size": 40,
                                    "num_train_epochs": 13},
        actor_train__model_args={"moe_aux_loss_coef": 0},
    )  # fmt: skip
    assert DPOPipeline(config).run() == 0
    return config


def test_metrics_report_and_finding(wild: DPOConfig) -> None:
    lines = [line for line in metrics(wild) if "loss" in line]
    assert lines[0]["router_loss"] == pytest.approx(2, rel=0.2)  # two experts per token
    assert sum(lines[0][f"experts/load/{i}"] for i in range(8)) == pytest.approx(8)
    report = (wild.run_dir / "report.html").read_text()
    assert all(name in report for name in ("Router loss", "Idle experts", "Load of the experts"))
    [one] = [each for each in read_findings(wild.run_dir) if each.name == "experts_collapse"]
    assert lines[-1]["router_loss"] > 1.5 * lines[0]["router_loss"]
    assert "experts got no token" in one.text


def test_the_export_has_the_names_of_the_source_and_the_rounded_weights(wild: DPOConfig) -> None:
    exported = wild.run_dir / "model" / "model.safetensors"
    with (
        safe_open(exported, "pt") as new,
        safe_open(f"{wild.pretrain}/model.safetensors", "pt") as old,
    ):
        assert set(new.keys()) == set(old.keys())
        assert "model.layers.1.mlp.experts.7.down_proj.weight" in new.keys()  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(wild.run_dir / "model")
    assert again.dtype == torch.bfloat16
