"""Small random models of every type of transformers that answers with text, towers included."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from rather.model.check import _shrunken
from tests.model.test_hybrids import HYBRIDS
from tests.padded import padded_logps, random_pairs

ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [16, 24, 24]}
KINDS = {"layer_types": ["conv", "full_attention"] * 16}
COMPASS = {"rope_parameters": {f"{kind}_attention": {**ROPE} for kind in ("full", "sliding")}}
OCR = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
OCR = {**OCR, "mlp_layer_types": ["dense"] + ["sparse"] * 31}
START = {"vision_start_token_id": 108, "audio_start_token_id": 109}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
INDEXER |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
STATES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "state_size": 16,
}
# What a default config lacks, and released models have.
RELEASED: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in HYBRIDS.items() if "-" not in name},
    "chameleon": {"vocabulary_map": {"<image>": 105}},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "deepseek_ocr2": {"text_config": OCR},
    "emu3": {"vocabulary_map": {"<image>": 105}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {**ROPE, "mrope_section": [22, 22, 20]}}
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/1"},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "lfm2_vl": {"text_config": {"model_type": "lfm2", **KINDS}},
    "ministral": {"head_dim": 128},
    "mistral_large4": {"text_config": {"num_hidden_layers": 4}},
    "molmo2": {
        "text_config": {"num_hidden_layers": 2},
        "adapter_config": {"vision_feature_layer": [0]},
    },
    "nemotron": {"num_key_value_heads": 8},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "qwen2_5_omni_thinker": {**START, "text_config": {"rope_parameters": MROPE}},
    "qwen3_omni_moe_thinker": {**START, "text_config": {"rope_parameters": MROPE}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
}
LEVEL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "hidden_size_global": 32,
}
LEVELS = {f"{key}_config": LEVEL for key in ("patcher", "encoder", "decoder", "global")}
ZAMBA = {**STATES, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
ZAMBA |= {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8}
# Models whose small config is written out: without attention, or with names of their own.
EXPLICIT: dict[str, dict[str, Any]] = {
    "blt": {**LEVELS, "vocab_size": 128, "encoder_hash_byte_group_vocab": 64},
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 128, "max_seq_len": 128},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "falcon_mamba": STATES,
    "mamba": STATES,
    "mamba2": {**STATES, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "prophetnet": {
        "hidden_size": 64,
        "vocab_size": 128,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
    },
    "reformer": {"is_decoder": True, "vocab_size": 128},
    "rwkv": {**STATES, "context_length": 128},
    "xlnet": {"d_model": 64, "n_head": 4, "d_inner": 96, "n_layer": 2, "vocab_size": 128},
    "xlstm": {**STATES, "num_blocks": 2, "num_heads": 4},
    "zamba": ZAMBA,
    "zamba2": {**ZAMBA, "mamba_headdim": 16, "hybrid_layer_ids": [1, 3]},
}
# Sizes of language models that the copies of Rather's own check keep.
TEXT: dict[str, Any] = {
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "rotary_dim": 8,
    "num_layers": 1,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 24,
    "encoder_hidden_size": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 24,
    "num_experts_per_token": 2,
}
TOWER: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers", "n_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "encoder_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    "num_key_value_heads": 2,
    "base_channels": 32,
    "codebook_size": 64,
    "num_filters": 4,
    "head_dim": 16,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
}
WIDE = dict.fromkeys(("hidden_size", "embed_dim", "d_model", "encoder_hidden_size"), 64)
DEPTHS = {key: number for key, number in TOWER.items() if number == 1}
FIRST_MARK = 100  # ids from here on are placeholders; the words of tests/tiny.py are below
MARK = re.compile(r"_token_(id|index)$|^(image|video|audio)_token")
PAIRS = random_pairs(4, 60, longest=20)


def types() -> list[str]:
    return sorted(tower_types() | {*_classes("CAUSAL_LM")})


def tower_types() -> set[str]:
    return {*_classes("IMAGE_TEXT_TO_TEXT"), *_classes("MULTIMODAL_LM")}


def _classes(key: str) -> dict[str, Any]:
    return dict(getattr(auto, f"MODEL_FOR_{key}_MAPPING_NAMES"))


def class_of(name: str) -> Any:
    keys = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    class_name = next(names[name] for names in map(_classes, keys) if name in names)
    return getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])


def parts_of(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a config and all in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value)


def small_config(config: PretrainedConfig, tower: dict[str, Any]) -> PretrainedConfig:
    """Return a copy with a small language model, and with towers of these sizes."""
    whole = copy.deepcopy(config)
    text = whole.get_text_config()
    for part in parts_of(whole):
        if part is not whole and part is not text:
            resize(part, tower)
        elif part is not text:
            resize(part, {"vocab_size": 128, "hidden_size": 64})
    if hasattr(whole, "adaptor_config"):  # as wide as the language model
        resize(whole.adaptor_config, {"hidden_size": 64, "intermediate_size": 16})
    small_text = _shrunken(text, 2)
    resize(small_text, TEXT)
    rope = getattr(small_text, "rope_parameters", None) or {}
    if whole.model_type.startswith("glm") and "mrope_section" not in rope:
        share = rope.get("partial_rotary_factor", 1)
        rope["mrope_section"] = [2, 2, 4] if share == 1 else [1, 1, 2]
    if text is whole:
        whole = small_text
    for part in parts_of(whole):
        for key, value in vars(part).items():
            if value is text:
                setattr(part, key, small_text)
    mark = FIRST_MARK
    for part in parts_of(whole):
        for key, value in list(vars(part).items()):
            if MARK.search(key) and value is not None:
                setattr(part, key, [mark] if isinstance(value, list) else mark)
                mark += 1
        if part is small_text or part is whole:
            resize(part, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    return whole.from_dict(whole.to_dict())


def resize(config: PretrainedConfig, sizes: dict[str, Any]) -> None:
    """Set the sizes that a config has, and shorten its lists of layers."""
    layers = getattr(config, "num_hidden_layers", None)
    if "depth" in sizes and isinstance(layers, int):
        for key, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == layers:
                setattr(config, key, value[:1])
    for key, size in sizes.items():
        if isinstance(getattr(config, key, None), int | list):
            with suppress(Exception):
                setattr(config, key, size)


def default_config(name: str) -> Any:
    return AutoConfig.for_model(name, **RELEASED.get(name, {}), **EXPLICIT.get(name, {}))


def small_model(name: str) -> Any:
    """Return a small random model of a type by its default config, by its whole class."""
    config, problems = default_config(name), []
    for tower in (TOWER, {**TOWER, **WIDE}, DEPTHS):
        try:
            torch.manual_seed(0)
            small = config if name in EXPLICIT else small_config(config, tower)
            model = class_of(name)._from_config(
                small, attn_implementation="eager", dtype=torch.float32
            )
            with torch.no_grad():
                for key, parameter in model.eval().named_parameters():
                    if parameter.ndim > 1 and not re.search("vis|image|audio|speech", key):
                        parameter.normal_(0, 0.15)
            with suppress(TypeError, ValueError):  # some classes run on images only
                padded_logps(model, PAIRS)
            return model
        except Exception as error:
            problems.append(error)
    raise problems[0]
