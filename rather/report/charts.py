"""Charts as plotly JSON, drawn in the browser by plotly's own script; each chart also has its
numbers in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from rather.errors import ConfigError
from rather.report.document import Record, as_json, escape, slug, table

Line = tuple[Sequence[Any], Sequence[float | None]]  # x and y of its points

WHOLE = 24  # most points of a chart whose table shows all of them
NO_PLOTLY = "plotly is not installed; `pip install 'rather[report]'` adds it"


def has_plotly() -> bool:
    return find_spec("plotly") is not None


@cache
def plotly_bundle() -> str:
    """Return plotly's JavaScript from the installed package."""
    if not has_plotly():
        raise ConfigError(f"{NO_PLOTLY}.")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def chart(figure: Record, name: str, description: str) -> str:
    """Return a labelled chart; names are unique on a page. A colour may be a CSS variable:
    var(--series-2).
    """
    anchor = slug(name)
    height = int(figure.get("layout", {}).get("height", 300))
    return (
        f'<figure class="chart" aria-labelledby="{anchor}-name" aria-describedby="{anchor}-about">'
        f'<figcaption><strong id="{anchor}-name">{escape(name)}</strong> '
        f'<span id="{anchor}-about">{escape(description)}</span></figcaption>'
        f'<div class="plot" id="{anchor}" style="height:{height}px"></div>'
        f'<script type="application/json" class="figure">{as_json(figure)}</script>'
        f"<details><summary>Numbers<span class='unseen'> of {escape(name)}</span></summary>"
        f"{_numbers(figure, name)}</details></figure>"
    )


def lines(series: Mapping[str, Line], *, x: str = "step", y: str = "", most: int = 1000) -> Record:
    """Return a figure with one line for each name; long lines are downsampled, short ones have
    markers.
    """
    traces = []
    for name, line in series.items():
        xs, ys = downsample(*line, most)
        mode = "lines+markers" if len(xs) <= WHOLE else "lines"
        traces.append({"type": "scatter", "mode": mode, "name": name, "x": xs, "y": ys})
    titles = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"data": traces, "layout": {**titles, "showlegend": len(traces) > 1}}


def downsample(
    x: Sequence[Any], y: Sequence[float | None], most: int = 1000
) -> tuple[list[Any], list[float | None]]:
    """Return at most `most` points: both ends, and lowest, highest and one gap of each stretch.

    No spike and no NaN is lost, as it would be in an average or in every n-th point.
    """
    if len(x) <= most:
        return list(x), list(y)
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


def _numbers(figure: Record, name: str) -> str:
    """Return all points if they are few and share their x values, else a summary of each line."""
    traces = [trace for trace in figure["data"] if len(trace.get("x", ()))]
    names = [str(trace.get("name", "value")) for trace in traces]
    xs = list(traces[0]["x"]) if traces else []
    if traces and len(xs) <= WHOLE and all(list(trace["x"]) == xs for trace in traces):
        heading = figure["layout"]["xaxis"]["title"]["text"]
        columns = zip(*(trace["y"] for trace in traces), strict=True)
        rows = [
            [x, *("-" if y is None or y != y else y for y in ys)]
            for x, ys in zip(xs, columns, strict=True)
        ]
        return table(f"{name}: all points", [heading, *names], rows)
    rows = []
    for label, trace in zip(names, traces, strict=True):
        known = [y for y in trace["y"] if y is not None and y == y]
        ends = [known[0], known[-1], min(known), max(known)] if known else ["-"] * 4
        rows.append([label, len(known), *ends])
    return table(f"{name}: summary", ["line", "points", "first", "last", "lowest", "highest"], rows)
