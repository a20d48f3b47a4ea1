"""A PEFT model needs no second model: with its adapter off it is the reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rather import DPOConfig, DPOTrainer
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError
from tests.api.conftest import TOKENS

ROWS = TOKENS[:6]
ARGS = TrainingArgs(learning_rate=3e-2, per_device_train_batch_size=2)


def adapted(folder: Path) -> Any:
    """A model whose adapter already changes its answers, as one from an earlier training does."""
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.defect("U14")
def test_the_reference_is_the_model_with_its_adapter_off(folder: Path, model: Any) -> None:
    without = DPOTrainer(adapted(folder), DPOConfig(), args=ARGS).fit(ROWS)
    with_copy = DPOTrainer(adapted(folder), DPOConfig(), model, args=ARGS).fit(ROWS)
    assert without == with_copy
    assert without[0]["rewards/margins"] != 0  # the adapter is on in the policy alone


@pytest.mark.defect("U14")
def test_single_steps_compare_with_the_base_too(folder: Path) -> None:
    base, model = AutoModelForCausalLM.from_pretrained(folder), adapted(folder)
    trainer = DPOTrainer(model, DPOConfig(), args=ARGS)
    [own] = trainer.compute_reference_log_probs(model, [ROWS], 128, 2) or []
    other = DPOTrainer(copy.deepcopy(model), DPOConfig(), base, args=ARGS)
    [known] = other.compute_reference_log_probs(base, [ROWS], 128, 2) or []
    assert all(torch.equal(own[name], known[name]) for name in known)


@pytest.mark.defect("U14")
def test_the_adapter_is_saved_alone(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = adapted(folder)
    trainer = DPOTrainer(model, DPOConfig(), args=ARGS, tokenizer=tokenizer)
    trainer.fit(ROWS)
    trainer.save_model(tmp_path / "adapter")
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    ids = torch.tensor([[1, 5, 9, 11]])
    with torch.no_grad():
        assert torch.allclose(again.eval()(ids).logits, model.eval()(ids).logits, atol=1e-6)


def test_a_config_cannot_add_an_adapter(folder: Path) -> None:
    config = DPOConfig(actor_train={"model_args": {"lora_rank": 4}})
    with pytest.raises(ConfigError, match=r"lora_rank.*give a PEFT model"):
        DPOTrainer(adapted(folder), config)


def test_a_model_without_an_adapter_cannot_be_merged(model: Any, tmp_path: Path) -> None:
    trainer = DPOTrainer(model, DPOConfig(), copy.deepcopy(model))
    with pytest.raises(ConfigError, match="no adapter"):
        trainer.save_model(tmp_path / "merged", merge=True)
