"""The code of every parallel axis on one GPU, over NCCL groups of one rank: the plain path's losses and weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.house.source import ROOT
from tests.padded import random_pairs

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

from common import Shape
from gpu_parallel import (
    WAYS,
    Apart,
    Plain,
    Work,
    attempt,
    one_rank,
    reference_of,
    train,
    trainer_of,
)

from rather.model.budget import TOKENS, NoRoom, agree_on_budget

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
TINY = Shape("qwen2", 64, 4, 4, 2, 96, 64, True)
STEPS = 5
# Weights relative to how far they move. In bf16 one weight that is rounded the other way moves every number of so small
# a model: by the two forms of master weights, and by the plain path's single product for query, key and value.
SAME = {
    "fp32": Apart(loss=1e-5, norm=1e-5, weights=1e-3),
    "bf16": Apart(loss=4e-3, norm=1e-2, weights=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank(DEVICE):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TINY.model(torch.float32, DEVICE, "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # so that attention and biases matter
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


@cache
def measured(folder: Path, dtype: str) -> tuple[Work, Plain]:
    pairs = random_pairs(12 * STEPS, TINY.vocabulary, seed=3)
    steps = [pairs[first : first + 12] for first in range(0, len(pairs), 12)]
    work = Work(folder, steps, DEVICE, dtype, budget=128)
    work = replace(work, known=reference_of(work))
    return work, Plain(work)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layout_equals_the_plain_path(way: str, dtype: str, folder: Path) -> None:
    work, plain = measured(folder, dtype)
    _, apart = attempt(WAYS[way], plain, work)
    print(f"{way}, {dtype}: {apart}")
    assert apart.within(SAME[dtype], 1.0)


@pytest.mark.defect("R1")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].sharded and not WAYS[way].axes])
def test_a_divided_reference_equals_the_plain_one(way: str, dtype: str, folder: Path) -> None:
    """As `torchrun --nproc-per-node 1` builds it: FSDP2 shards the weights of a frozen model."""
    work, _ = measured(folder, dtype)
    divided = reference_of(work, WAYS[way])
    for found, expected in zip(divided, work.known, strict=True):
        difference = (found["sum"] - expected["sum"]).abs().max()
        assert difference <= (1e-4 if dtype == "fp32" else 0.02) * expected["sum"].abs().max()


def test_a_wrong_layout_is_detected(folder: Path) -> None:
    """One pair less in one step is further than bf16 may go."""
    work, plain = measured(folder, "fp32")
    changed = replace(work, steps=[work.steps[0][:-1], *work.steps[1:]])
    known = [
        {name: column[: len(pairs)] for name, column in columns.items()}
        for columns, pairs in zip(work.known, changed.steps, strict=True)
    ]
    _, apart = attempt(WAYS["zero3"], plain, replace(changed, known=known))
    assert apart.norm > SAME["bf16"].norm
    assert apart.weights > SAME["bf16"].weights


@pytest.mark.parametrize("rooms", [[10**6, 10**6], [10**6, 100], [2048]], ids=str)
def test_several_ranks_agree_on_a_budget(rooms: list[int], folder: Path) -> None:
    """Another rank with little room decides: no kept activations, or no run at all."""
    from torch._dynamo.utils import counters

    work, _ = measured(folder, "bf16")
    trainer = trainer_of(WAYS["zero3"], work)
    others = iter(rooms)
    options = {"tokens": None, "recompute": None, "offload": False, "compiled": True}
    arguments = (trainer.policy, trainer, lambda own: min(own, next(others)))
    if len(rooms) == 1:
        with pytest.raises(NoRoom, match="2048 tokens, but 3072"):
            agree_on_budget(*arguments, largest_pair=512, **options)
        return
    if rooms[1] == 100:
        others = iter([rooms[0], *[100] * 3])
    budget = agree_on_budget(*arguments, largest_pair=512, **options)
    assert budget.recompute == ("none" if rooms[1] > 100 else "full")
    assert budget.tokens == TOKENS["cuda"]
    train(trainer, work)
    counters.clear()
    train(trainer, work)
    assert not counters["stats"]["unique_graphs"]  # nothing is compiled again
