"""Tiny models of the families that see images, and images made of random pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from rather.data.batch import PromptImage, TokenPair
from rather.data.pixel_loader import PixelLoader
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel
from rather.model.towers import set_attention
from rather.model.vision import Vision, keep_tower, pixels_of_rows
from tests.model.towers import DEEP, MARKS, SIGHT, qwen2_5_vl, qwen3_5, text_of
from tests.tiny import TEXT, widen

IMAGE = MARKS["image_token_id"]
FIRST_WORD = 9  # ids from here on are words
PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]


def qwen3_vl(vocabulary: int, marks: dict[str, int]) -> Any:
    config = Qwen3VLConfig(
        text_config=text_of(vocabulary),
        vision_config={**DEEP, "deepstack_visual_indexes": [0, 1]},
        **marks,
    )
    return Qwen3VLForConditionalGeneration(config)


def llava_next(vocabulary: int, marks: dict[str, int]) -> Any:
    text = {**TEXT, "vocab_size": vocabulary, "model_type": "mistral", "sliding_window": None}
    config = LlavaNextConfig(
        text_config=text,
        vision_config={**SIGHT, "model_type": "clip_vision_model", "num_hidden_layers": 2},
        image_grid_pinpoints=PINPOINTS,
        image_token_index=marks["image_token_id"],
        tie_word_embeddings=False,
    )
    return LlavaNextForConditionalGeneration(config)


def smolvlm(vocabulary: int, marks: dict[str, int]) -> Any:
    config = SmolVLMConfig(
        text_config={**TEXT, "vocab_size": vocabulary, "model_type": "llama"},
        vision_config={**SIGHT, "model_type": "smolvlm_vision"},
        image_token_id=marks["image_token_id"],
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return SmolVLMForConditionalGeneration(config)


SEEING: dict[str, Callable[[int, dict[str, int]], Any]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
    "llava_next": llava_next,
    "smolvlm": smolvlm,
}


class RandomPixels:
    """Makes the pixels of an image from its digest, and counts how often."""

    def __init__(self, family: str) -> None:
        self.family, self.made = family, list[str]()

    def pixels(self, images: list[PromptImage]) -> dict[str, Tensor]:
        (image,) = images
        self.made.append(image.digest)
        draw = torch.Generator().manual_seed(int(image.digest, 16))

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        if self.family == "llava_next":
            rows, columns = (-(-size // 16) for size in image.grid)
            return {
                "pixel_values": random(1, 1 + rows * columns, 3, 16, 16),
                "image_sizes": torch.tensor([image.grid]),
            }
        if self.family == "smolvlm":
            tiles = image.grid[0] * image.grid[1]
            return {
                "pixel_values": random(1, tiles, 3, 16, 16),
                "pixel_attention_mask": torch.ones(1, tiles, 16, 16, dtype=torch.bool),
            }
        patches = int(np.prod(image.grid))
        return {
            "pixel_values": random(patches, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([image.grid]),
        }


# Two images of different shapes for each family: grid, and the tokens that it becomes.
SHAPES = {
    "llava_next": [((16, 32), 16 + 4 * 9), ((32, 32), 16 + 8 * 9)],
    "smolvlm": [((1, 1), 4), ((1, 2), 8)],
}
IN_PATCHES = [((1, 4, 4), 4), ((1, 4, 8), 8)]


def image_of(family: str, number: int) -> PromptImage:
    grid, tokens = SHAPES.get(family, IN_PATCHES)[number % 2]
    return PromptImage(f"{number:x}", f"{number}.png", grid, tokens)


def image_pairs(family: str, count: int, seed: int = 0) -> list[TokenPair]:
    """Pairs with none, one or two images; each second prompt has two pairs."""
    random = np.random.default_rng(seed)
    pairs: list[TokenPair] = []

    def words(least: int, most: int) -> np.ndarray:
        return random.integers(FIRST_WORD, TEXT["vocab_size"], random.integers(least, most))

    while len(pairs) < count:
        number = len(pairs)
        images = tuple(image_of(family, number + i) for i in range(number % 3))
        parts = [words(1, 5)]
        for image in images:
            marks = [[MARKS["vision_start_token_id"]], [IMAGE] * image.tokens]
            parts += [np.concatenate([*marks, [MARKS["vision_end_token_id"]]]), words(1, 4)]
        prompt = np.concatenate(parts).astype(np.int32)
        for _ in range(1 + number % 2):
            chosen, rejected = (words(2, 9).astype(np.int32) for _ in range(2))
            spans = (((len(prompt), len(prompt) + len(ids)),) for ids in (chosen, rejected))
            pairs.append(TokenPair(prompt, chosen, rejected, *spans, images=images))
    return pairs[:count]


def tiny_model(family: str, vocabulary: int, marks: dict[str, int]) -> Any:
    """A model with random weights wide enough that images matter."""
    torch.manual_seed(0)
    return widen(SEEING[family](vocabulary, marks).eval())


def make_seeing(family: str, frozen: tuple[str, ...] = ()) -> tuple[PolicyModel, RandomPixels]:
    """A policy of random weights, with pixels of its own."""
    model = tiny_model(family, TEXT["vocab_size"], MARKS)
    keep_tower(model, frozen)
    set_attention(model, IMPLEMENTATION)
    policy, maker = PolicyModel(model), RandomPixels(family)
    policy.vision = Vision(model, PixelLoader(maker))
    return policy, maker


def padded_image_logps(policy: PolicyModel, pairs: list[TokenPair]) -> Tensor:
    """The summed log-probs [pairs, 2] of the model's own forward, one sequence at a time."""
    model = policy.causal_lm
    family = model.config.model_type
    sums = []
    set_attention(model, "eager")
    for pair in pairs:
        for response, spans in pair.answers:
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
            given = {}
            if pair.images:
                given = pixels_of_rows(model.config, ids, [pair.images], RandomPixels(family))
            output = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given
            )
            logps = torch.log_softmax(output.logits[0, :-1].float(), -1)
            of_tokens = logps.gather(1, ids[0, 1:, None])[:, 0]
            sums.append(sum(of_tokens[first - 1 : end - 1].sum() for first, end in spans))
    set_attention(model, IMPLEMENTATION)
    return torch.stack(sums).view(-1, 2)
