"""determinism: canonical on Ray: workers write the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rather.pipeline.pipeline import DPOPipeline
from tests.same.test_canonical import assert_same_bits, run_config


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_workers_on_ray_write_the_bits_of_one_process(tmp_path: Path) -> None:
    alone, both = run_config(tmp_path, 1, "zero1"), run_config(tmp_path, 2, "zero1")
    assert [DPOPipeline(config).run() for config in (alone, both)] == [0, 0]
    assert_same_bits(both, alone)
