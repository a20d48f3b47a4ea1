"""Packed, shared log-probs equal the padded Hugging Face forward, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel, pair_columns
from tests.padded import padded_logps, random_pairs

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype
    ).eval()
    with torch.no_grad():  # wide enough that attention and head really matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def packed(model: Any, pairs: Any, budget: int) -> torch.Tensor:
    policy = PolicyModel(model)
    out = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for batch in pack(pairs, budget):
        out = out.index_add(0, batch.pair_P, pair_columns(policy, batch)["sum"])
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str) -> None:
    pairs = random_pairs(5, VOCAB)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-6)):
        plain, ours = tiny(family, dtype, "eager"), tiny(family, dtype, IMPLEMENTATION)
        want, got = padded_logps(plain, pairs), packed(ours, pairs, budget=90)
        assert torch.allclose(got, want, rtol=tolerance, atol=0)
        (want[:, 0] - want[:, 1]).tanh().sum().backward()
        (got[:, 0] - got[:, 1]).tanh().sum().backward()
        flat = [
            torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])
            for m in (plain, ours)
        ]
        assert torch.cosine_similarity(*flat, dim=0) > 0.99999
        assert torch.allclose(flat[0].norm(), flat[1].norm(), rtol=1e-4)
