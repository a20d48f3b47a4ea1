"""Killed anywhere, the same command ends with the same bits: in one process, on two ranks, on Ray."""

from __future__ import annotations

import pytest

from tests.cells import cells
from tests.faults.conftest import Broken
from tests.faults.inject import PHASES
from tests.faults.points import (
    FAMILIES,
    MORE_FAMILIES,
    MORE_TWO_RANKS,
    OF_EVERY_RANK,
    ONE,
    RAY,
    TWO_RANKS,
    kill,
)
from tests.faults.world import World


@pytest.mark.parametrize("fault", cells(FAMILIES, MORE_FAMILIES))
def test_one_process(broken: Broken, fault: str) -> None:
    broken("one", fault)


@pytest.mark.parametrize("fault", cells(TWO_RANKS, MORE_TWO_RANKS))
def test_one_of_two_ranks(broken: Broken, fault: str) -> None:
    broken("dp2", fault)


@pytest.mark.wide
def test_random_numbers_continue_after_a_resume(world: World) -> None:
    """Of a loss that draws them: those of a step are not those of the first steps again."""
    drawing = {"actor_train__worker_cls": "tests.faults.runs.Drawing"}
    clean = world.clean("one", drawing)
    run = world.run("one", drawing)
    run.until_it_ends(kill("optimizer.done", step=5))
    run.assert_like(clean)


@pytest.mark.slow
@pytest.mark.wide
def test_workers_and_driver_on_ray(broken: Broken) -> None:
    """One run, killed at all these points one after another: every start imports torch in two processes."""
    broken("ray", ";".join(RAY))


@pytest.mark.faults_all
@pytest.mark.parametrize("fault", ONE)
def test_every_point_in_one_process(broken: Broken, fault: str) -> None:
    broken("one", fault)


@pytest.mark.faults_all
@pytest.mark.parametrize(
    "fault",
    [*(kill(phase, rank=0) for phase in PHASES), *(kill(phase, rank=1) for phase in OF_EVERY_RANK)],
)
def test_every_point_on_two_ranks(broken: Broken, fault: str) -> None:
    broken("dp2", fault)


@pytest.mark.faults_all
@pytest.mark.parametrize("phase", PHASES)
def test_every_point_on_ray(broken: Broken, phase: str) -> None:
    broken("ray", kill(phase))
