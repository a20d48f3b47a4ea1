"""The model that all trainers of rather.trl train."""

from __future__ import annotations

import pytest

from tests.golden.trl_run import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("trl") / "model"))
