"""Families beyond plain attention: scans, sinks, shared keys. Packed equals padded, with every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.check import twin_of
from rather.model.mixers import _Unit
from rather.model.policy import PolicyModel, pair_columns
from tests.cells import cells
from tests.padded import padded_logps, ranked_pairs

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


def sums(policy: PolicyModel, pairs: Any, budget: int) -> torch.Tensor:
    out = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for batch in pack(pairs, budget):
        out = out.index_add(0, batch.pair_P, pair_columns(policy, batch)["sum"])
    return out


def gradients(model: Any, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logps[:, 0] - logps[:, 1]).tanh().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", cells(FAST, [name for name in HYBRIDS if name not in FAST]))
def test_packed_equals_padded_with_every_gradient(name: str) -> None:
    model, pairs = hybrid(name), ranked_pairs(128)[:9]
    want = padded_logps(model, pairs)
    wanted = gradients(model, want)
    policy = PolicyModel(model)
    model.set_attn_implementation(IMPLEMENTATION)
    for budget in (10**6, 60):
        got = sums(policy, pairs, budget)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
        found = gradients(model, got)
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, key


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
