"""The frame of a page: styles and scripts are inside it, it requests nothing, and data never
becomes markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape as escape_html
from importlib.resources import files
from typing import Any

Record = dict[str, Any]  # an object of a JSON file

NUMBER = ' class="number"'
LEVELS = {"serious": "bad", "warning": "warn", "info": "muted"}  # severity -> class of page.css
HEADING = re.compile(r'<h2 id="([^"]+)"[^>]*>(.*?)</h2>', re.DOTALL)
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
{head}
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
    frame = _asset("page.js")
    tail = [f'<script src="{escape(address)}"></script>' for address in linked]
    if data is not None:
        tail.insert(0, f'<script type="application/json" id="data">{as_json(data)}</script>')
    return DOCUMENT.format(
        policy=_policy([frame, *scripts]),
        title=escape(title),
        style=_asset("page.css"),
        head=f"<script>{frame}</script>",
        contents=_contents(body),
        body=body,
        tail="\n".join([*tail, *(f"<script>{source}</script>" for source in scripts)]),
    )


def escape(value: object) -> str:
    """Return the text for use between tags and inside quoted attributes."""
    return escape_html(str(value), quote=True)


def as_json(value: Any) -> str:
    """Return JSON for use inside a script element: nothing in it can close the element, and a NaN
    becomes null.
    """
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def slug(name: str) -> str:
    """Return a name as an id: 'Rewards and margins' -> rewards-and-margins."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with escaped cells; the first cell of a row is its heading; numbers align to
    the right.
    """
    rows = [list(row) for row in rows]
    sides = [
        NUMBER if place and any(_is_number(row[place]) for row in rows) else ""
        for place in range(len(headings))
    ]
    head = "".join(
        f'<th scope="col"{side}>{escape(each)}</th>'
        for each, side in zip(headings, sides, strict=True)
    )
    body = ""
    for first, *rest in rows:
        cells = zip(rest, sides[1:], strict=True)
        body += f'<tr><th scope="row">{_cell(first)}</th>'
        body += "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in cells) + "</tr>"
    # A region that scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _is_number(value) else escape(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _contents(body: str) -> str:
    """Return links to the parts of a page that has several."""
    found = HEADING.findall(body)
    if len(found) < 3:
        return ""
    links = "".join(f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in found)
    return f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>\n'


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy under which only these scripts run and no other machine is contacted,
    whatever data contains.
    """
    digests = (hashlib.sha256(source.encode()).digest() for source in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'unsafe-inline'; img-src data: "
        "blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    return files("rather.report").joinpath(name).read_text(encoding="utf-8")
