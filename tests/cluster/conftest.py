"""One local Ray for all tests of this folder that do not end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SLOTS = 8


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of eight CPU workers, started as a run starts it. Pipelines find it and leave it
    running."""
    from rather.cluster.resources import connected

    folder: Path = tmp_path_factory.mktemp("token")
    ray, _ = connected(None, SLOTS, folder)
    yield
    ray.shutdown()
