"""The village of a session: its base model is trained once, and so is each of its runs."""

from __future__ import annotations

import pytest

from tests.health.village import Village


@pytest.fixture(scope="session")
def village(tmp_path_factory: pytest.TempPathFactory) -> Village:
    return Village(tmp_path_factory.mktemp("village"))
