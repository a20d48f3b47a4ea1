"""A tiny model, pairs and the tokenised data cache, shared by runs that differ in their name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_config


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_config(folder)
    return folder
