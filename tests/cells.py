"""Cells of a matrix that is too large to run: some in `make test`, some in `make test-wide`.

A cell that neither runs is not written: it would prove nothing. The wide ones are chosen so that
each value of each axis occurs at least once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cells(fast: Iterable[Any], wide: Iterable[Any]) -> list[Any]:
    """Return the values of a parametrization, the second ones marked wide. A tuple is one cell."""
    return [*fast, *(pytest.param(*_values(cell), marks=pytest.mark.wide) for cell in wide)]


def _values(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)
