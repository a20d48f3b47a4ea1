"""Reward models: the precision of their scores, and the padding token of an export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel
from rather.model.reward import set_padding
from tests.padded import random_pairs
from tests.tiny import SIZES


def reward_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": 61, "num_labels": 1})
    return AutoModelForSequenceClassification.from_config(
        config, attn_implementation=IMPLEMENTATION, dtype=dtype
    )


@pytest.mark.defect("mutation 14")
def test_scores_of_a_model_in_bfloat16_are_computed_in_float32() -> None:
    """A score in bfloat16 has three digits; differences of scores would be mostly rounding."""
    policy = PolicyModel(reward_model(torch.bfloat16))
    (batch,) = pack(random_pairs(4, 60), budget=10**6, at_end=True)
    hidden_ND = torch.randn(len(batch.ids_N), 32).bfloat16()
    scores_U, _ = policy.score(hidden_ND, batch)
    head_D = policy.causal_lm.score.weight[0]
    assert scores_U.dtype == torch.float32
    assert head_D.dtype == torch.bfloat16
    expected = hidden_ND[batch.rows_U].double() @ head_D.double()
    assert torch.allclose(scores_U.double(), expected, atol=1e-5)


def tokenizer_of(**special: Any) -> PreTrainedTokenizerFast:
    tokens = ["<|im_end|>", "<|endoftext|>", "<|extra|>", "w0"]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", **special)


@pytest.mark.defect("mutation 7")
def test_a_token_that_ends_texts_is_not_the_padding_of_a_reward_model() -> None:
    """Qwen's padding token is <|endoftext|>, with which texts end as well."""
    config = LlamaConfig(**SIZES)
    extra = {"additional_special_tokens": ["<|extra|>"]}
    tokenizer = tokenizer_of(pad_token="<|endoftext|>", **extra)
    set_padding(config, tokenizer)
    assert tokenizer.pad_token == "<|extra|>"
    assert config.pad_token_id == tokenizer.pad_token_id == 2
    with pytest.raises(ConfigError, match="no special token besides its end token"):
        set_padding(config, tokenizer_of(pad_token="<|endoftext|>"))
