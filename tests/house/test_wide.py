"""The list of tests that `make test` leaves out names tests that exist, and only a few of them."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.house.source import ROOT
from tests.wide import WIDE, is_wide


def test_each_line_names_tests_that_exist() -> None:
    folders = ["tests/train", "tests/cluster", "tests/faults", "tests/same"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "--all",
        "-p",
        "no:cacheprovider",
        *folders,
    ]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in shown.splitlines() if "::" in line]
    for pattern in WIDE:
        assert any(re.match(pattern, test) for test in tests), f"{pattern} names no test"
    assert sum(map(is_wide, tests)) < 0.1 * len(tests)
