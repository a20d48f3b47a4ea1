"""The table of tests that `make test` leaves out names tests that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import run_wide
from tests.house.source import ROOT, nodes
from tests.run_wide import files_of_part
from tests.wide import WIDE, is_wide


def test_each_key_names_a_test_that_exists() -> None:
    for key in WIDE:
        file, _, rest = key.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), key
        names = [n.name for n in nodes(path) if isinstance(n, ast.FunctionDef)]
        pattern = rest.partition("[")[0]
        assert not pattern or any(re.fullmatch(pattern, name) for name in names), key


def test_cells_and_files_are_matched() -> None:
    assert is_wide("tests/docs/test_newcomer.py::test_the_walkthrough_is_complete")
    assert is_wide("tests/adapters/test_run.py::test_killed_and_resumed_to_the_bit[pissa]")
    assert not is_wide("tests/adapters/test_run.py::test_killed_and_resumed_to_the_bit[lora]")
    assert not is_wide("tests/train/test_trainer.py::test_clipping")


def test_the_parts_of_the_wide_tests_hold_each_file_once() -> None:
    files = {f"tests/a{number}.py" for number in range(20)}
    parts = [files_of_part(files, part, 3) for part in (1, 2, 3)]
    assert set.union(*parts) == files
    assert sum(map(len, parts)) == len(files)
    assert min(map(len, parts)) >= 6  # all take as long as far as anyone knows


def test_a_part_that_has_run_does_not_change_what_the_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_wide, "RESULTS", tmp_path / "wide.json")
    files = {f"tests/a{number}.py" for number in range(20)}
    run_wide.plan(3, again=False)
    planned = [files_of_part(files, part, 3) for part in (1, 2, 3)]
    took = dict.fromkeys(planned[0], 100.0)
    results = run_wide.read_results() | {"parts": {"1/3": {}}, "seconds": took}
    run_wide.write_results(results)
    run_wide.plan(3, again=False)
    assert [files_of_part(files, part, 3) for part in (1, 2, 3)] == planned
    run_wide.plan(2, again=False)  # another division begins with what is known now
    assert run_wide.read_results()["planned"] == took


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"failures": ["tests/a.py::b"]}, "red"),
        ({"changed": True}, "older"),
        ({"commit": "HEAD~1000000"}, "older"),
        ({"division": "other"}, "added or removed between the parts"),
        (None, "has not run"),
    ],
)
def test_a_part_that_is_red_missing_or_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None, text: str
) -> None:
    good = {"commit": "HEAD", "changed": False, "failures": [], "division": "one"}
    parts = {"1/2": good, "2/2": good if changes is None else {**good, **changes}}
    if changes is None:
        del parts["2/2"]
    stored = tmp_path / "wide.json"
    stored.write_text(json.dumps({"parts": parts, "seconds": {}}), encoding="utf-8")
    monkeypatch.setattr(run_wide, "RESULTS", stored)
    found = run_wide.problems()
    assert len(found) == bool(text)
    assert text in "".join(found)
