"""What every test relies on: one thread, one seed, no network, and data if it is configured."""

from __future__ import annotations

import gc
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before any library reads them: tests never ask a hub, and bits do not depend on the core count.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On Arm, oneDNN takes ten times as long as BLAS for a product of a tiny model (0.8 ms of overhead).
if platform.machine() == "aarch64":
    os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", str(2**30))
# Only make test-gpu sets it; all other tests run on the CPU, on every machine.
if not os.environ.get("RATHER_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from tests.browser import browser as browser
from tests.browser import open_page as open_page
from tests.sharing import GROUPS, group_of
from tests.wide import COLLECTED, is_wide


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums differ in their last bit between one thread and two; tests that compare bits need one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keys that sign runs and verdicts are not in the home of whoever runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Each test starts from one seed and leaves no global torch setting to the next."""
    # Without CUDA, torch.manual_seed keeps each call with its stack for later: 2.5 ms and memory.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models without their check: half the time of a tiny run, with tests of its own."""
    for name in ("check_family", "check_model"):
        monkeypatch.setattr(f"rather.parallel.load.{name}", lambda _: None)


@pytest.fixture(scope="session")
def team_data() -> Path:
    """The folder of real models, pairs and tokenizers that RATHER_TEST_DATA names; tests skip without it."""
    given = os.environ.get("RATHER_TEST_DATA")
    if not given:
        pytest.skip("RATHER_TEST_DATA names no folder with models/, pairs/ and tokenizers/")
    folder = Path(given).resolve()
    if not folder.is_dir():
        pytest.fail(
            f"RATHER_TEST_DATA: {folder} is not a folder; set it to the one with models/ and pairs/"
        )
    return folder


def pytest_collection_finish() -> None:
    """Leave imports and collected tests out of garbage collections: each took 0.4 seconds more."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also what tests/wide.py lists, as make test-all does"
    )
    parser.addoption("--wide-only", action="store_true", help="only wide cells: make test-wide")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without a CUDA device; leave wide cells to --all."""
    COLLECTED[:] = items
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="a CUDA device is needed: make test-gpu"))
    if not config.option.all:
        sides: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            sides[_is_wide(item)].append(item)
        config.hook.pytest_deselected(items=sides[not config.option.wide_only])
        items[:] = sides[config.option.wide_only]
    items.sort(key=lambda item: _order(item.nodeid))


def _is_wide(item: pytest.Item) -> bool:
    marks = any(item.get_closest_marker(name) for name in ("wide", "alone"))
    return marks or is_wide(item.nodeid)


# A file that takes half a minute must not be the last one to start.
LONG_FILES = re.compile(
    r"rounds/test_rounds|train/test_pipeline|train/test_tasks|sweep/|plan/test_run"
)


def _order(test: str) -> tuple[int, bool]:
    return GROUPS.index(group_of(test)), not LONG_FILES.match(test.removeprefix("tests/"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class BySharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = group_of(nodeid)
            return nodeid.partition("::")[0] if group == "others" else group

    return BySharing(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what did not run, in groups: how many tests, why, and how to run them."""
    skips = terminalreporter.stats.get("skipped", [])
    groups = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skips)
    if groups:
        terminalreporter.section("not run")
    for reason, count in groups.most_common():
        terminalreporter.write_line(f"{count:5} {reason}", yellow=True)
    if not config.option.all and not config.option.wide_only:
        terminalreporter.write_line("Further cells of the matrices: make test-wide")
