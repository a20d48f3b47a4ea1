"""Value, gradient and saturation of every loss on the same log-probs, and its curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.commands.score import LogProbs, log_probs
from rather.config.schema import DPOConfig
from rather.data.batch import Columns, PairFacts
from rather.data.prepare import prepare
from rather.errors import ConfigError
from rather.losses.losses import LOSSES, averages
from rather.losses.objective import PairLoss, configure, from_config
from rather.report import chart, page, plotly_bundle
from rather.run_folder.model_source import Weights, weights_of

PAIRS, POINTS, BINS = 512, 81, 40
SATURATED = 0.01  # share of the gradient at zero margin below which a pair counts as learnt
PREFERENCE = ("sum", "shared")  # columns that the loss has a gradient for


@dataclass(frozen=True)
class LossRow:
    """One loss on all pairs. If it cannot be computed, `missing` says why and the numbers are NaN."""

    name: str
    objective: PairLoss
    numbers: Mapping[str, Any]
    value: float = math.nan  # mean over pairs
    gradient: float = math.nan  # mean norm of d loss / d (chosen, rejected log-prob)
    saturated: float = math.nan  # share of pairs with a gradient below SATURATED
    missing: str = ""


def measure(config: DPOConfig, model: str | None = None, pairs: int = PAIRS) -> LogProbs:
    """Return log-probs of pairs spread over the held-out sets, or else over the training pairs."""
    policy = weights_of(model) if model else _trained_weights(config)
    role = config.reference
    reference = Weights("reference", role.model_path, role.tokenizer_path, role.model_args)
    if config.sync_ref_model and policy.checkpoint:
        reference = replace(policy, name="reference", group="reference")
    data = prepare(config)
    places = [
        (dataset, row)
        for dataset in list(data.evals.values()) or [data.train]
        for row in range(len(dataset))
    ]
    chosen = np.linspace(0, len(places) - 1, min(pairs, len(places))).astype(int).tolist()
    taken = [pair for at in chosen for pair in places[at][0].take([places[at][1]])]
    return log_probs(policy, reference, None, config, taken)


def _trained_weights(config: DPOConfig) -> Weights:
    """Return the newest checkpoint of the run, or its result."""
    newest = checkpoint.newest_good(config.run_dir)
    try:
        return weights_of(str(newest.path if newest else config.run_dir))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nUntrained, policy and reference are equal and every loss is a constant: "
            "train first, or pass weights with --model."
        ) from None


def compare_rows(config: DPOConfig, x: LogProbs) -> list[LossRow]:
    """Return the run's own objective, then every loss with its default numbers."""
    numbers = config.loss_numbers | config.loss_modifiers
    if config.loss_weights:
        numbers["loss_weights"] = config.loss_weights
    own = LossRow(f"this run: {' + '.join(config.loss_names)}", from_config(config), numbers)
    others = [LossRow(name, configure([name], {}), rule.numbers) for name, rule in LOSSES.items()]
    return [_measured(row, x) for row in (own, *others)]


def _measured(row: LossRow, x: LogProbs) -> LossRow:
    for column in sorted(row.objective.pair_columns):
        if missing := int(getattr(x.facts, column).isnan().sum()):
            return replace(row, missing=f"{missing} of {len(x.margins)} pairs have no {column}")
    weight = x.facts.weight / x.facts.weight.sum()
    losses, gradient = slopes(row.objective, x, x.policy)
    _, at_start = slopes(row.objective, x, at_zero_margin(row.objective, x))
    saturated = (gradient < SATURATED * at_start).double()
    value, size, share = (float(column @ weight) for column in (losses, gradient, saturated))
    return replace(row, value=value, gradient=size, saturated=share)


def slopes(objective: PairLoss, x: LogProbs, policy: Columns) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, and the norm of its gradient by the pair's two log-probs."""
    leaves = {name: policy[name].clone().requires_grad_() for name in PREFERENCE if name in policy}
    losses = objective(x.for_loss({**policy, **leaves}))
    # LD-DPO splits the gradient between a response's sum and the part within the shorter length.
    parts = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    gradient = torch.stack([part for part in parts if part is not None]).sum(dim=0)
    return losses.detach(), gradient.norm(dim=1)


def at_zero_margin(objective: PairLoss, x: LogProbs) -> Columns:
    """Return a policy without a preference: equal to the reference, or equal rewards in a pair."""
    own = {name: x.policy[name] for name in PREFERENCE if name in x.policy}
    if objective.needs_reference:
        assert x.reference is not None
        return {**x.policy, **{name: x.reference[name] for name in own}}
    per_token = any(term.rule.rewards is averages for term in objective.terms)
    scale = x.facts.length if per_token else torch.ones_like(x.facts.length)
    columns = {name: (column / scale).mean(dim=1, keepdim=True) for name, column in own.items()}
    return {**x.policy, **{name: column * scale for name, column in columns.items()}}


# --- charts ---


def write_plot(file: Path, rows: Sequence[LossRow], x: LogProbs) -> None:
    """Write a self-contained page: the curve of each loss over the histogram of margins."""
    panels = [
        chart(
            figure(row, x),
            row.name,
            f"Value {row.value:.4g}, gradient {row.gradient:.3g}, saturated {row.saturated:.0%}.",
        )
        for row in rows
        if not row.missing
    ]
    body = (
        "<p>Curve: the mean pair, its chosen log-prob raised and its rejected log-prob lowered by "
        "half the margin (nats, policy against reference). Bars: margins of the pairs, relative to "
        f'the highest bar.</p><div class="grid">{"".join(panels)}</div>'
    )
    text = page(f"Loss against margin, {len(x.margins)} pairs", body, scripts=[plotly_bundle()])
    file.write_text(text, encoding="utf-8")


def figure(row: LossRow, x: LogProbs) -> dict[str, Any]:
    low, high = span(x.margins)
    margins, losses = zip(*curve(row.objective, x), strict=True)
    counts = torch.histc(x.margins, bins=BINS, min=low, max=high)
    middles = [low + (number + 0.5) * (high - low) / BINS for number in range(BINS)]
    bars = {"type": "bar", "name": "pairs", "x": middles, "yaxis": "y2"}
    line = {"type": "scatter", "mode": "lines", "name": "loss", "x": margins, "y": losses}
    layout = {
        "height": 240,
        "showlegend": False,
        "xaxis": {"title": {"text": "margin in nats"}, "range": [low, high], "anchor": "y2"},
        "yaxis": {"title": {"text": "loss"}, "domain": [0.3, 1.0]},
        "yaxis2": {"domain": [0.0, 0.22], "showticklabels": False, "showgrid": False},
    }
    return {"data": [line, {**bars, "y": (counts / counts.max()).tolist()}], "layout": layout}


def curve(objective: PairLoss, x: LogProbs) -> list[tuple[float, float]]:
    """Return (margin, loss) of the mean pair; one pair at a time, since some losses sort pairs."""
    assert x.reference is not None
    facts = PairFacts(*(_mean(getattr(x.facts, field.name)) for field in fields(PairFacts)))
    policy, reference = (
        {name: _mean(column) for name, column in columns.items()}
        for columns in (x.policy, x.reference)
    )
    mean = LogProbs(facts, policy, reference)
    half = torch.tensor([[0.5, -0.5]], dtype=policy["sum"].dtype)
    points = []
    for margin in torch.linspace(*span(x.margins), POINTS, dtype=torch.float64).tolist():
        shifted = {
            name: (reference[name] + margin * half).clamp(max=0.0)
            for name in PREFERENCE
            if name in reference
        }
        points.append((margin, float(objective(mean.for_loss({**policy, **shifted})))))
    return points


def _mean(column: Tensor) -> Tensor:
    return column.mean(dim=0, keepdim=True)


def span(margins: Tensor) -> tuple[float, float]:
    """Return a range that contains every margin and zero."""
    return min(math.floor(float(margins.min())), -1), max(math.ceil(float(margins.max())), 1)
