"""Vision towers on a CUDA device: features of a CUDA graph are those of single launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rather.data.pixel_loader import PixelLoader
from rather.model.image_tower import OFTEN
from rather.model.vision import PARTS, Vision
from tests.model.images import RandomPixels, image_of, make_seeing

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_keep_the_bits(family: str) -> None:
    policy, _ = make_seeing(family, PARTS)
    model = policy.causal_lm.to("cuda", torch.bfloat16)
    recorded, launched = (Vision(model, PixelLoader(RandomPixels(family))) for _ in range(2))
    launched.graphs.is_possible = False

    def features(vision: Vision, number: int) -> Tensor:
        with torch.no_grad():
            return vision.compute(image_of(family, number), torch.device("cuda"))

    numbers = range(2 * OFTEN + 12)  # of two sizes, in turn
    expected = [features(launched, number) for number in numbers]
    computed = [features(recorded, number) for number in numbers]
    assert len(recorded.graphs.graphs) == 2
    assert not launched.graphs.graphs
    assert all(torch.equal(*pair) for pair in zip(computed, expected, strict=True))
    assert not torch.equal(computed[-1], computed[-3])  # another image of the same size


def test_weights_that_move_end_the_graphs() -> None:
    policy, _ = make_seeing("qwen2_5_vl", PARTS)
    model = policy.causal_lm.to("cuda", torch.bfloat16)
    vision = Vision(model, PixelLoader(RandomPixels("qwen2_5_vl")))
    with torch.no_grad():
        for _ in range(OFTEN + 2):
            before = vision.compute(image_of("qwen2_5_vl", 0), torch.device("cuda"))
        assert vision.graphs.graphs
        moved = [weight.data for weight in vision.parameters()]  # keeps the old addresses taken
        for weight in vision.parameters():
            weight.data = weight.data.clone()
        for weight in moved:
            weight.zero_()
        after = vision.compute(image_of("qwen2_5_vl", 0), torch.device("cuda"))
    assert not vision.graphs.graphs
    assert torch.equal(before, after)
