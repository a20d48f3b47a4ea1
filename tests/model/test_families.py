"""Packed, shared log-probs equal the padded Hugging Face forward, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.padded import assert_packed_equals_padded, random_pairs
from tests.tiny import TEXT, widen

VOCAB = 97
SMALL: dict[str, Any] = {**TEXT, "vocab_size": VOCAB, "num_hidden_layers": 3}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {},
    "mistral-window": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {**ROPE, "rope_theta": 1e6},
        },
    },
    "phi3": {},
    "phi3-window": {"sliding_window": 7},
    "olmo2": {},
    "gpt_neox": {},
    "smollm3": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "gpt2": {},
}


def tiny(family: str, dtype: torch.dtype, attention: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model_type = family.split("-")[0]
    config = AutoConfig.for_model(model_type, **{**SMALL, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return widen(model.eval())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-6)):
        model = tiny(family, dtype, "eager")
        assert_packed_equals_padded(model, random_pairs(5, VOCAB), [90], tolerance)
