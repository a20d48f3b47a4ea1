"""The tiny runs of a session: the base model is trained once, and so is each run."""

from __future__ import annotations

import pytest

from rather.config.run_config import DPOConfig
from tests.health.tiny_runs import EASY, TinyRuns, measures_all


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    return TinyRuns(tmp_path_factory.mktemp("tiny_runs"))


@pytest.fixture(scope="session")
def measured_run(tiny_runs: TinyRuns) -> DPOConfig:
    return tiny_runs.trained("measured", EASY, **measures_all(tiny_runs.folder))
