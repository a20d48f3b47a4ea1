"""Families beyond plain attention: scans, sinks, shared keys. Packed equals padded, with every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from rather.model.check import twin_of
from rather.model.mixers import _Unit
from tests.cells import cells
from tests.padded import assert_packed_equals_padded, ranked_pairs

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "gemma4_text": {"sliding_window": 8},
    "gemma4_text-shared keys": {"num_kv_shared_layers": 12},
    "gemma4_text-experts": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
    "gemma3n_text": {},
    "llama4_text": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "gpt_oss": {},
    "granite_swa": {},
    "nemotron_h": {},
    "falcon_h1": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
}


FAST = ["qwen3_5_text", "lfm2", "gpt_oss", "gemma4_text-shared keys", "nemotron_h", "llama4_text"]


def config_of(name: str) -> Any:
    return AutoConfig.for_model(name.split("-")[0], **HYBRIDS[name])


def hybrid(name: str) -> Any:
    """A small random model of the family's default config, with sinks that matter."""
    model = twin_of(config_of(name))
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_(0, 2)
    return model


@pytest.mark.parametrize("name", cells(FAST, [name for name in HYBRIDS if name not in FAST]))
def test_packed_equals_padded_with_every_gradient(name: str) -> None:
    assert_packed_equals_padded(hybrid(name), ranked_pairs(128)[:9], [10**6, 60])


def test_vectors_of_length_one_are_those_of_the_family() -> None:
    vectors = torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(0))
    vectors.requires_grad_()
    slope = torch.linspace(-1, 1, vectors.numel()).view_as(vectors)
    results = []
    for unit in (modeling_qwen3_5.l2norm, _Unit.apply):
        found = unit(vectors)
        results.append([found, *torch.autograd.grad((found * slope).sum(), vectors)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(expected, found)
