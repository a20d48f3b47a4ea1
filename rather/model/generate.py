"""Generate answers with the model's own attention and a key-value cache.

Greedy unless a temperature is given. Sampling settings of generation_config.json are ignored, so
that two models are compared by the same rule; its end tokens are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from rather.data.batch import PromptImage
from rather.data.pixel_loader import Maker
from rather.model.towers import set_attention
from rather.model.vision import pixels_of_rows

SPARE_TOKENS = 8  # special tokens, which have no text, among the tokens of a stop text
BATCH_ON_CPU, LARGEST_BATCH = 32, 1024  # answers that are generated at a time


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and when an answer ends besides its end token."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # texts that end an answer


class GeneratedAnswer(NamedTuple):
    """The tokens of an answer without its end token; `ended` is False if the limit cut it off."""

    ids: list[int]
    ended: bool


def end_tokens(causal_lm: Any, tokenizer: Any, more: Iterable[int | None] = ()) -> list[int]:
    """Return the tokens that end an answer: of the tokenizer, of the model, and others."""
    ends_of_model = causal_lm.generation_config.eos_token_id
    if not isinstance(ends_of_model, list):
        ends_of_model = [ends_of_model]
    ends = [tokenizer.eos_token_id, *ends_of_model, *more]
    return list(dict.fromkeys(token for token in ends if token is not None))


def generate(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    on_tokens: Callable[[list[int]], None] | None = None,
    *,
    answers: int = 1,
    end_of_turn: int | None = None,
    images: Sequence[Sequence[PromptImage]] = (),
    maker: Maker | None = None,
) -> list[GeneratedAnswer]:
    """Return answers to each prompt, those to one prompt together; the model may be in training.

    `on_tokens` gets the next token of each answer as it is generated; finished answers are padded.
    `images` are those of each prompt, of which `maker` makes pixels for a model with its tower.
    """
    attention = causal_lm.config.get_text_config()._attn_implementation
    settings = causal_lm.generation_config
    ends = end_tokens(causal_lm, tokenizer, [end_of_turn])
    padding = ends[0] if ends else 0
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, True, padding, "left").to(causal_lm.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left").to(ids.device)
    sampling = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    own_rule = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=padding,
        do_sample=bool(decoding.temperature),
        **(sampling if decoding.temperature else {}),
    )
    stop = StoppingCriteriaList()
    if decoding.stop:
        stop.append(_StopTexts(tokenizer, decoding.stop, ids.shape[1]))
    seen = _seen(causal_lm.config, ids, images, answers, maker)
    set_attention(causal_lm, "sdpa" if causal_lm._supports_sdpa else "eager")
    causal_lm.generation_config = GenerationConfig()  # none of the model's defaults
    try:
        with torch.no_grad():
            cache = None if seen else _prefilled(causal_lm, ids, mask, answers)
            generated: Tensor = causal_lm.generate(
                input_ids=ids.repeat_interleave(answers, 0),
                attention_mask=mask.repeat_interleave(answers, 0),
                generation_config=own_rule,
                stopping_criteria=stop,
                streamer=_Streamer(on_tokens) if on_tokens else None,
                **({"past_key_values": cache} if cache else {}),
                **seen,
            )
    finally:
        set_attention(causal_lm, attention)
        causal_lm.generation_config = settings
    generated_answers = []
    for tokens in generated[:, ids.shape[1] :].tolist():
        end = next((index for index, token in enumerate(tokens) if token in ends), None)
        generated_answers.append(GeneratedAnswer(tokens[:end], end is not None))
    return generated_answers


def _seen(
    config: Any,
    ids: Tensor,
    images: Sequence[Sequence[PromptImage]],
    answers: int,
    maker: Maker | None,
) -> dict[str, Tensor]:
    """Return the model's inputs for the images of all prompts, once for each answer."""
    if not any(images):
        return {}
    assert maker is not None, "images need a maker of pixels"
    rows = [row for row in images for _ in range(answers)]
    return pixels_of_rows(config, ids.repeat_interleave(answers, 0), rows, maker)


def _prefilled(causal_lm: Any, ids: Tensor, seen: Tensor, answers: int) -> DynamicCache | None:
    """Return the cache of all tokens but the last, computed once per prompt, for each answer.

    None for a single answer, prompts of one token, and models whose caches cannot be repeated:
    these compute each prompt once per answer.
    """
    if answers == 1 or ids.shape[1] == 1:
        return None
    cache = DynamicCache(config=causal_lm.config)
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        return None
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    causal_lm(
        input_ids=ids[:, :-1],
        attention_mask=seen[:, :-1],
        position_ids=positions[:, :-1],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(answers)
    return cache


def batch_that_fits(causal_lm: Any, tokens: int) -> int:
    """Return how many answers of `tokens` tokens with their prompts are generated at a time."""
    device = causal_lm.device
    if device.type != "cuda":
        return BATCH_ON_CPU
    config = causal_lm.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = causal_lm.dtype.itemsize
    # A cache is copied when it grows by a token; logits are float32 in several copies.
    cached = 2 * 2 * tokens * config.num_hidden_layers * heads * width * size
    logits = 4 * 6 * config.vocab_size
    free, _ = torch.cuda.mem_get_info(device)
    fits = int(0.6 * free / (cached + logits))
    return max(1, min(LARGEST_BATCH, 1 << max(fits, 1).bit_length() - 1))


class _StopTexts(StoppingCriteria):
    """Ends an answer whose last tokens contain a stop text."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], start: int) -> None:
        self.tokenizer, self.texts, self.start = tokenizer, texts, start
        self.window = max(len(text.encode()) for text in texts) + SPARE_TOKENS

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        first = max(self.start, input_ids.shape[1] - self.window)
        tails = self.tokenizer.batch_decode(input_ids[:, first:], skip_special_tokens=True)
        has_stop = [any(text in tail for text in self.texts) for tail in tails]
        return torch.tensor(has_stop, device=input_ids.device)


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
