"""What `make test` leaves to `make test-all`: further cells of a matrix of which the others run every time."""

from __future__ import annotations

import re

WIDE = (
    r"tests/train/test_outcome\.py",  # minutes of real training on all cores
    r"tests/faults/test_full_disk\.py::.*\[ray\]",
    r"tests/faults/test_soak\.py::.*\[one-8-2\]",
)


def is_wide(test: str) -> bool:
    return any(re.match(pattern, test) for pattern in WIDE)
