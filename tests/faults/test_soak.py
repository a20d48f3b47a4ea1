"""A few random faults in each layout, the same ones every time; kills and stops at any moment."""

from __future__ import annotations

import pytest

from tests.faults.soak import Soak
from tests.faults.strikes import LAYOUTS, Strikes
from tests.faults.world import World


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "faults", "seed"), [("one", 4, 1), ("dp2", 3, 3), ("ray", 2, 4)]
)
def test_random_faults_end_as_no_fault(world: World, layout: str, faults: int, seed: int) -> None:
    soak = Soak(world, seed, print)
    soak.run(layout, faults)
    assert soak.struck > 0


@pytest.mark.faults_all
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_kills_and_stops_end_in_the_same_bits(world: World, layout: str) -> None:
    """Forty in all, at any moment and at any process of the run."""
    strikes = Strikes(world, 18, print)
    strikes.run(layout, 20)
    assert strikes.struck == 20
