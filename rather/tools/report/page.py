"""HTML pages: their frame, tables and plotly charts.

Styles and scripts are inside a page, it requests nothing, and data never becomes markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import numpy as np

from rather.errors import ConfigError
from rather.files import JsonObject

Line = tuple[Sequence[Any], Sequence[float | None]]  # x and y of its points

NUMBER = ' class="number"'
LEVELS = {"serious": "bad", "warning": "warn", "info": "muted"}  # severity -> class of page.css
HEADING = re.compile(r'<h2 id="([^"]+)"[^>]*>(.*?)</h2>', re.DOTALL)
WHOLE = 24  # most points of a chart whose table shows all of them
NO_PLOTLY = "plotly is not installed; `pip install 'rather[report]'` adds it"
DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
<script>{frame}</script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header class="top">
<h1>{title}</h1>
<button type="button" id="theme" hidden>Dark theme</button>
</header>
{contents}<main id="main" tabindex="-1">
{body}
</main>
{tail}
</body>
</html>
"""
# Only these scripts run and no other machine is contacted, whatever data contains.
POLICY = (
    "default-src 'none'; script-src 'self' {}; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def page(
    title: str,
    body: str,
    *,
    scripts: Sequence[str] = (),
    data: Any = None,
    linked: Sequence[str] = (),
) -> str:
    """Return a whole document.

    `body` is HTML whose data went through `escape`; its parts begin with `<h2 id=...>`.
    `scripts` are JavaScript sources, placed after the body; a page with charts has plotly_bundle()
    among them, or its address on the same server in `linked`. Scripts read `data` from the element
    with the id "data".
    """
    frame, headings, contents, tail = _asset("page.js"), HEADING.findall(body), "", []
    if len(headings) > 2:
        links = "".join(f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in headings)
        contents = f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>\n'
    if data is not None:
        tail = [f'<script type="application/json" id="data">{as_json(data)}</script>']
    tail += [f'<script src="{escape(address)}"></script>' for address in linked]
    digests = (hashlib.sha256(source.encode()).digest() for source in (frame, *scripts))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return DOCUMENT.format(
        policy=POLICY.format(hashes),
        title=escape(title),
        style=_asset("page.css"),
        frame=frame,
        contents=contents,
        body=body,
        tail="\n".join([*tail, *(f"<script>{source}</script>" for source in scripts)]),
    )


@cache
def _asset(name: str) -> str:
    return files("rather.tools.report").joinpath(name).read_text(encoding="utf-8")


def escape(value: object) -> str:
    """Return the text for use between tags and inside quoted attributes."""
    return html.escape(str(value))


def as_json(value: Any) -> str:
    """Return JSON that cannot close the script element around it; a NaN becomes null."""
    finite = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def slug(name: str) -> str:
    """Return a name as an id: 'Rewards and margins' -> rewards-and-margins."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with escaped cells; the first cell of a row is its heading."""
    rows = [list(row) for row in rows]
    sides = [
        NUMBER if column and any(_is_number(row[column]) for row in rows) else ""
        for column in range(len(headings))
    ]
    names = zip(headings, sides, strict=True)
    head = "".join(f'<th scope="col"{side}>{escape(heading)}</th>' for heading, side in names)
    body = ""
    for first, *other_cells in rows:
        cells = zip(other_cells, sides[1:], strict=True)
        body += f'<tr><th scope="row">{_cell(first)}</th>'
        body += "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in cells) + "</tr>"
    # A region that scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    if value is None or value != value:  # None or NaN
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _is_number(value) else escape(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- charts ---


def has_plotly() -> bool:
    return find_spec("plotly") is not None


@cache
def plotly_bundle() -> str:
    """Return plotly's JavaScript from the installed package."""
    if not has_plotly():
        raise ConfigError(f"{NO_PLOTLY}.")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def chart(figure: JsonObject, name: str, description: str) -> str:
    """Return a labelled chart with its numbers in a table; names are unique on a page.

    A colour may be a CSS variable: var(--series-2).
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


def _numbers(figure: JsonObject, name: str) -> str:
    """Return all points if they are few and share their x values, else a summary of each line."""
    drawn = [trace for trace in figure["data"] if len(trace.get("x", ()))]
    traces = {str(trace.get("name", "value")): trace for trace in drawn}
    columns = [list(trace["x"]) for trace in traces.values()]
    if columns and len(columns[0]) <= WHOLE and columns.count(columns[0]) == len(columns):
        heading = figure["layout"]["xaxis"]["title"]["text"]
        rows = zip(columns[0], *(trace["y"] for trace in traces.values()), strict=True)
        return table(f"{name}: all points", [heading, *traces], rows)
    summary = []
    for label, trace in traces.items():
        heights = [y for y in trace["y"] if y is not None and y == y]
        ends = [heights[0], heights[-1], min(heights), max(heights)] if heights else [None] * 4
        summary.append([label, len(heights), *ends])
    headings = ["line", "points", "first", "last", "lowest", "highest"]
    return table(f"{name}: summary", headings, summary)


def lines(series: Mapping[str, Line]) -> JsonObject:
    """Return a figure with a line for each name over the steps; short lines have markers."""
    traces = []
    for name, line in series.items():
        xs, ys = downsample(*line)
        mode = "lines+markers" if len(xs) <= WHOLE else "lines"
        traces.append({"type": "scatter", "mode": mode, "name": name, "x": xs, "y": ys})
    layout = {"xaxis": {"title": {"text": "step"}}, "showlegend": len(traces) > 1}
    return {"data": traces, "layout": layout}


def downsample(
    x: Sequence[Any], y: Sequence[float | None], most: int = 1000
) -> tuple[list[Any], list[float | None]]:
    """Return at most `most` points: both ends, and lowest, highest and one gap of each stretch.

    No spike and no NaN is lost, as it would be in an average or in every n-th point.
    """
    if len(x) <= most:
        return list(x), list(y)
    values = np.asarray(y, dtype=np.float64)
    chosen = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), max(1, (most - 2) // 3)):
        finite = np.isfinite(values[stretch])
        chosen.update(stretch[~finite][:1].tolist())
        if finite.any():
            valid = stretch[finite]
            chosen |= {int(valid[values[valid].argmin()]), int(valid[values[valid].argmax()])}
    indices = sorted(chosen)
    return [x[index] for index in indices], [y[index] for index in indices]
