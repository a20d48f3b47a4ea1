"""The data report as HTML: for `rather data --html` and for the report of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rather.data.finding_texts import by_set, percent
from rather.data.report import GROUPS, MEANINGS
from rather.data.statistics import bar_labels
from rather.report import chart, escape, page, plotly_bundle, table

COLOURS = {"serious": "bad", "warning": "warn", "info": "muted"}
KINDS = {
    "same_pair": "the same pair",
    "near_pair": "nearly the same pair",
    "near_prompt": "nearly the same prompt",
    "swapped": "preferred the other way round",
    "both_ways": "its chosen answer is rejected there",
    "leaked_prompt": "the same prompt in train",
    "leaked_pair": "the same pair in train",
    "near_leaked_prompt": "nearly the same prompt in train",
}
STYLE = """<style>
.tokens mark, .tokens del, .tokens ins { color: inherit; border-radius: 3px; text-decoration: none; }
.tokens mark { background: color-mix(in srgb, var(--series-3) 25%, transparent); }
.tokens del { background: color-mix(in srgb, var(--series-2) 30%, transparent); }
.tokens ins { background: color-mix(in srgb, var(--series-1) 30%, transparent); }
pre.tokens > * { border-right: 1px solid var(--line); }
</style>"""


def data_page(report: Mapping[str, Any], name: str) -> str:
    """A whole document."""
    body = f'<h2 id="data">What the model will see</h2>{section(report)}'
    return page(f"Data of {name}", body, scripts=[plotly_bundle()])


def section(report: Mapping[str, Any]) -> str:
    """The body, without a heading of its own. Data that was refused has only its table of rows."""
    look = report.get("look")
    parts = [_findings(look["findings"], report["warnings"])] if look else []
    if look:
        parts += [_charts(look["sets"]["train"]), _lengths(look["sets"])]
        parts += [_numbers(look), _examples(look["examples"]), _inference(look["inference"])]
    parts += [_rows(report), _shown(report.get("shown", []))]
    return STYLE + "".join(parts)


def _findings(findings: Sequence[Mapping[str, Any]], warnings: Sequence[str]) -> str:
    if not findings and not warnings:
        return "<p>Nothing was found that speaks against training on these pairs.</p>"
    told = [
        f'<li><strong class="{COLOURS[one["severity"]]}">{escape(one["severity"])}</strong> {escape(one["text"])} '
        f'<span class="muted">{escape(one["advice"])}</span></li>'
        for one in findings
    ]
    told += [f'<li><strong class="warn">warning</strong> {escape(one)}</li>' for one in warnings]
    return f"<h3>Findings</h3><ul>{''.join(told)}</ul>"


def _charts(train: Mapping[str, Any]) -> str:
    prompts = _bars({"prompts": train["lengths"]["prompt"]})
    answers = _bars({side: train["lengths"][side] for side in ("chosen", "rejected")})
    bias = train["length_bias"]
    told = f"Chosen is longer in {percent(bias['chosen_longer'])} of the pairs."
    return (
        '<h3>Lengths</h3><div class="grid">'
        + chart(prompts, "Prompt lengths", "Training pairs by the tokens of their prompt.")
        + chart(answers, "Answer lengths", f"Training pairs by the tokens of each answer. {told}")
        + "</div>"
    )


def _bars(spreads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    longest = max(spreads.values(), key=lambda spread: len(spread["edges"]))
    labels = bar_labels(longest)
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": labels,
            "y": [*one["counts"], *[0] * (len(labels) - len(one["counts"]))],
        }
        for name, one in spreads.items()
    ]
    axes = {
        "xaxis": {"title": {"text": "tokens"}, "type": "category"},
        "yaxis": {"title": {"text": "pairs"}},
    }
    return {"data": traces, "layout": {**axes, "showlegend": len(traces) > 1, "barmode": "group"}}


def _lengths(sets: Mapping[str, Any]) -> str:
    rows = [
        (f"{name}: {part}", one["median"], one["p95"], one["longest"])
        for name, told in sets.items()
        for part, one in told["lengths"].items()
    ]
    return table("Tokens", ["what", "median", "95 % up to", "longest"], rows)


def _numbers(look: Mapping[str, Any]) -> str:
    numbers = table("Numbers of each set", ["what", *look["sets"]], by_set(look))
    return f"<h3>Repeats, contradictions, leakage, length</h3>{numbers}"


def _examples(examples: Sequence[Mapping[str, Any]]) -> str:
    if not examples:
        return ""
    rows = [
        (_short(one["place"]), one["set"], KINDS[one["kind"]], _short(one["like"]))
        for one in examples
    ]
    places = table("First places", ["pair", "set", "what", "as"], rows)
    return f"<details><summary>Where</summary>{places}</details>"


def _short(place: str) -> str:
    return place.rsplit("/", 1)[-1]


def _inference(told: Mapping[str, Any]) -> str:
    if not told["compared"]:
        return ""
    same = told["compared"] - told["different"]
    text = f"{same} of {told['compared']} prompts that were compared begin as {told['by']} writes them at inference."
    shown = "".join(
        f'<p class="muted">{escape(_short(one["place"]))}: <del>training</del> and <ins>inference</ins></p>'
        f'<pre class="tokens">{_marked(one["before"], "span")}{_marked(one["training"], "del")}'
        f"{_marked(one['inference'], 'ins')}{_marked(one['after'], 'span')}</pre>"
        for one in told["examples"]
    )
    return f'<h3>Prompts at inference</h3><div class="tokens"><p>{escape(text)}</p>{shown}</div>'


def _marked(tokens: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(token)}</{tag}>" for token in tokens)


def _rows(report: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for name, told in {"train": report["train"], **report["evals"]}.items():
        set_name = name if name == "train" else f"eval {name}".strip()
        rows.append(
            (
                f"{set_name}: pairs kept",
                told["pairs"],
                f"of {told['rows']:,} rows" if "rows" in told else "",
            )
        )
        for group in GROUPS:
            for kind, entry in told.get(group, {}).items():
                rows.append((f"{set_name}: {group}: {kind}", entry["count"], MEANINGS[kind]))
    return "<h3>Rows</h3>" + table("What became of the rows", ["what", "count", "meaning"], rows)


def _shown(pairs: Sequence[Mapping[str, Any]]) -> str:
    if not pairs:
        return ""
    return "<h3>Pairs as tokens</h3><p>Scored tokens are <mark>marked</mark>.</p>" + "".join(
        map(_pair, pairs)
    )


def _pair(pair: Mapping[str, Any]) -> str:
    sides = "".join(
        f"<div><h5>{escape(name)}: {one['tokens']} tokens, {one['scored']} scored</h5>"
        f'<pre class="tokens">{_tokens(one["shown"])}{_rest(one)}</pre></div>'
        for name, one in pair["sides"].items()
    )
    return f'<article class="card"><h4>{escape(pair["name"])}</h4><div class="grid">{sides}</div></article>'


def _tokens(shown: Iterable[tuple[str, bool]]) -> str:
    return "".join(_marked([text], "mark" if scored else "span") for text, scored in shown)


def _rest(side: Mapping[str, Any]) -> str:
    left = side["tokens"] - len(side["shown"])
    return f" and {left} more tokens" if left else ""
