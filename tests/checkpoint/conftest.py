"""One uninterrupted run that others are compared with, and the model, pairs and caches that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.runs import train


@pytest.fixture(autouse=True)
def load_unchecked(no_self_check: None) -> None:
    """Load every model of this folder without its check."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("checkpoints")
    assert train(found, "whole", checkpoint_config__async_save="off") == 0
    return found
