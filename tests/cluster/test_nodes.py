"""Two Ray nodes on one machine: roles run where configured, and a third node is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT


@pytest.mark.wide
@pytest.mark.slow
def test_roles_are_placed_as_configured_and_a_third_node_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.two_nodes", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = set(found["actor_train"]), set(found["reference"])
    assert len(first) == len(second) == 1
    assert first != second
    assert found["seconds"] < 10
    assert (
        "num_nodes 3 x num_gpus_per_node 2 = 6 CPU workers (rather_slot) are requested"
        in found["error"]
    )
    assert "has 2 + 2 on 2 nodes, so 2 of 3 nodes have 2: 1 missing" in found["error"]
