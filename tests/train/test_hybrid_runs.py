"""Whole runs of families beyond plain attention: trained, interrupted and resumed, adapted, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rather.config.run_config import DPOConfig
from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.model.policy import pair_columns
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.model.test_hybrids import hybrid
from tests.padded import padded_logps, random_pairs
from tests.runs import assert_resumes, exported
from tests.tiny import make_config, train_on_two_ranks

LORA = {
    "actor_train__model_args__lora_rank": 4,
    "actor_train__model_args__lora_target": "all-linear",
}


def config_of(folder: Path, family: str, name: str, **changes: Any) -> DPOConfig:
    """Return the config of a training of the family, in a folder with pairs."""
    settings = {
        "actor_train__model_args__tokenizer_name_or_path": str(folder / "base"),
        "actor_train__training_args__lr_scheduler_type": "constant",
        **changes,
    }
    model = folder / "model"
    settings["pretrain"] = str(model)
    config = make_config(folder, exp_name=name, **settings)
    if not model.exists():
        hybrid(family).save_pretrained(model)
    return config


def run(folder: Path, family: str, name: str, **changes: Any) -> Path:
    """Train the family in a folder with pairs; return the run folder."""
    config = config_of(folder, family, name, **changes)
    assert DPOPipeline(config).run() == 0
    return config.run_dir


def assert_exported(folder: Path) -> None:
    """The export is what transformers opens, and packed pairs give its own padded log-probs."""
    opened, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    pairs = random_pairs(3, 60)
    policy = load_policy(str(folder), ModelArgs(), "cpu")
    (batch,) = pack(pairs, 10**6)
    assert torch.allclose(
        pair_columns(policy, batch)["sum"], padded_logps(opened.eval(), pairs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2_moe"])
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, name, "run", max_steps=4, save_steps=2)
    assert_resumes(config, 2)
    start = load_file(tmp_path / "model/model.safetensors")
    assert any(not torch.equal(start[key], value) for key, value in exported(config).items())
    assert_exported(config.run_dir / "model")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gemma4_text-shared keys"])
def test_two_ranks_train_as_one(name: str, tmp_path: Path) -> None:
    """Plain data parallel; on zero3 it is in `make test`, in tests/same/test_hybrids.py."""
    batch = "actor_train__training_args__per_device_train_batch_size"
    alone = run(tmp_path, name, "alone", max_steps=2, **{batch: 4})
    both = config_of(
        tmp_path, name, "both", max_steps=2, actor_train__device_mapping=[0, 1],
        reference__device_mapping=[0, 1], **{batch: 2},
    )  # fmt: skip
    train_on_two_ranks(both.model_dump(mode="json", exclude_unset=True))
    # Shards of several ranks are exported under transformers' current names, which the files of
    # some families do not have; so the models are compared as they open.
    opened = []
    for folder in (tmp_path, alone, both.run_dir):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        opened.append(dict(model.named_parameters()))
    start, want, got = opened
    for key, value in want.items():
        moved = (value - start[key]).norm()
        assert (got[key] - value).norm() <= 1e-3 * moved + 1e-6, key


@pytest.mark.parametrize(
    "name", cells(["gpt_oss"], ["qwen3_5_text", "hunyuan_v1_moe", "granitemoehybrid"])
)
def test_an_adapter_trains_merges_and_exports(name: str, tmp_path: Path) -> None:
    trained = run(tmp_path, name, "adapter", max_steps=2, **LORA)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", trained / "model")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert_exported(trained / "model")
