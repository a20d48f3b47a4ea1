"""The comparison as one drawing that needs nothing else: a panel per loss, its curve over the histogram of margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from rather.batch import PairFacts
from rather.compare.losses import PREFERENCE, LogProbs, Row
from rather.errors import ConfigError
from rather.objective import PairLoss

KINDS = (".svg", ".html")
POINTS, BINS, ACROSS = 81, 40, 4
WIDTH, HEIGHT, GAP, TOP = 240, 170, 20, 50  # of a panel, between panels, and of the title
CURVE, BARS = (34.0, 118.0), (124.0, 150.0)  # from and to, within a panel
BLOCKS = "▁▂▃▄▅▆▇█"

Points = Sequence[tuple[float, float]]


def check_kind(file: Path) -> None:
    if file.suffix not in KINDS:
        raise ConfigError(f"--plot {file}: the drawing is a {' or '.join(KINDS)} file; name one that ends so.")


def write_plot(file: Path, rows: Sequence[Row], x: LogProbs) -> None:
    """Writes an .svg, or the same drawing in an .html page."""
    check_kind(file)
    svg = drawing(rows, x)
    title = "<title>rather compare-losses</title>"
    page = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>{title}</head><body>\n{svg}</body></html>\n'
    try:
        file.write_text(page if file.suffix == ".html" else svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot be written ({error.strerror}).") from error


def drawing(rows: Sequence[Row], x: LogProbs) -> str:
    """Loss against the margin of the mean pair, one panel for each loss that can be computed."""
    low, high = span(x.margins)
    drawn = [row for row in rows if not row.missing]
    deep = -(-len(drawn) // ACROSS)
    width, height = ACROSS * (WIDTH + GAP) + GAP, deep * (HEIGHT + GAP) + TOP + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="22" font-size="15">Loss against margin, {len(x.margins)} pairs</text>',
        f'<text x="{GAP}" y="40" fill="#555">Curve: the mean pair, its chosen log-prob moved up and its rejected one '
        "down by half the margin (nats, policy against reference). Bars: margins of the pairs.</text>",
    ]
    heights = histogram(x.margins, low, high)
    for number, row in enumerate(drawn):
        left, top = GAP + number % ACROSS * (WIDTH + GAP), TOP + number // ACROSS * (HEIGHT + GAP)
        panel = _panel(row, curve(row.objective, x), heights, low, high)
        parts.append(f'<g transform="translate({left} {top})">{panel}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(row: Row, points: Points, heights: Sequence[float], low: float, high: float) -> str:
    losses = [loss for _, loss in points]
    bottom, top = min(losses), max(losses)
    rise = (top - bottom) or 1.0

    def across(margin: float) -> float:
        return (margin - low) / (high - low) * WIDTH

    def up(loss: float) -> float:
        return CURVE[1] - (loss - bottom) / rise * (CURVE[1] - CURVE[0])

    line = " ".join(f"{across(margin):.1f},{up(loss):.1f}" for margin, loss in points)
    bar, room = WIDTH / BINS, BARS[1] - BARS[0]
    bars = "".join(
        f'<rect x="{i * bar:.1f}" y="{BARS[1] - tall * room:.1f}" width="{bar - 1:.1f}" height="{tall * room:.1f}"/>'
        for i, tall in enumerate(heights)
        if tall
    )
    zero = across(0.0)
    told = f"value {row.value:.4g}, gradient {row.gradient:.3g}, saturated {row.saturated:.0%}"
    return (
        f'<text y="12" font-size="13" font-weight="bold">{escape(row.name)}</text>'
        f'<text y="26" fill="#555">{told}</text>'
        f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{CURVE[0]}" y2="{BARS[1]}" stroke="#bbb" stroke-dasharray="3 3"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="1.8"/><g fill="#d28b2c">{bars}</g>'
        f'<line x1="0" x2="{WIDTH}" y1="{BARS[1]}" y2="{BARS[1]}" stroke="#888"/><g fill="#555" font-size="10">'
        f'<text y="{BARS[1] + 12}">{low:.3g}</text>'
        f'<text x="{WIDTH}" y="{BARS[1] + 12}" text-anchor="end">{high:.3g}</text>'
        f'<text x="2" y="{CURVE[0] + 8}">{top:.3g}</text><text x="2" y="{CURVE[1] - 2}">{bottom:.3g}</text></g>'
    )


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
        columns = {name: mean.reference[name] + margin * half for name in PREFERENCE if name in mean.reference}
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
        BLOCKS[math.ceil(share * len(BLOCKS)) - 1] if share else " " for share in histogram(margins, low, high, bins)
    )
    return f"{low} {bars} {high}"
