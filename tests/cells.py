"""Cells of a matrix: those to keep run in `make test`, the others are wide."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cells(every: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Return the values of a parametrization, with all but `keep` marked wide. A tuple is one
    cell."""
    return [
        each
        if each in keep
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.wide)
        for each in every
    ]
