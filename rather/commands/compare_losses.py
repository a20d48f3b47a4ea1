"""`rather compare-losses`: every loss on the same log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.commands.score import LogProbs, log_probs
from rather.commands.terminal import echo, print_table
from rather.config.found import NO_TRUST, Trust
from rather.config.run_config import DPOConfig
from rather.data.batch import Columns
from rather.data.prepare import prepare
from rather.errors import ConfigError
from rather.losses.losses import LOSSES, averages
from rather.losses.objective import PairLoss, configure, from_config
from rather.run_folder.model_source import Weights, weights_of

SATURATED = 0.01  # share of the gradient at zero margin below which a pair counts as learnt
PREFERENCE = ("sum", "shared")  # columns that the loss has a gradient for
LEGEND = (
    "value: mean loss. gradient: mean norm of d loss / d (log-probs of chosen and rejected) of a "
    "pair. saturated: pairs whose gradient is below 1 % of that at zero margin (policy equal to "
    "reference; for a loss without a reference, both answers equally rewarded). Losses other than "
    "the run's own have their default numbers."
)
EQUAL = "Policy and reference are equal on these pairs: the values are those before any training."


@dataclass
class LossRow:
    """One loss on all pairs. Without the columns in `missing` its numbers are NaN."""

    name: str
    objective: PairLoss
    numbers: Mapping[str, Any]
    value: float = math.nan  # mean over pairs
    gradient: float = math.nan  # mean norm of d loss / d (chosen, rejected log-prob)
    saturated: float = math.nan  # share of pairs with a gradient below SATURATED
    missing: str = ""


def measure(
    config: DPOConfig, model: str | None = None, most: int = 512, trust: Trust = NO_TRUST
) -> LogProbs:
    """Return log-probs of pairs spread over the held-out sets, or else over the training pairs."""
    if config.task != "preference":
        raise ConfigError(f"only losses of pairs can be compared, and task is {config.task}.")
    newest = checkpoint.newest_good(config.run_dir)
    if not (model or newest or (config.run_dir / "model").exists()):
        raise ConfigError(
            f"{config.run_dir}: has no weights. Untrained, policy and reference are equal and "
            "every loss is a constant: train first, or pass weights with --model."
        )
    name = model or str(newest.path if newest else config.run_dir)
    policy = weights_of(name, trust)
    role = config.reference
    source = (role.model_path, role.tokenizer_path, role.model_args)
    reference = Weights("reference", *source, rounding=policy.rounding)
    if config.sync_ref_model and policy.checkpoint:
        reference = replace(policy, name="reference", group="reference")
    data = prepare(config)
    sets = list(data.evals.values()) or [data.train]
    places = [(number, row) for number, pairs in enumerate(sets) for row in range(len(pairs))]
    last, count = len(places) - 1, min(most, len(places))
    taken = [places[i] for i in torch.linspace(0, last, count, dtype=torch.float64).int().tolist()]
    parts = [
        (sets[number], [row for _, row in group])
        for number, group in groupby(taken, lambda place: place[0])
    ]
    return log_probs(policy, reference, None, config, parts)


def compare_rows(config: DPOConfig, x: LogProbs) -> list[LossRow]:
    """Return the run's own objective, then every loss with its default numbers."""
    numbers = config.loss_numbers | config.loss_modifiers
    if config.loss_weights:
        numbers["loss_weights"] = config.loss_weights
    own = f"this run: {' + '.join(config.loss_names)}", from_config(config), numbers
    same = ((name, rule) for name, rule in LOSSES.items() if rule.task == "preference")
    others = ((name, configure([name], {}), rule.numbers) for name, rule in same)
    weight, rows = x.facts.weight / x.facts.weight.sum(), []
    for name, objective, numbers in (own, *others):
        facts = {column: getattr(x.facts, column) for column in sorted(objective.pair_columns)}
        missing = ", ".join(column for column, values in facts.items() if values.isnan().any())
        row = LossRow(name, objective, numbers, missing=missing)
        if not missing:
            losses, gradient = slopes(objective, x, x.policy)
            _, at_start = slopes(objective, x, at_zero_margin(objective, x))
            saturated = (gradient < SATURATED * at_start).double()
            row.value, row.gradient, row.saturated = (
                float(column @ weight) for column in (losses, gradient, saturated)
            )
        rows.append(row)
    return rows


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


def print_rows(rows: Sequence[LossRow], x: LogProbs) -> None:
    cells = []
    for row in rows:
        numbers = ", ".join(f"{name} {n}" for name, n in row.numbers.items() if n is not None)
        note = f"not computable: pairs have no {row.missing}" if row.missing else numbers
        values = f"{row.value:.4g}", f"{row.gradient:.3g}", f"{row.saturated:.1%}"
        cells.append((row.name, *values, note))
    title = f"{len(rows) - 1} losses on {len(x.margins)} pairs"
    print_table(("loss", "value", "gradient", "saturated", "numbers"), cells, title)
    echo(LEGEND if x.margins.any() else EQUAL)
