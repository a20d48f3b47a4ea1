"""The curves of a run, training and held-out together, each with a sentence that says how to read
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rather.report import chart, downsample, lines
from rather.report.folder import MetricColumns, Record

DASHES = {"chosen": "solid", "rejected": "dash"}
ANSWERS = {
    "tokens": ("Length of answers", "Mean tokens of the answers to eval_prompts."),
    "repetition": (
        "Repetition in answers",
        "Share of four-token sequences that occurred before in the same answer.",
    ),
    "ended": ("Answers that end", "Share of answers that end by themselves, before the limit."),
}
PARTS = {"time/train": "training", "time/reference": "reference", "time/wait": "waiting"}


class Curve(NamedTuple):
    name: str
    metrics: tuple[str, ...]  # two for chosen and rejected
    text: str
    axis: Record = {}  # noqa: RUF012 - read only


SHARE = {"range": [-0.02, 1.02], "tickformat": ".0%"}
CURVES = (
    Curve("Loss", ("loss",),
          "Mean over pairs. Held-out rising while training falls means memorising."),
    Curve("Accuracy", ("rewards/accuracies",),
          "Share of pairs whose chosen answer has the greater reward; a tie counts as 0.", SHARE),
    Curve("Margin", ("rewards/margins",),
          "Reward of the chosen minus reward of the rejected answer."),
    Curve("Rewards", ("rewards/chosen", "rewards/rejected"),
          "Beta times the log-ratio of policy and reference."),
    Curve("Log-probs", ("logps/chosen", "logps/rejected"),
          "Nats of whole answers under the policy."),
    Curve("Chosen answers less likely than under the reference", ("logps/chosen_below_reference",),
          "Share of pairs. Near 100 %, the margin comes from pushing both answers down.", SHARE),
    Curve("Lengths", ("lengths/chosen", "lengths/rejected"), "Scored tokens of an answer."),
    Curve("Margin against length", ("rewards/length_correlation",),
          "Correlation of margin and length difference. Far above 0, the policy learns to write "
          "more.",
          {"range": [-1.02, 1.02]}),
    Curve("Gradient norm", ("grad_norm",), "Before clipping, in the last step of a log line."),
    Curve("Learning rate", ("lr",), "In the last step of a log line.", {"exponentformat": "e"}),
    Curve("Speed", ("pairs_per_second",), "Pairs per second, with data, reference and training."),
)  # fmt: skip


def curves(columns: MetricColumns) -> str:
    charts = []
    for curve in CURVES:
        if traces := list(_traces(curve.metrics, columns)):
            layout = {
                "xaxis": {"title": {"text": "step"}},
                "yaxis": curve.axis,
                "showlegend": len(traces) > 1,
            }
            charts.append(chart({"data": traces, "layout": layout}, curve.name, curve.text))
    grid = f'<div class="grid">{"".join(charts)}</div>'
    return grid if charts else "<p>No step has been logged yet.</p>"


def held_out_sets(columns: MetricColumns) -> dict[str, str]:
    """Return the names of the evaluation sets by the prefix of their metrics: eval/, or
    eval/<name>/.
    """
    losses = (name for name in columns if name.startswith("eval/") and name.endswith("/loss"))
    prefixes = sorted(name.removesuffix("loss") for name in losses)
    return {prefix: f"held-out {prefix[5:-1]}".strip() for prefix in prefixes}


def step_times(columns: MetricColumns) -> str:
    """Return a chart of how each step spent its time, stacked."""
    known = {name: columns[metric] for metric, name in PARTS.items() if metric in columns}
    if not known:
        return ""
    figure = lines(known, y="seconds per step")
    for trace in figure["data"]:
        trace |= {"stackgroup": "parts", "line": {"width": 0.5}}
    text = "Means of each log line. A reference on its own devices works in parallel with training."
    return chart(figure, "Time of a step", text)


def answer_curves(columns: MetricColumns) -> str:
    """Return charts about the answers to eval_prompts, policy and reference together."""
    charts = []
    for metric, (name, text) in ANSWERS.items():
        sides = {side: f"eval/answers/{side}/{metric}" for side in ("policy", "reference")}
        if series := {side: columns[key] for side, key in sides.items() if key in columns}:
            charts.append(chart(lines(series), name, text))
    return f'<div class="grid">{"".join(charts)}</div>'


def _traces(metrics: tuple[str, ...], columns: MetricColumns) -> Iterator[Record]:
    """Yield training in the first colour and held-out sets in the next ones; rejected answers are
    dashed.
    """
    sets = {"": "training", **held_out_sets(columns)}
    for number, (prefix, name) in enumerate(sets.items()):
        for metric in (metric for metric in metrics if prefix + metric in columns):
            side = metric.rpartition("/")[2]
            x, y = downsample(*columns[prefix + metric])
            line = {"color": f"var(--series-{number % 8 + 1})", "dash": DASHES.get(side, "solid")}
            yield {
                "type": "scatter",
                "name": f"{name}, {side}" if side in DASHES else name,
                "mode": "lines+markers" if prefix else "lines",
                "x": x,
                "y": y,
                "line": {**line, "width": 1.8},
            }
