"""Out of memory on Ray: a role of one rank uses smaller micro-batches, with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import incidents
from tests.train.test_shortage import SAID, assert_same_result, run

WORKER = "tests.cluster.workers.SmallDevice"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_role_of_one_rank_uses_smaller_micro_batches(tmp_path: Path) -> None:
    apart = {
        "reference__device_mapping": [1],
        "reference__cache__enabled": False,
        "reference__worker_cls": WORKER,
    }
    config, lines = run(tmp_path, "small", actor_train__worker_cls=WORKER, **apart)
    assert_same_result(tmp_path, config, lines)
    told = incidents(config)
    assert {each["kind"] for each in told} == {"out_of_memory"}
    for role in ("actor_train", "reference"):
        mine = [each for each in told if each["role"] == role]
        assert mine[-1]["budget"] <= 60
        assert mine[0]["said"] == SAID
