"""A local Ray that misses its own deadlines on a busy machine is tried once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from rather.cluster import resources
from rather.errors import WorkerError


@pytest.mark.parametrize(("failures", "starts"), [(1, True), (2, False)])
def test_a_local_ray_has_two_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, starts: bool
) -> None:
    tried: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        tried.append(options)
        if len(tried) <= failures:
            raise Exception("The current node timed out during startup")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as it may be set already: no file is made
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if starts:
        assert resources.connected(None, 3, tmp_path) == (ray, True)
    else:
        with pytest.raises(WorkerError, match="a local Ray did not start: The current node timed out"):
            resources.connected(None, 3, tmp_path)
    assert len(tried) == 2
    assert tried[0] == tried[1]
    assert tried[0]["resources"] == {resources.SLOT: 3.0}
