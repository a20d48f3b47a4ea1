"""The table of tests that `make test` leaves out names tests that exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import run_wide
from tests.house.source import ROOT, nodes
from tests.run_wide import division
from tests.wide import COLLECTED, WIDE, _pattern, is_wide


def test_each_key_names_a_test_that_exists() -> None:
    for key in WIDE:
        file, _, rest = key.partition("::")
        path = ROOT / "tests" / file
        if key.endswith("/"):
            assert path.is_dir(), key
            continue
        assert path.is_file(), key
        names = [n.name for n in nodes(path) if isinstance(n, ast.FunctionDef)]
        pattern = rest.partition("[")[0]
        assert not pattern or any(re.fullmatch(pattern, name) for name in names), key


def test_each_cell_exists_and_each_function_keeps_one_in_make_test() -> None:
    """Of the files that this session has collected: in make test, of all."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in COLLECTED:
        functions[item.nodeid.partition("[")[0]].append(item)
    for key in WIDE:
        start, _, rest = key.partition("[")
        function = _pattern(start)
        ids = [i.nodeid for name in functions if function.match(name) for i in functions[name]]
        for cell in re.split(r"\|(?![^(]*\))", rest[:-1]) if rest and ids else []:
            assert any(_pattern(f"{start}[{cell}]").match(id_) for id_ in ids), (key, cell)
    whole = [_pattern(key) for key in WIDE if "[" not in key]
    for name, items in functions.items():
        if not any(pattern.match(name) for pattern in whole):
            assert any(map(is_whole_or_fast, items)), f"{name}: no cell in make test"


def is_whole_or_fast(item: pytest.Item) -> bool:
    """Return whether a test runs in `make test`, or its whole function is marked as wide."""
    cell = getattr(item, "callspec", None)
    own = cell.marks if cell else ()
    marks = [mark for mark in item.iter_markers() if mark.name in ("wide", "alone")]
    return any(mark not in own for mark in marks) or not (marks or is_wide(item.nodeid))


def test_cells_and_files_are_matched() -> None:
    assert is_wide("tests/docs/test_newcomer.py::test_the_walkthrough_is_complete")
    cell = "tests/api/test_ranks.py::test_coati_on_two_ranks"
    assert is_wide(f"{cell}[zero2]")
    assert not is_wide(f"{cell}[ddp]")
    assert is_wide("tests/bench/test_common.py::test_rates_of_a_cell")
    assert not is_wide("tests/train/test_trainer.py::test_clipping")


def test_the_parts_of_the_wide_tests_hold_each_file_once() -> None:
    files = {f"tests/{room}/a{number}.py" for room in ("cluster", "data") for number in range(9)}
    chosen = division(files, 3)
    assert chosen.keys() == files
    for room in ("cluster", "data"):  # all take as long as far as anyone knows
        parts = Counter(part for file, part in chosen.items() if room in file)
        assert parts == {1: 3, 2: 3, 3: 3}


def test_a_part_that_has_run_does_not_change_what_the_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_wide, "RESULTS", tmp_path / "wide.json")
    files = {f"tests/a{number}.py" for number in range(20)}
    run_wide.plan(3, again=False)
    planned = division(files, 3)
    took = {file: 100.0 for file, part in planned.items() if part == 1}
    results = run_wide.read_results() | {"parts": {"1/3": {}}, "seconds": took}
    run_wide.write_results(results)
    run_wide.plan(3, again=False)
    assert division(files, 3) == planned
    run_wide.plan(2, again=False)  # another division begins with what is known now
    assert run_wide.read_results()["planned"] == took


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"failures": ["tests/a.py::b"]}, "red"),
        ({"changed": True}, "another content"),
        ({"commit": "HEAD~1000000"}, "another content"),
        ({"again": [{"commit": "HEAD", "changed": True}]}, "another content"),
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


def test_what_failed_is_run_again_and_stored_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "wide.json"
    green = {"failures": [], "failed": 0, "passed": 1}
    red = {"failures": ["tests/a.py::b", "tests/a.py::c"], "failed": 2, "passed": 3}
    stored.write_text(json.dumps({"parts": {"1/2": green, "2/2": red}}), encoding="utf-8")
    monkeypatch.setattr(run_wide, "RESULTS", stored)
    outcomes = {"tests/a.py::b": "failed", "tests/a.py::c": "passed"}

    def run_pytest(arguments: list[str], _: Path) -> tuple[int, list[run_wide.Case]]:
        names = arguments[arguments.index("-n0") + 1 :]
        return 1, [run_wide.Case(name, "tests/a.py", outcomes[name], 1.0) for name in names]

    monkeypatch.setattr(run_wide, "run_pytest", run_pytest)
    assert not run_wide.run_again([])
    outcomes["tests/a.py::b"] = "passed"
    assert run_wide.run_again([])
    parts = run_wide.read_results()["parts"]
    assert parts["1/2"] == green
    assert (parts["2/2"]["failures"], parts["2/2"]["failed"], parts["2/2"]["passed"]) == ([], 0, 5)
    assert [run["passed"] for run in parts["2/2"]["again"]] == [
        ["tests/a.py::c"],
        ["tests/a.py::b"],
    ]
    assert {run["commit"] for run in parts["2/2"]["again"]} == {run_wide.git("rev-parse", "HEAD")}


def test_a_clone_answers_and_a_shallow_one_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(folder: Path, *words: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    origin, stored = tmp_path / "origin", tmp_path / "wide.json"
    tested = origin / "rather" / "train"
    tested.mkdir(parents=True)
    git(tmp_path, "init", "-q", str(origin))
    (tested / "a.py").write_text("")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "one")
    ran = git(origin, "rev-parse", "HEAD")
    git(origin, "commit", "-q", "--allow-empty", "-m", "two")
    part = {"commit": ran, "changed": False, "failures": [], "division": "one"}
    stored.write_text(json.dumps({"parts": {"1/1": part}}), encoding="utf-8")
    monkeypatch.setattr(run_wide, "RESULTS", stored)
    for name, depth in (("full", []), ("shallow", ["--depth", "1"])):
        git(tmp_path, "clone", "-q", *depth, origin.as_uri(), name)
        monkeypatch.setattr(run_wide, "ROOT", tmp_path / name)
        expected = "git fetch --unshallow" if depth else ""
        assert expected in "".join(run_wide.problems())
        assert bool(run_wide.problems()) == bool(expected)
    (origin / "rather" / "train" / "a.py").write_text("changed = True")
    git(origin, "commit", "-qam", "three")
    monkeypatch.setattr(run_wide, "ROOT", origin)
    (problem,) = run_wide.problems()
    assert "part 1/1 ran with another content" in problem
    git(origin, "revert", "--no-edit", "HEAD")  # what was tested is back
    assert not run_wide.problems()
