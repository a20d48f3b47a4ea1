"""Generate answers with the model's own attention and a key-value cache.

Greedy unless a temperature is given. Sampling settings of generation_config.json are ignored, so
that two models are compared by the same rule; its end tokens are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and the maximum number of tokens."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0


class GeneratedAnswer(NamedTuple):
    """The tokens of an answer without its end token; `ended` is False if the limit cut it off."""

    ids: list[int]
    ended: bool


def generate(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> list[GeneratedAnswer]:
    """Return one answer to each prompt; the model may be in training.

    `on_tokens` gets the next token of each answer as it is generated; finished answers are padded.
    """
    ends = end_tokens(causal_lm, tokenizer)
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), ends[0] if ends else 0)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        seen[row, width - len(prompt) :] = 1
    with _ready(causal_lm), torch.no_grad():
        out: Tensor = causal_lm.generate(
            input_ids=ids.to(causal_lm.device),
            attention_mask=seen.to(causal_lm.device),
            generation_config=_settings(decoding, ends),
            streamer=_Streamer(on_tokens) if on_tokens else None,
        )
    return [_answer(row, ends) for row in out[:, width:].tolist()]


def end_tokens(causal_lm: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of tokenizer and generation_config."""
    own = causal_lm.generation_config.eos_token_id
    named = own if isinstance(own, list) else [own]
    return list(
        dict.fromkeys(token for token in (tokenizer.eos_token_id, *named) if token is not None)
    )


def _settings(decoding: Decoding, ends: list[int]) -> GenerationConfig:
    sampling = {
        "do_sample": True,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": 0,
    }
    return GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **(sampling if decoding.temperature else {"do_sample": False}),
    )


def _answer(tokens: list[int], ends: list[int]) -> GeneratedAnswer:
    stop = next((place for place, token in enumerate(tokens) if token in ends), None)
    return GeneratedAnswer(tokens[:stop], stop is not None)


@contextmanager
def _ready(causal_lm: Any) -> Iterator[None]:
    """Use the model's own attention, and none of its generation defaults."""
    attention, settings = causal_lm.config._attn_implementation, causal_lm.generation_config
    causal_lm.set_attn_implementation("sdpa" if causal_lm._supports_sdpa else "eager")
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(attention)
        causal_lm.generation_config = settings


class _Streamer(BaseStreamer):
    """Passes tokens on; the first call from transformers has the prompt."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self.on_tokens, self.begun = on_tokens, False

    def put(self, value: Tensor) -> None:
        if self.begun:
            self.on_tokens(value.tolist())
        self.begun = True

    def end(self) -> None:
        """Do nothing: no token is buffered."""
