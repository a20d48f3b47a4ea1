"""The data report as HTML: for `rather data --html` and for the report of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rather.data.findings import bar_labels
from rather.data.report import Json
from rather.data.show import report_rows, short
from rather.report import LEVELS, chart, escape, page, plotly_bundle, table

STYLE = """<style>
.tokens mark, .tokens del, .tokens ins { color: inherit; border-radius: 3px; text-decoration: none;
} .tokens mark { background: color-mix(in srgb, var(--series-3) 25%, transparent); }
.tokens del { background: color-mix(in srgb, var(--series-2) 30%, transparent); }
.tokens ins { background: color-mix(in srgb, var(--series-1) 30%, transparent); }
pre.tokens > * { border-right: 1px solid var(--line); }
</style>"""


def data_page(report: Json, name: str) -> str:
    """Return a whole document."""
    body = f'<h2 id="data">What the model will see</h2>{section(report)}'
    return page(f"Data of {name}", body, scripts=[plotly_bundle()])


def section(report: Json) -> str:
    """Return the body, without a heading of its own.

    Data that was refused has only its table of rows.
    """
    parts = [STYLE]
    if look := report.get("look"):
        parts += [
            _findings(look["findings"], report["warnings"]),
            _charts(look["sets"]["train"]["lengths"]),
            _inference(look["inference"]),
        ]
    rows = [(f"{name}: {what}", count, text) for name, what, count, text, _ in report_rows(report)]
    parts.append(
        "<h3>Rows</h3>" + table("What became of the rows", ["what", "count", "detail"], rows)
    )
    return "".join(parts) + _pairs(report.get("shown", []))


def _findings(findings: Sequence[Json], warnings: Sequence[str]) -> str:
    if not findings and not warnings:
        return "<p>No problems found.</p>"
    items = [(one["severity"], one["text"], one["advice"]) for one in findings]
    items += [("warning", text, "") for text in warnings]
    lines = "".join(
        f'<li><strong class="{LEVELS[severity]}">{escape(severity)}</strong> {escape(text)} '
        f'<span class="muted">{escape(advice)}</span></li>'
        for severity, text, advice in items
    )
    return f"<h3>Findings</h3><ul>{lines}</ul>"


def _charts(lengths: Json) -> str:
    answers = {side: lengths[side] for side in ("chosen", "rejected")}
    return (
        '<h3>Lengths</h3><div class="grid">'
        + _bar_chart("Prompt lengths", "the tokens of their prompt", {"prompts": lengths["prompt"]})
        + _bar_chart("Answer lengths", "the tokens of each answer", answers)
        + "</div>"
    )


def _bar_chart(name: str, what: str, spreads: Mapping[str, Json]) -> str:
    traces = [
        {"type": "bar", "name": each, "x": bar_labels(spread), "y": spread["counts"]}
        for each, spread in spreads.items()
    ]
    layout = {
        "xaxis": {"title": {"text": "tokens"}, "type": "category"},
        "yaxis": {"title": {"text": "pairs"}},
        "showlegend": len(traces) > 1,
        "barmode": "group",
    }
    return chart({"data": traces, "layout": layout}, name, f"Training pairs by {what}.")


def _inference(check: Json) -> str:
    if not check["compared"]:
        return ""
    tags = {"before": "span", "training": "del", "inference": "ins", "after": "span"}
    examples = "".join(
        f'<p class="muted">{escape(short(one["place"]))}: <del>training</del> and '
        "<ins>inference</ins></p>"
        f'<pre class="tokens">{"".join(_mark(one[part], tag) for part, tag in tags.items())}</pre>'
        for one in check["examples"]
    )
    same = f"{check['compared'] - check['different']} of {check['compared']} compared prompts"
    line = escape(f"{same} begin as {check['by']} writes them at inference.")
    return f'<h3>Prompts at inference</h3><div class="tokens"><p>{line}</p>{examples}</div>'


def _mark(tokens: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(token)}</{tag}>" for token in tokens)


def _pairs(pairs: Sequence[Json]) -> str:
    if not pairs:
        return ""
    cards = ["<h3>Pairs as tokens</h3><p>Scored tokens are <mark>marked</mark>.</p>"]
    for pair in pairs:
        sides = ""
        for name, one in pair["sides"].items():
            tokens = "".join(
                _mark([text], "mark" if marked else "span") for text, marked in one["shown"]
            )
            left = one["tokens"] - len(one["shown"])
            more = f" and {left} more tokens" if left else ""
            heading = f"{escape(name)}: {one['tokens']} tokens, {one['scored']} scored"
            sides += f'<div><h5>{heading}</h5><pre class="tokens">{tokens}{more}</pre></div>'
        name = escape(pair["name"])
        cards.append(
            f'<article class="card"><h4>{name}</h4><div class="grid">{sides}</div></article>'
        )
    return "".join(cards)
