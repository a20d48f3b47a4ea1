"""A kill -9 at any file operation of a save or a prune leaves a good checkpoint: the old or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import rather.checkpoint.checkpoint

HERE = Path(__file__).parent
ROOT = Path(rather.checkpoint.checkpoint.__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "kill_points.py"), str(tmp_path_factory.mktemp("kills"))]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, done.stdout.splitlines()):
        lines[line["scenario"]].append(line)
    return lines


@pytest.mark.parametrize(
    ("scenario", "before", "points"),
    [
        ("first_save", None, 15),
        ("next_save", 1.0, 15),
        ("by_ranks", 1.0, 15),
        ("same_step_again", 1.0, 20),
        ("prune", 2.0, 10),
    ],
)
def test_killed_at_every_operation(
    outcomes: dict[str, list[dict[str, Any]]], scenario: str, before: float | None, points: int
) -> None:
    lines = outcomes[scenario]
    assert sum(line["killed"] for line in lines) >= points
    assert lines[0]["content"] == before, "nothing had been done at the first point"
    assert lines[-1]["content"] == 2.0, "the last line is the one that was not killed"
    assert {line["content"] for line in lines} == {before, 2.0}


def test_the_next_save_works_and_cleans_up(outcomes: dict[str, list[dict[str, Any]]]) -> None:
    for line in (line for lines in outcomes.values() for line in lines):
        assert line["after"] == 9.0, line
        assert line["left"] == [], line
