"""Generate answers with the model's own attention and a key-value cache.

Greedy unless a temperature is given. Sampling settings of generation_config.json are ignored, so
that two models are compared by the same rule; its end tokens are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from rather.model.towers import set_attention


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
    attention = causal_lm.config.get_text_config()._attn_implementation
    settings = causal_lm.generation_config
    own = settings.eos_token_id
    ends = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    padding = ends[0] if ends else 0
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, True, padding, "left")
    seen = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    sampling = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    own_rule = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=padding,
        do_sample=bool(decoding.temperature),
        **(sampling if decoding.temperature else {}),
    )
    set_attention(causal_lm, "sdpa" if causal_lm._supports_sdpa else "eager")
    causal_lm.generation_config = GenerationConfig()  # none of the model's defaults
    try:
        with torch.no_grad():
            out: Tensor = causal_lm.generate(
                input_ids=ids.to(causal_lm.device),
                attention_mask=seen.to(causal_lm.device),
                generation_config=own_rule,
                streamer=_Streamer(on_tokens) if on_tokens else None,
            )
    finally:
        set_attention(causal_lm, attention)
        causal_lm.generation_config = settings
    answers = []
    for tokens in out[:, ids.shape[1] :].tolist():
        stop = next((place for place, token in enumerate(tokens) if token in ends), None)
        answers.append(GeneratedAnswer(tokens[:stop], stop is not None))
    return answers


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
