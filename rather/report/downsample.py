"""Fewer points that draw the same line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def thinned(
    x: Sequence[Any], y: Sequence[float | None], most: int = 1000
) -> tuple[list[Any], list[float | None]]:
    """At most `most` points: the first, the last, and of each stretch the lowest, the highest and one gap.

    No spike and no NaN is lost, which an average, or every n-th point, would do.
    """
    if len(x) <= most:
        return list(x), list(y)
    import numpy as np

    values = np.asarray(y, dtype=np.float64)
    edges = np.linspace(0, len(values), max(1, (most - 2) // 3) + 1).astype(int).tolist()
    kept = {0, len(values) - 1}
    for start, end in pairwise(edges):
        finite = np.isfinite(values[start:end])
        if not finite.all():
            kept.add(start + int(finite.argmin()))
        if finite.any():
            stretch = np.where(finite, values[start:end], np.nan)
            kept |= {start + int(np.nanargmin(stretch)), start + int(np.nanargmax(stretch))}
    places = sorted(kept)
    return [x[place] for place in places], [y[place] for place in places]
