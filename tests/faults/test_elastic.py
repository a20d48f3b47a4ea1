"""The same command in one process, on two ranks and in one again resumes unchanged."""

from __future__ import annotations

import json

import pytest

from tests.faults.points import kill
from tests.faults.world import World

IN_TURN = {
    "checkpoint_config__async_save": "off"
}  # what is killed in the step after a save finds it done
ZERO3 = {**IN_TURN, "actor_train__strategy_args__strategy_name": "zero3"}


def test_another_number_of_ranks_at_every_start(world: World) -> None:
    expected = world.clean("one").metrics
    run = world.run("one", IN_TURN)
    assert run.start(kill("backward", step=3)) == [-9]
    run.layout, run.changes = "dp2", ZERO3
    assert run.start(kill("backward", step=5, rank=1))[1] == -9
    run.layout, run.changes = "one", IN_TURN
    assert run.start() == [0], run.output()
    starts = list(map(json.loads, (run.config.run_dir / "starts.jsonl").read_text().splitlines()))
    assert [(start["step"], start["environment"]["devices"]) for start in starts] == [
        (0, 1),
        (2, 2),
        (4, 1),
    ]
    got = run.outcome().metrics
    assert [(line["step"], line.keys()) for line in got] == [
        (line["step"], line.keys()) for line in expected
    ]
    for name in ("loss", "eval/loss", "grad_norm", "rewards/margins"):
        before, after = (
            [line[name] for line in lines if name in line] for lines in (expected, got)
        )
        assert after == pytest.approx(before, rel=1e-5, abs=1e-7), name
