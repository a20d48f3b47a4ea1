"""Charts: figures in plotly's JSON, drawn by the bundle of the installed package, each with its numbers in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rather.report.document import as_json, escape, slug, table
from rather.report.downsample import thinned

Line = tuple[Sequence[Any], Sequence[float | None]]  # where its points stand, and how high

WHOLE = 24  # points of a chart whose table shows all of them


@cache
def plotly_bundle() -> str:
    """plotly's JavaScript, out of the installed package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def chart(figure: Mapping[str, Any], name: str, description: str) -> str:
    """A labelled chart; names are unique on a page. A colour may be a variable of page.css, such as var(--series-2)."""
    anchor = slug(name)
    height = int(figure.get("layout", {}).get("height", 300))
    return (
        f'<figure class="chart" aria-labelledby="{anchor}-name" aria-describedby="{anchor}-told">'
        f'<figcaption><strong id="{anchor}-name">{escape(name)}</strong> '
        f'<span id="{anchor}-told">{escape(description)}</span></figcaption>'
        f'<div class="plot" id="{anchor}" style="height:{height}px"></div>'
        f'<script type="application/json" class="figure">{as_json(figure)}</script>'
        f"<details><summary>Numbers<span class='unseen'> of {escape(name)}</span></summary>"
        f"{_numbers(figure, name)}</details></figure>"
    )


def lines(
    series: Mapping[str, Line], *, x: str = "step", y: str = "", most: int = 1000
) -> dict[str, Any]:
    """A figure of one line for each name, long ones thinned; a line of few points shows them."""
    traces = []
    for name, (across, up) in series.items():
        xs, ys = thinned(across, up, most)
        mode = "lines+markers" if len(xs) <= WHOLE else "lines"
        traces.append({"type": "scatter", "mode": mode, "name": name, "x": xs, "y": ys})
    titles = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"data": traces, "layout": {**titles, "showlegend": len(traces) > 1}}


def _numbers(figure: Mapping[str, Any], name: str) -> str:
    """All points where they are few and stand at the same places, else what each line comes to."""
    traces = [
        trace for trace in figure["data"] if len(trace.get("x", ())) and len(trace.get("y", ()))
    ]
    names = [str(trace.get("name", "value")) for trace in traces]
    across = list(traces[0]["x"]) if traces else []
    if traces and len(across) <= WHOLE and all(list(trace["x"]) == across for trace in traces):
        axis = figure.get("layout", {}).get("xaxis", {}).get("title", {})
        heading = (axis.get("text") if isinstance(axis, dict) else axis) or "x"
        rows = [
            [place, *(_shown(trace["y"][i]) for trace in traces)] for i, place in enumerate(across)
        ]
        return table(f"{name}: all points", [heading, *names], rows)
    rows = [[label, *_summary(trace["y"])] for label, trace in zip(names, traces, strict=True)]
    return table(f"{name}: summary", ["line", "points", "first", "last", "lowest", "highest"], rows)


def _summary(values: Sequence[float | None]) -> list[object]:
    known = [value for value in values if value is not None and value == value]
    if not known:
        return [0, "-", "-", "-", "-"]
    return [len(known), known[0], known[-1], min(known), max(known)]


def _shown(value: object) -> object:
    return "-" if value is None or value != value else value
