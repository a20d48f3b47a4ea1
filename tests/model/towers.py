"""Tiny checkpoints with a vision tower, with the word tokenizer of tests/tiny.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.tiny import TEXT, make_model

SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
BLOCKS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
MARKS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 7, "layer_types": kinds},
        vision_config={**SIGHT, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    return Gemma3ForConditionalGeneration(config)


def mistral3() -> Any:
    config = Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**SIGHT, "model_type": "pixtral", "head_dim": 8},
        image_token_index=5,
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def text_of(vocabulary: int, **settings: Any) -> dict[str, Any]:
    rope = {**ROPE, "mrope_section": [1, 1, 2]}
    return {**TEXT, "vocab_size": vocabulary, "rope_parameters": rope, **settings}


def qwen2_5_vl(vocabulary: int = TEXT["vocab_size"], marks: dict[str, int] = MARKS) -> Any:
    config = Qwen2_5_VLConfig(
        text_config=text_of(vocabulary),
        vision_config={**BLOCKS, "fullatt_block_indexes": [1]},
        **marks,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


# Sizes of language models with linear layers.
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
}
DEEP = {**BLOCKS, "num_position_embeddings": 16}


def qwen3_5(vocabulary: int = TEXT["vocab_size"], marks: dict[str, int] = MARKS) -> Any:
    config = Qwen3_5Config(text_config=text_of(vocabulary, **LINEAR), vision_config=DEEP, **marks)
    return Qwen3_5ForConditionalGeneration(config)


def llama4() -> Any:
    sight = {**SIGHT, "vision_output_dim": 24, "projector_input_dim": 24}
    experts = {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40}
    config = Llama4Config(
        text_config={**TEXT, **experts, "attention_chunk_size": 96},
        vision_config={**sight, "projector_output_dim": 24},
        image_token_index=5,
    )
    return Llama4ForConditionalGeneration(config)


def qwen2_audio() -> Any:
    sound = {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "num_mel_bins": 8,
        "max_source_positions": 20,
    }
    config = Qwen2AudioConfig(
        text_config={**TEXT, "model_type": "qwen2"}, audio_config=sound, audio_token_index=5
    )
    return Qwen2AudioForConditionalGeneration(config)


TOWERS: dict[str, Callable[[], Any]] = {
    "gemma3": gemma3,
    "qwen3_5": qwen3_5,
    "qwen2_5_vl": qwen2_5_vl,
    "mistral3": mistral3,
    "llama4": llama4,
    "qwen2_audio": qwen2_audio,
}


def make_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint as transformers saves it, with files of a processor."""
    make_model(folder)
    torch.manual_seed(0)
    TOWERS[name]().to(dtype).save_pretrained(folder)
    if name == "qwen2_audio":  # transformers 5.22 saves `model.model`, which no release has
        weights = load_file(folder / "model.safetensors")
        named = {key.replace(".model.model.", ".model."): tensor for key, tensor in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_mean" : [0.5]}  \n')
    return folder
