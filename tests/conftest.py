"""What every test relies on: one thread, one seed, no network, and the team's data where it is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before any library reads them: tests never ask a hub, and bits do not depend on the core count.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums differ in their last bit between one thread and two; tests that compare bits need one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Each test starts from one seed and leaves no global torch setting to the next."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def team_data() -> Path:
    """The folder of real models, pairs and tokenizers that RATHER_TEST_DATA names; tests skip without it."""
    given = os.environ.get("RATHER_TEST_DATA")
    if not given:
        pytest.skip("RATHER_TEST_DATA names no folder with models/, pairs/ and tokenizers/")
    folder = Path(given).resolve()
    if not folder.is_dir():
        pytest.fail(f"RATHER_TEST_DATA: {folder} is no folder; name the one with models/ and pairs/")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Folders whose tests share costly processes go to one worker, those with a Ray to the same one. Elsewhere a file does.
SHARING = {"tests/cluster/": "ray", "tests/faults/": "ray", "tests/same/": "ranks"}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class BySharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group for folder, group in SHARING.items() if file.startswith(folder)), file)

    return BySharing(config, log)
