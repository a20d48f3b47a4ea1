"""A local Ray starts: on a busy machine at a later try, and where a script imported Ray
before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rather.cluster import resources
from rather.errors import WorkerError

RAYLET = """\
[2026-11-16 06:53:01,100 I 4564 4564] (raylet) main.cc:12: Starting.
[2026-11-16 06:53:03,207 C 4564 4564] (raylet) node_manager.cc:3576:  An unexpected system state \
has occurred. Check failed: status.has_value() Timed out waiting for file /tmp/ray/agent_port_1
"""


@pytest.mark.parametrize(("failures", "starts"), [(3, True), (4, False)])
def test_a_local_ray_has_four_tries_and_quotes_its_raylet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, starts: bool
) -> None:
    import ray

    tried: list[dict[str, Any]] = []
    pauses: list[float] = []
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(RAYLET)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(resources, "private_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(resources.time, "sleep", pauses.append)

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
        with pytest.raises(WorkerError, match="did not start in 4 attempts: The current") as found:
            resources.connected(None, 3, tmp_path)
        assert "raylet: status.has_value() Timed out waiting for file" in str(found.value)
        assert "torchrun --nproc-per-node 3 -m rather train" in str(found.value)
    assert len(tried) == 4
    assert pauses == sorted(set(pauses))  # they grow
    ports = [options.pop("_metrics_export_port") for options in tried]
    assert all(ports)  # a free one each time
    assert tried[0] == tried[3]
    assert tried[0]["_temp_dir"] == str(tmp_path / "ray")
    assert tried[0]["resources"] == {resources.SLOT: 3.0}


SCRIPT = """
import os
import ray
from pathlib import Path
from rather.cluster.resources import ResourceManager
from tests.cluster.test_ray_security import LOOPBACK, listening

for _ in range(2):
    manager = ResourceManager(1, 1)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    found = listening()
    assert found and found <= LOOPBACK, found
    assert ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote()) == 7
    manager.close()
    assert not token.exists()
print("both")
"""


@pytest.mark.wide
@pytest.mark.slow
def test_a_script_may_import_ray_first_and_have_two_of_them() -> None:
    """Ray reads its environment when it is imported: loopback and the token of each run reach it
    all the same."""
    unset = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=unset, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.split() == ["both"], ended.stderr
