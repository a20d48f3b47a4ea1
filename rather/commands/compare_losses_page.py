"""The comparison as one page that needs nothing else: a chart per loss, its curve over the histogram of margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.commands.compare_losses_table import PREFERENCE, LogProbs, Row
from rather.data.batch import PairFacts
from rather.errors import ConfigError
from rather.losses.objective import PairLoss
from rather.report import chart, page, plotly_bundle

KIND = ".html"
POINTS, BINS = 81, 40
BLOCKS = "▁▂▃▄▅▆▇█"


def check_kind(file: Path) -> None:
    if file.suffix != KIND:
        raise ConfigError(f"--plot {file}: the drawing is an {KIND} file; name one that ends so.")


def write_plot(file: Path, rows: Sequence[Row], x: LogProbs) -> None:
    check_kind(file)
    body = (
        "<p>Curve: the mean pair, its chosen log-prob moved up and its rejected one down by half the margin (nats, "
        "policy against reference). Bars: margins of the pairs, as a share of the fullest bar.</p>"
        f'<div class="grid">{"".join(panels(rows, x))}</div>'
    )
    text = page(f"Loss against margin, {len(x.margins)} pairs", body, scripts=[plotly_bundle()])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot be written ({error.strerror}).") from error


def panels(rows: Sequence[Row], x: LogProbs) -> list[str]:
    """One chart for each loss that can be computed."""
    return [
        chart(
            figure(row, x),
            row.name,
            f"Value {row.value:.4g}, gradient {row.gradient:.3g}, saturated {row.saturated:.0%}.",
        )
        for row in rows
        if not row.missing
    ]


def figure(row: Row, x: LogProbs) -> dict[str, Any]:
    low, high = span(x.margins)
    margins, losses = zip(*curve(row.objective, x), strict=True)
    width = (high - low) / BINS
    middles = [low + (number + 0.5) * width for number in range(BINS)]
    line = {"type": "scatter", "mode": "lines", "name": "loss", "x": margins, "y": losses}
    bars = {
        "type": "bar",
        "name": "pairs",
        "x": middles,
        "y": histogram(x.margins, low, high),
        "yaxis": "y2",
    }
    layout = {
        "height": 240,
        "showlegend": False,
        "xaxis": {"title": {"text": "margin in nats"}, "range": [low, high], "anchor": "y2"},
        "yaxis": {"title": {"text": "loss"}, "domain": [0.3, 1.0]},
        "yaxis2": {"domain": [0.0, 0.22], "showticklabels": False, "showgrid": False},
    }
    return {"data": [line, bars], "layout": layout}


def curve(objective: PairLoss, x: LogProbs) -> list[tuple[float, float]]:
    """(margin, loss) of the mean pair; one pair at a time, since some losses sort the pairs of a batch."""
    mean = LogProbs(
        PairFacts(*(_mean(getattr(x.facts, field.name)) for field in fields(PairFacts))),
        {name: _mean(column) for name, column in x.policy.items()},
        {name: _mean(column) for name, column in x.reference.items()},
    )
    half = torch.tensor([[0.5, -0.5]], dtype=mean.policy["sum"].dtype)
    points = []
    for margin in torch.linspace(*span(x.margins), POINTS, dtype=torch.float64).tolist():
        columns = {
            name: mean.reference[name] + margin * half
            for name in PREFERENCE
            if name in mean.reference
        }
        moved = {name: column.clamp(max=0.0) for name, column in columns.items()}
        points.append((margin, float(objective(mean.pair_logps({**mean.policy, **moved})))))
    return points


def _mean(column: Tensor) -> Tensor:
    return column.mean(dim=0, keepdim=True)


def span(margins: Tensor) -> tuple[float, float]:
    """A range that holds every margin and zero."""
    return min(math.floor(float(margins.min())), -1), max(math.ceil(float(margins.max())), 1)


def histogram(margins: Tensor, low: float, high: float, bins: int = BINS) -> list[float]:
    """Pairs in each of the equal parts of the range, as a share of the fullest one."""
    counts = torch.histc(margins, bins=bins, min=low, max=high)
    return [float(share) for share in counts / counts.max()]


def text_histogram(margins: Tensor, bins: int = BINS) -> str:
    """The histogram as one line for a terminal."""
    low, high = span(margins)
    bars = "".join(
        BLOCKS[math.ceil(share * len(BLOCKS)) - 1] if share else " "
        for share in histogram(margins, low, high, bins)
    )
    return f"{low} {bars} {high}"
