"""The table of tests that `make test` leaves out names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.house.source import ROOT, tree
from tests.wide import WIDE, is_wide


def test_each_key_names_a_test_that_exists() -> None:
    for key in WIDE:
        file, _, rest = key.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), key
        names = [n.name for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)]
        pattern = rest.partition("[")[0]
        assert not pattern or any(re.fullmatch(pattern, name) for name in names), key


def test_cells_and_files_are_matched() -> None:
    assert is_wide("tests/docs/test_newcomer.py::test_the_walkthrough_is_complete")
    assert is_wide("tests/train/test_resume.py::test_killed_after_any_step[6]")
    assert not is_wide("tests/train/test_resume.py::test_killed_after_any_step[1]")
    assert not is_wide("tests/train/test_trainer.py::test_clipping")
