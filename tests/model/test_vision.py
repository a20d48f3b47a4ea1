"""Pairs with images: packed equals the model's own padded forward, for each family."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rather.data.batch import PromptImage
from rather.errors import ConfigError, DataError
from rather.model.generate import Decoding, generate
from rather.model.image_tower import TowerGraphs
from rather.model.policy import PolicyModel
from rather.model.vision import family_of
from tests.cells import cells
from tests.model.images import (
    IMAGE,
    image_pairs,
    make_seeing,
    padded_image_logps,
    tiny_model,
)
from tests.model.towers import MARKS
from tests.padded import packed_logps
from tests.tiny import TEXT


def gradients(policy: PolicyModel) -> dict[str, torch.Tensor]:
    named = policy.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    policy.zero_grad()
    return found


# Deep features, linear layers, tiles of two kinds; Qwen2.5-VL is Qwen3-VL with less.
@pytest.mark.parametrize(
    "family", cells(["qwen3_vl", "qwen3_5", "llava_next", "smolvlm"], ["qwen2_5_vl"])
)
def test_packed_equals_padded(family: str) -> None:
    policy, maker = make_seeing(family)
    pairs = image_pairs(family, 6)
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
    expected = padded_image_logps(policy, pairs).double()
    (expected * weights).sum().backward()
    expected_gradients = gradients(policy)
    assert any("visual" in n or "vision" in n for n in expected_gradients)
    for budget in (10**6, 1):
        maker.made.clear()
        packed = packed_logps(policy, pairs, budget)
        assert len(maker.made) <= 6  # not one for each of the 12 answers
        (packed * weights).sum().backward()
        computed = gradients(policy)
        lengths = torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
        assert float(((packed - expected).abs() / lengths).detach().max()) < 1e-5
        assert computed.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            worst = float((computed[name] - gradient).abs().max())
            assert worst < 1e-4 * (1e-2 + float(gradient.abs().max())), name


@pytest.mark.parametrize("family", cells(["qwen2_5_vl", "smolvlm"], ["qwen3_5", "llava_next"]))
def test_answers_to_images_do_not_depend_on_the_batch(family: str) -> None:
    policy, maker = make_seeing(family)
    pairs = [pair for pair in image_pairs(family, 6) if pair.images]
    prompts = [pair.prompt.tolist() for pair in pairs]
    tokenizer = SimpleNamespace(eos_token_id=2)

    def answers(chosen: list[int], images: list[tuple[PromptImage, ...]], copies: int = 1) -> list:
        asked = [prompts[i] for i in chosen]
        model, decoding = policy.causal_lm, Decoding(6)
        found = generate(
            model, tokenizer, asked, decoding, answers=copies, images=images, maker=maker
        )
        return [answer.ids for answer in found]

    seen = [pair.images for pair in pairs]
    every = list(range(len(pairs)))
    together = answers(every, seen)
    assert [answers([i], [seen[i]])[0] for i in every] == together
    assert answers(every[:2], seen[:2], copies=2) == [ids for ids in together[:2] for _ in "ab"]
    other = [tuple(replace(image, digest="f0") for image in images) for images in seen]
    assert answers(every, other) != together  # it looks


@pytest.mark.parametrize("frozen", [(), ("projector",), ("vision", "projector")])
def test_frozen_parts_do_not_train(frozen: tuple[str, ...]) -> None:
    causal_lm = make_seeing("llava_next", frozen)[0].causal_lm
    part_of = family_of(causal_lm.config).part_of
    trained = {part_of(name) for name, p in causal_lm.named_parameters() if p.requires_grad}
    assert {"vision", "projector"} - trained == set(frozen)


def test_graphs_of_a_tower_end_if_its_weights_move() -> None:
    tower = torch.nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    recorded: Any = TowerGraphs(tower)
    for _ in range(2):
        assert recorded._has_fixed_weights()
        recorded.graphs[1,] = SimpleNamespace()
    tower.weight.data = tower.weight.data.clone()
    assert not recorded._has_fixed_weights()
    assert not recorded.graphs


def test_image_tokens_of_a_text_are_refused() -> None:
    policy, _ = make_seeing("qwen2_5_vl")
    pair = image_pairs("qwen2_5_vl", 3)[1]
    odd = replace(pair, chosen=np.array([IMAGE, 11], np.int32), chosen_scored=())
    with pytest.raises(DataError, match=r"9 image tokens .* have 8"):
        packed_logps(policy, [odd], 100)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gemma3", "both ways"), ("mistral3", "was not compared"), ("llama", "no vision tower")],
)
def test_other_families_are_refused(kind: str, reason: str) -> None:
    config = AutoConfig.for_model(kind)
    with pytest.raises(ConfigError, match=f"'{kind}' cannot be trained .*{reason}.*qwen2_5_vl"):
        family_of(config)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_computes_what_it_would_by_itself(family: str) -> None:
    """Windows in one call and patches by a product change rounding alone."""
    policy, maker = make_seeing(family)
    assert policy.vision
    own = tiny_model(family, TEXT["vocab_size"], MARKS).model
    for grid in ((1, 4, 4), (1, 12, 40), (1, 30, 14)):  # one window of 8 x 8 patches, and several
        image = PromptImage(f"{grid[1]:x}", "", grid, grid[1] * grid[2] // 4)
        expected = own.get_image_features(**maker.pixels([image]))
        layers = [expected.pooler_output, *getattr(expected, "deepstack_features", ())]
        rows = torch.stack([torch.cat(list(layer)) for layer in layers])
        computed = policy.vision.compute(image, torch.device("cpu"))
        assert torch.allclose(computed, rows, atol=1e-5)
