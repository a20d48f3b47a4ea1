"""The short form of `make soak`: a few random faults in each layout, the same ones every time."""

from __future__ import annotations

import pytest

from tests.faults.soak import Soak
from tests.faults.world import World


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "faults", "seed"), [("one", 8, 1), ("one", 8, 2), ("dp2", 6, 3), ("ray", 3, 4)]
)
def test_random_faults_end_as_no_fault(world: World, layout: str, faults: int, seed: int) -> None:
    soak = Soak(world, seed, print)
    soak.run(layout, faults)
    assert soak.struck > 0
