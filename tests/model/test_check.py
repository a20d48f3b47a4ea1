"""The self-check: full-size configs are really proven on a shrunken twin, and what cannot be trained is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from rather.config.schema import ModelArgs
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model import check
from rather.model.attention import IMPLEMENTATION, segment_attention
from rather.model.check import check_family, check_length, check_model, refuse_tower
from rather.model.policy import PolicyModel
from rather.model.towers import leave_tower_out
from rather.parallel.load import load_policy
from tests.model.small import small_model
from tests.tiny import tiny_policy

LONG_ROPE = {  # as in Phi-3-mini-128k: one factor for each of the 48 rotary frequencies
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 50 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FULL_SIZE: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(),
    "llama 3.1": LlamaConfig(
        num_key_value_heads=8, max_position_embeddings=131072, rope_parameters=LLAMA_3_ROPE
    ),
    "qwen2": Qwen2Config(),
    "qwen2 with windows": Qwen2Config(use_sliding_window=True, max_window_layers=20),
    "qwen3": Qwen3Config(),
    "mistral": MistralConfig(),
    "gemma2": Gemma2Config(),
    "gemma3 text": Gemma3TextConfig(),
    "gemma3 with images": Gemma3Config(),
    "phi3": Phi3Config(),
    "phi3 128k": Phi3Config(
        sliding_window=262144,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=LONG_ROPE,
    ),
    "gpt2": GPT2Config(),
    "gpt neox": GPTNeoXConfig(),
    "smollm3": SmolLM3Config(),
    "granite": GraniteConfig(
        logits_scaling=8.0, attention_multiplier=0.02, embedding_multiplier=12.0
    ),
    "olmo2": Olmo2Config(),
}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_config_is_proven_on_its_twin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[PolicyModel] = []

    def watched(policy: PolicyModel) -> None:
        check_model(policy)
        compared.append(policy)

    monkeypatch.setattr(check, "check_model", watched)
    config = FULL_SIZE[name]
    before = config.to_dict()
    check_family(config)
    assert config.to_dict() == before
    (policy,) = compared
    twin = policy.causal_lm.config
    assert sum(p.numel() for p in policy.parameters()) < 300_000
    assert getattr(twin, "sliding_window", None) in (None, 8)
    assert set(getattr(twin, "layer_types", None) or []) == set(
        getattr(config.get_text_config(), "layer_types", None) or []
    )


def blind(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, segments: Any, **options: Any
) -> Any:
    """Attention that forgets the windows, as a family would that does not hand them on."""
    return segment_attention(
        module, query, key, value, mask, segments=segments, **{**options, "sliding_window": None}
    )


def test_a_family_that_differs_only_beyond_its_window_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rather.model.check._families", {})
    AttentionInterface.register(IMPLEMENTATION, blind)
    try:
        check_family(LlamaConfig())
        with pytest.raises(ConfigError, match=r"'mistral' cannot be trained.*differ.*per token"):
            check_family(MistralConfig())
    finally:
        AttentionInterface.register(IMPLEMENTATION, segment_attention)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_falcon_is_refused_with_its_name(tmp_path: Path, dtype: Any) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1}
    config = FalconConfig(**sizes, num_attention_heads=4, eos_token_id=2)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'falcon' cannot be trained.*padded forward"):
        load_policy(str(tmp_path), ModelArgs(dtype=dtype), "cpu")


def test_a_config_that_cannot_be_shrunk_is_left_to_the_check_of_its_weights() -> None:
    check_family(PretrainedConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_weights_pass_and_wrong_log_probs_do_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(dtype=dtype)
    check_model(policy)
    assert policy.causal_lm.config._attn_implementation == IMPLEMENTATION
    for scale in (1.5, float("nan")):
        monkeypatch.setattr(policy, "scale", scale)
        with pytest.raises(ConfigError, match="'llama' cannot be trained"):
            check_model(policy)


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (FULL_SIZE["phi3 128k"], 4096),
        (LlamaConfig(rope_parameters=DYNAMIC_ROPE), 2048),
        (GPT2Config(), 1024),
        (AutoConfig.for_model("deepseek_v32"), 2048),
        (AutoConfig.for_model("glm_moe_dsa"), 2048),
        (AutoConfig.for_model("llama4_text"), 8192),
    ],
    ids=["longrope", "dynamic", "learned", "top k", "top k of GLM", "chunks"],
)
def test_sequences_beyond_the_positions_are_refused(config: PretrainedConfig, limit: int) -> None:
    """Or beyond a length that switches code: at 8, pairs of 40 tokens would differ from the twin."""
    check_family(config)
    check_length(config, limit)
    with pytest.raises(ConfigError, match=f"{limit + 1} .*{config.model_type}.* at most {limit}"):
        check_length(config, limit + 1)


@pytest.mark.parametrize(
    "name", ["llama", "llama 3.1", "gemma3 text", "gemma3 with images", "phi3"]
)
def test_rotary_positions_have_no_end_but_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = FULL_SIZE[name].get_text_config()
    check._warn.cache_clear()
    check_length(config, config.max_position_embeddings)
    assert not caplog.messages
    for _ in range(2):
        check_length(config, 10**6)
    assert caplog.messages == [
        f"sequence_length: 1000000 exceeds max_position_embeddings of '{config.model_type}', "
        f"{config.max_position_embeddings}; longer sequences have positions for which it was not "
        "made"
    ]


def test_a_model_in_memory_with_a_tower_is_refused() -> None:
    refuse_tower(LlamaConfig())
    refuse_tower(MixtralConfig(output_router_logits=True))
    with pytest.raises(ConfigError, match="'gemma3' has a vision or audio tower; train it from"):
        refuse_tower(Gemma3Config())


def test_random_numbers_of_the_run_are_not_touched() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    check_family(LlamaConfig())
    assert torch.equal(torch.rand(3), want)


def test_the_pairs_reach_beyond_the_window() -> None:
    (batch,) = pack(check.two_pairs(64), budget=10**6)
    assert max(batch.segments.k_lens) > 4 * 8


def test_a_dense_nemotron_h_has_no_experts() -> None:
    """Its config names experts all the same."""
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="M-M*-M-")
    assert config.n_routed_experts > 0
    assert check.experts_of(config) == 0
    assert check.check_family(config)


# --- models with a tower ---


@pytest.mark.defect("M10")
def test_placeholders_of_images_are_not_among_the_tokens_of_the_check() -> None:
    model = leave_tower_out(small_model("kimi_k25"))
    check_model(PolicyModel(model))
    assert {1, 2, model.config.image_token_id} <= check.special_ids(model.config)


@pytest.mark.defect("M9")
def test_a_class_that_leaves_out_a_factor_of_its_logits_is_refused_with_that_reason() -> None:
    model = leave_tower_out(small_model("aya_vision"))
    with pytest.raises(ConfigError, match="its class in transformers leaves out logit_scale of"):
        check_model(PolicyModel(model))
    model.config.get_text_config().logit_scale = 1.0
    check_model(PolicyModel(model))
