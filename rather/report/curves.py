"""The curves of a run, training and held-out together, each with a sentence that says how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rather.report import chart, lines, thinned
from rather.report.folder import Column, Columns

SIDES = {"chosen": "solid", "rejected": "dash"}
ANSWERS = (
    ("tokens", "Length of answers", "Mean tokens of the answers to eval_prompts."),
    (
        "repetition",
        "Repetition in answers",
        "Share of four-token runs that came before in the same answer.",
    ),
    ("ended", "Answers that end", "Share of answers that end by themselves, before the limit."),
)
PARTS = {"time/train": "training", "time/reference": "reference", "time/wait": "waiting"}


class Curve(NamedTuple):
    name: str
    metrics: tuple[str, ...]  # two for chosen and rejected
    told: str
    unit: str = ""
    layout: dict[str, Any] = {}  # noqa: RUF012 - read only


SHARE = {"yaxis": {"range": [-0.02, 1.02], "tickformat": ".0%"}}
CURVES = (
    Curve("Loss", ("loss",), "Mean over pairs. Held-out rising while training falls is memorising."),
    Curve("Accuracy", ("rewards/accuracies",),
          "Share of pairs whose chosen answer has the greater reward; a tie counts as 0.", "", SHARE),
    Curve("Margin", ("rewards/margins",), "Reward of the chosen minus reward of the rejected answer."),
    Curve("Rewards", ("rewards/chosen", "rewards/rejected"), "Beta times the log-ratio of policy and reference."),
    Curve("Log-probs", ("logps/chosen", "logps/rejected"), "Of whole answers under the policy.", "nats"),
    Curve("Chosen answers less likely than before", ("logps/chosen_below_reference",),
          "Share of pairs. Near 100 %, the margin comes from pushing both answers down.", "", SHARE),
    Curve("Lengths", ("lengths/chosen", "lengths/rejected"), "Scored tokens of an answer.", "tokens"),
    Curve("Margin against length", ("rewards/length_correlation",),
          "Correlation of margin and length difference. Far above 0, the policy learns to write more.", "",
          {"yaxis": {"range": [-1.02, 1.02]}}),
    Curve("Gradient norm", ("grad_norm",), "Before clipping, of the last step of a log line."),
    Curve("Learning rate", ("lr",), "Of the last step of a log line.", "", {"yaxis": {"exponentformat": "e"}}),
    Curve("Speed", ("pairs_per_second",), "With everything a step needs: data, reference, training.", "pairs / s"),
)  # fmt: skip


def curves(columns: Columns) -> str:
    drawn = [text for curve in CURVES if (text := _chart(curve, columns))]
    return (
        f'<div class="grid">{"".join(drawn)}</div>'
        if drawn
        else "<p>No step has been logged yet.</p>"
    )


def held_out(columns: Columns) -> list[str]:
    """The evaluation sets by the prefix of their metrics: eval/, or eval/<name>/ of several."""
    return sorted(
        name.removesuffix("loss")
        for name in columns
        if name.startswith("eval/") and name.endswith("/loss")
    )


def told_set(prefix: str) -> str:
    name = prefix.removeprefix("eval/").removesuffix("/")
    return f"held-out {name}" if name else "held-out"


def step_times(columns: Columns) -> str:
    """Where the seconds of a step went, one part on another."""
    known = {told: columns[name] for name, told in PARTS.items() if name in columns}
    if not known:
        return ""
    figure = lines({told: _points(column) for told, column in known.items()}, y="seconds a step")
    for trace in figure["data"]:
        trace |= {"stackgroup": "parts", "line": {"width": 0.5}}
    told = "Means of each log line. A reference on devices of its own works beside training."
    return chart(figure, "Time of a step", told)


def answer_curves(columns: Columns) -> str:
    """Of the answers to eval_prompts, the policy's beside the reference's."""
    drawn = []
    for metric, name, told in ANSWERS:
        sides = {
            side: columns.get(f"eval/answers/{side}/{metric}") for side in ("policy", "reference")
        }
        series = {side: _points(column) for side, column in sides.items() if column}
        if series:
            drawn.append(chart(lines(series), name, told))
    return f'<div class="grid">{"".join(drawn)}</div>'


def _chart(curve: Curve, columns: Columns) -> str:
    traces = list(_traces(curve.metrics, columns))
    if not traces:
        return ""
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": curve.unit}}}
    for name, more in curve.layout.items():
        layout[name] = layout[name] | more
    figure = {"data": traces, "layout": {**layout, "showlegend": len(traces) > 1}}
    return chart(figure, curve.name, curve.told)


def _traces(metrics: Iterable[str], columns: Columns) -> Iterator[dict[str, Any]]:
    """Training in the first colour, held-out sets in the next ones; rejected answers dashed."""
    for number, prefix in enumerate(["", *held_out(columns)]):
        for metric in (metric for metric in metrics if prefix + metric in columns):
            side = metric.rpartition("/")[2]
            name = told_set(prefix) if prefix else "training"
            steps, values = _points(columns[prefix + metric])
            yield {
                "type": "scatter",
                "name": f"{name}, {side}" if side in SIDES else name,
                "mode": "lines+markers" if prefix else "lines",
                "x": steps,
                "y": values,
                "line": {
                    "color": f"var(--series-{number % 8 + 1})",
                    "dash": SIDES.get(side, "solid"),
                    "width": 1.8,
                },
            }


def _points(column: Column) -> tuple[list[int], list[float | None]]:
    return thinned(column.steps, column.values)
