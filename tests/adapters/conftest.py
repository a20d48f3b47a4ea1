"""A tiny model, pairs and the data cache that all runs share; an adapter as supervised training would leave it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import make_config, make_model


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_config(folder)
    make_model(folder / "untied", tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="session")
def tuned(shared: Path) -> Path:
    """An adapter that has an effect, saved by PEFT, trained with dropout."""
    model = AutoModelForCausalLM.from_pretrained(shared / "base")
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "down_proj"],
        lora_dropout=0.05,
        use_rslora=True,
    )
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    adapted.save_pretrained(shared / "tuned")
    return shared / "tuned"
