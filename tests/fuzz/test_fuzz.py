"""Thirty seconds of `make fuzz`, and the bugs that are planted to see whether it finds any."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.planted import BUGS

ROOT = Path(__file__).parents[2]


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, whose children are forked before torch has threads."""
    arguments = [sys.executable, "-m", "tests.fuzz", "--seed", "1", *options]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)


def test_thirty_seconds_find_nothing() -> None:
    done = fuzz("--minutes", "0.5", "--most", "60", "--planted", "no", "--json")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["inputs"].keys() == KINDS.keys()
    assert result["findings"] == 0


@pytest.mark.wide
def test_planted_bugs_are_found() -> None:
    done = fuzz("--minutes", "15", "--planted", "only")
    found = [line for line in done.stdout.splitlines() if "planted bug found: " in line]
    assert len(found) == len(BUGS) >= 5, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0
