"""One local Ray for all tests of this folder that do not end it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

SLOTS = 8


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of eight CPU workers, started as a run starts it. Pipelines find it and leave it
    running."""
    from rather.cluster.resources import connected, private_folder

    folder = private_folder()
    ray, _ = connected(None, SLOTS, folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
