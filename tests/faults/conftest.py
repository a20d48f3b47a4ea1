"""One world of runs for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.points import changes_for
from tests.faults.world import World

Broken = Callable[[str, str], None]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("faults"))
    yield world
    world.close()


@pytest.fixture(scope="session")
def broken(world: World) -> Broken:
    """Breaks a run and starts it until it ends; it must then be as the one that nobody broke."""

    def check(layout: str, fault: str) -> None:
        clean = world.clean(layout, changes_for(fault))
        run = world.run(layout, changes_for(fault))
        run.until_it_ends(fault)
        run.assert_like(clean)

    return check


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked faults_all take most of an hour and run when they are asked for: make test-faults."""
    if "faults_all" in config.option.markexpr:
        return
    later = [item for item in items if item.get_closest_marker("faults_all")]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in set(later)]
