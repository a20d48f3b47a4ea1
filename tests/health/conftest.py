"""The tiny runs of a session: the base model is trained once, and so is each run."""

from __future__ import annotations

import pytest

from tests.health.tiny_runs import TinyRuns


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    return TinyRuns(tmp_path_factory.mktemp("tiny_runs"))
