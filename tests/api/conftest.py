"""The base model that all tests of the Python API load, and pairs in the forms that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.api.collate import DataCollatorForPreferenceDataset
from rather.data.batch import TokenPair
from tests.padded import random_pairs
from tests.tiny import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("api") / "base")


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def rows(pair: TokenPair) -> dict[str, list[int]]:
    """A pair as a tokenised row."""
    found: dict[str, list[int]] = {}
    for side in ("chosen", "rejected"):
        ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
        mask = [0] * len(ids)
        for first, last in getattr(pair, f"{side}_scored"):
            mask[first:last] = [1] * (last - first)
        found |= {f"{side}_input_ids": ids, f"{side}_loss_mask": mask}
    return found


TOKENS = [rows(pair) for pair in random_pairs(14, 60, seed=5)]


def padded(pairs: list[TokenPair], folder: Path) -> dict[str, torch.Tensor]:
    collate = DataCollatorForPreferenceDataset(AutoTokenizer.from_pretrained(folder))
    return collate([rows(pair) for pair in pairs])
