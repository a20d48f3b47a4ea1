"""Answers of a model, token by token, with the attention it came with and a cache of keys and
values.

The likeliest token each time unless a temperature is given. What generation_config.json says of
sampling is left aside: two models are compared by the same rule. The tokens that end an answer are
taken from there.
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
    """How the next token is chosen, and how many there may be."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: always the likeliest
    top_p: float = 1.0


class GeneratedAnswer(NamedTuple):
    """The tokens of an answer without the one that ends it; `ended` is False where the limit cut it
    off.
    """

    ids: list[int]
    ended: bool


def generate(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    tell: Callable[[list[int]], None] | None = None,
) -> list[GeneratedAnswer]:
    """One answer to each prompt. `tell` gets the next token of each as it comes; an answer that has
    ended is filled up.

    The model may be one that is being trained: its attention over packed pairs is put back.
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
            streamer=_Teller(tell) if tell else None,
        )
    return [_answer(row, ends) for row in out[:, width:].tolist()]


def end_tokens(causal_lm: Any, tokenizer: Any) -> list[int]:
    """The tokenizer's own, and those that generation_config names: a chat model often ends its
    turns by another.
    """
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
    """Meanwhile with its own attention; and without its own settings, which would fill in what ours
    leave out.
    """
    attention, settings = causal_lm.config._attn_implementation, causal_lm.generation_config
    causal_lm.set_attn_implementation("sdpa" if causal_lm._supports_sdpa else "eager")
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(attention)
        causal_lm.generation_config = settings


class _Teller(BaseStreamer):
    """Tokens as they come; the first that transformers hands over is the prompt."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        self.tell, self.begun = tell, False

    def put(self, value: Tensor) -> None:
        if self.begun:
            self.tell(value.tolist())
        self.begun = True

    def end(self) -> None:
        """Nothing waits to be told."""
