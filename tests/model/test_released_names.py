"""An export has the names of its source's files, opens with transformers alone, and is proven before it is published."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from rather.pipeline.pipeline import DPOPipeline
from tests.cells import cells
from tests.model.towers import DEEP, LINEAR, MARKS, SIGHT
from tests.padded import packed_logps, padded_logps, random_pairs
from tests.tiny import TEXT, make_config

WEIGHTS = "model.safetensors"
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def kimi_k25() -> Any:
    text = {**TEXT, **LATENT, **ROUTED, "num_key_value_heads": 4, "q_lora_rank": 16, "n_group": 1}
    text |= {"model_type": "deepseek_v3", "topk_group": 1, "first_k_dense_replace": 1}
    sight = {**SIGHT, "pos_emb_height": 4, "pos_emb_width": 4}
    sizes = {"projection_hidden_size": 16, "tie_word_embeddings": False}
    return AutoConfig.for_model("kimi_k25", text_config=text, vision_config=sight, **sizes)


def qwen3_5_moe() -> Any:
    text = {**TEXT, **LINEAR, "num_experts": 3, "num_experts_per_tok": 2}
    text |= {"shared_expert_intermediate_size": 24, "moe_intermediate_size": 24}
    return AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=DEEP, **MARKS)


def mistral_large4() -> Any:
    text = {**TEXT, **LATENT, **ROUTED, "num_key_value_heads": 4, "head_dim": 16}
    text |= {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 16}
    sight = {**SIGHT, "model_type": "pixtral", "head_dim": 8}
    marks = {"image_token_index": 5}
    return AutoConfig.for_model("mistral_large4", text_config=text, vision_config=sight, **marks)


def longcat_flash() -> Any:
    sizes = {"num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48, "head_dim": 8}
    experts = {"expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2}
    text = {"vocab_size": 63, "hidden_size": 32, "n_routed_experts": 4, "q_lora_rank": 16}
    return AutoConfig.for_model("longcat_flash", **text, **sizes, **experts, **LATENT)


def flint() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return AutoConfig.for_model("flint", **TEXT, **experts)


FAMILIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (kimi_k25, qwen3_5_moe, mistral_large4, longcat_flash, flint)
}


def write_source(folder: Path, name: str, form: str) -> None:
    """Write a checkpoint: as transformers saves it, as it is released, or in names of modules."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    auto: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = auto.from_config(config)
    model.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    if form == "modules":
        tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    elif form == "released" and name == "kimi_k25":  # transformers saves `blocks` for both parts
        text = "language_model.model."
        tensors = {key.replace(f"{text}blocks", f"{text}layers"): tensors[key] for key in tensors}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.defect("M1")
@pytest.mark.parametrize(
    ("name", "form"),
    cells(
        [("kimi_k25", "released"), ("qwen3_5_moe", "saved"), ("mistral_large4", "saved")],
        [
            *product(["kimi_k25", "longcat_flash", "flint"], ["saved", "modules"]),
            *product(["qwen3_5_moe", "mistral_large4"], ["modules"]),
        ],
    ),
)
def test_a_trained_model_has_the_names_of_its_source_and_opens(
    name: str, form: str, tmp_path: Path
) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {name}")
    words = str(tmp_path / "words")
    config = make_config(
        tmp_path, max_steps=2, actor_train__model_args__tokenizer_name_or_path=words
    )
    (tmp_path / "base").rename(words)
    write_source(tmp_path / "base", name, form)
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    folder = config.run_dir / "model"
    before, after = (load_file(path / WEIGHTS) for path in (tmp_path / "base", folder))
    assert {key: t.shape for key, t in after.items()} == {key: t.shape for key, t in before.items()}
    assert sum(not torch.equal(before[key], after[key]) for key in before) > 10
    pairs = random_pairs(4, 60)
    trained = packed_logps(pipeline.actor_train.trainer.policy, pairs)
    opened = 0
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    for auto in autos:
        if type(AutoConfig.from_pretrained(folder)) in auto._model_mapping:
            model, info = auto.from_pretrained(folder, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert torch.allclose(padded_logps(model.eval(), pairs), trained, rtol=1e-5, atol=1e-5)
            opened += 1
    assert opened
