"""HTML pages: their frame, tables and charts.

Styles and scripts are inside a page, it requests nothing, and data never becomes markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from rather.files import JsonObject

Line = tuple[Sequence[int], Sequence[float]]  # x and y of its points; NaN is a gap

NUMBER = ' class="number"'
LEVELS = {"serious": "bad", "warning": "warn", "info": "muted"}  # severity -> class of page.css
HEADING = re.compile(r'<h2 id="([^"]+)"[^>]*>(.*?)</h2>', re.DOTALL)
WHOLE = 24  # most points of a chart whose table shows all of them
MOST_POINTS = 500  # of a line
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


def page(title: str, body: str, *, data: Any = None, script: str = "") -> str:
    """Return a whole document.

    `body` is HTML whose data went through `escape`; its parts begin with `<h2 id=...>`. `script` is
    the address of a script on the same server, which reads `data` from the element with that id.
    """
    frame = _asset("charts.js") + _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(frame.encode()).digest()).decode()
    headings, contents, tail = HEADING.findall(body), "", ""
    if len(headings) > 2:
        links = "".join(f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in headings)
        contents = f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>\n'
    if data is not None:
        tail = f'<script type="application/json" id="data">{as_json(data)}</script>'
    if script:
        tail += f'<script src="{escape(script)}"></script>'
    return DOCUMENT.format(
        policy=POLICY.format(f"'sha256-{digest}'"),
        title=escape(title),
        style=_asset("page.css"),
        frame=frame,
        contents=contents,
        body=body,
        tail=tail,
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


def chart(
    name: str, about: str, series: Sequence[JsonObject], *, x: str = "step", **figure: Any
) -> str:
    """Return a labelled chart with its numbers in a table; names are unique on a page.

    `series` are lines, made by `line`, or bars; charts.js says what else a figure may have.
    """
    anchor = slug(name)
    drawn = as_json({"series": series, "x": x, **figure})
    return (
        f'<figure class="chart" aria-labelledby="{anchor}-name" aria-describedby="{anchor}-about">'
        f'<figcaption><strong id="{anchor}-name">{escape(name)}</strong> '
        f'<span id="{anchor}-about">{escape(about)}</span></figcaption>'
        f'<div class="plot" id="{anchor}"></div>'
        f'<script type="application/json" class="figure">{drawn}</script>'
        f"<details><summary>Numbers<span class='unseen'> of {escape(name)}</span></summary>"
        f"{_numbers(name, x, series)}</details></figure>"
    )


def line(name: str, points: Line, *, dots: bool = False, **style: Any) -> JsonObject:
    """Return a line of a chart over the steps; with few points each has a dot."""
    xs, ys = downsample(*points)
    rounded = [float(f"{y:.5g}") for y in ys]
    return {"name": name, "x": xs, "y": rounded, "dots": dots or len(xs) <= WHOLE, **style}


def _numbers(name: str, x: str, series: Sequence[JsonObject]) -> str:
    """Return all points if they are few and share their x values, else a summary of each line."""
    columns = [entry["x"] for entry in series]
    if columns and 0 < len(columns[0]) <= WHOLE and columns.count(columns[0]) == len(columns):
        rows = zip(columns[0], *(entry["y"] for entry in series), strict=True)
        return table(f"{name}: all points", [x, *(entry["name"] for entry in series)], rows)
    summary = []
    for entry in series:
        heights = [y for y in entry["y"] if y == y]
        ends = [heights[0], heights[-1], min(heights), max(heights)] if heights else [None] * 4
        summary.append([entry["name"], len(heights), *ends])
    headings = ["line", "points", "first", "last", "lowest", "highest"]
    return table(f"{name}: summary", headings, summary)


def downsample(
    x: Sequence[int], y: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[int], list[float]]:
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
