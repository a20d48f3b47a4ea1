"""The table of bad inputs names all sixty-four, and for each a test that exists."""

from __future__ import annotations

import re

from tests.house.source import ROOT, function_names

PAGE = ROOT / "docs" / "promises.md"
HEADING = "## Bad inputs and faults"
EXITS = {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "130", "143"}


def rows() -> dict[int, list[str]]:
    lines = PAGE.read_text(encoding="utf-8").split(HEADING)[1].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if re.match(r"\| \d+ \|", line)
    ]
    return {int(row[0]): row for row in cells}


def test_all_are_there_in_order_with_an_exit_code() -> None:
    assert list(rows()) == list(range(1, 65))
    for number, row in rows().items():
        assert len(row) == 5, f"{number}: {row}"
        assert set(re.split(r"[,;] ", row[3])) <= EXITS, f"{number}: exit {row[3]}"


def test_every_test_that_is_named_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = []
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        path = ROOT / "tests" / file
        if not path.exists() or name not in function_names(path):
            missing.append(f"{file}::{name}")
    assert not missing, missing


def test_every_case_has_a_test() -> None:
    assert not [
        number for number, row in rows().items() if not re.search(r"`[\w/]+\.py::test_\w+`", row[4])
    ]
