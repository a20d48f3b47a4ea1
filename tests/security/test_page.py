"""Every promise of SECURITY.md names tests that exist."""

from __future__ import annotations

import re

from tests.house.source import ROOT, function_names


def test_every_promise_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
    rows = [line for table in tables for line in table.splitlines()]
    assert len(tables) == 6
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert name in function_names(ROOT / "tests" / file), (file, name)
