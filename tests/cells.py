"""Parameters of tests: cells of a matrix that is too large to run, and tables written as text.

Of a matrix some cells run in `make test` and some in `make test-wide`. A cell that neither runs is
not written: it would prove nothing. The wide ones are chosen so that each value of each axis occurs
at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cells(fast: Iterable[Any], wide: Iterable[Any]) -> list[Any]:
    """Return the values of a parametrization, the second ones marked wide. A tuple is one cell."""
    return [*fast, *(pytest.param(*_values(cell), marks=pytest.mark.wide) for cell in wide)]


def _values(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def read_table(text: str, read: Callable[[str], Any] = str.strip) -> list[Any]:
    """Return the parameters of a table: cells between bars, and the defect of a line after `##`."""
    parameters = []
    for line in text.strip().splitlines():
        row, _, defect = line.partition(" ## ")
        marks = [pytest.mark.defect(defect)] if defect else []
        if not row.strip().startswith("#"):
            parameters.append(pytest.param(*map(read, row.split("|")), marks=marks))
    return parameters
