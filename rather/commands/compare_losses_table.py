"""Every loss on the same log-probs: its value, its gradient, and how many pairs have stopped teaching it anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint
from rather.cluster.launch import needs_ray
from rather.cluster.local import local_cluster
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig, RoleConfig
from rather.data.batch import Columns, PairBatch, PairFacts, PairLogps, TokenPair
from rather.data.pack import pack
from rather.data.prepare import Prepared
from rather.errors import CheckpointError, ConfigError
from rather.losses.losses import LOSSES, averages, gap
from rather.losses.objective import PairLoss, configure, from_config
from rather.model.budget import TOKENS
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.steps import EVALUATION_CHUNK

PAIRS = 512
SATURATED = 0.01  # share of the gradient at zero margin below which a pair counts as learnt
PREFERENCE = ("sum", "shared")  # columns that the loss has a gradient for


@dataclass(frozen=True)
class LogProbs:
    """What one forward pass of both models tells about some pairs."""

    facts: PairFacts
    policy: Columns
    reference: Columns

    @property
    def margins(self) -> Tensor:
        """[P]: log-ratio of the chosen answer minus that of the rejected one, in nats."""
        return gap(self.policy["sum"] - self.reference["sum"])

    def pair_logps(self, policy: Columns) -> PairLogps:
        """As a training step would hand them to the objective, with these log-probs of the policy."""
        return self.facts.with_logps(policy, self.reference, self.facts.mean_chosen_length)


@dataclass(frozen=True)
class Row:
    """One loss on all pairs. Where it cannot be computed, `missing` says why and the numbers are NaN."""

    name: str
    objective: PairLoss
    numbers: Mapping[str, Any]
    value: float = math.nan  # mean over pairs
    gradient: float = (
        math.nan
    )  # mean over pairs of the norm of d loss / d (chosen, rejected log-prob)
    saturated: float = (
        math.nan
    )  # share of pairs whose gradient is below SATURATED of that at zero margin
    missing: str = ""


def compare_losses(config: DPOConfig, model: str | None = None, pairs: int = PAIRS) -> list[Row]:
    """The run's own objective first, then every loss with its own default numbers."""
    return rows_of(config, measure(config, model, pairs))


def measure(config: DPOConfig, model: str | None = None, pairs: int = PAIRS) -> LogProbs:
    """Log-probs of pairs spread over the evaluation sets, or over the training pairs where there are none."""
    if needs_ray(config, with_reference=True):
        raise ConfigError(
            "losses are compared on one device: type actor_train.device_mapping=[0] reference.device_mapping=[0]"
        )
    weights = trained_weights(config, model)
    pipeline = DPOPipeline(config)
    # A run whose loss has no reference has built none; the other losses need one.
    reference = pipeline.roles.reference = pipeline.reference or local_cluster("reference", config)
    assert isinstance(pipeline.actor_train, ActorWorker)
    assert isinstance(reference, ActorWorker)
    pipeline.initialize(model=None if isinstance(weights, Checkpoint) else weights)
    if isinstance(weights, Checkpoint):
        _put(pipeline.actor_train, weights, "model")
        if config.sync_ref_model:
            _put(reference, weights, "reference")
    taken = _spread(pipeline.data, pairs)
    parts = []
    for first in range(0, len(taken), EVALUATION_CHUNK):
        chunk = taken[first : first + EVALUATION_CHUNK]
        policy, other = (_packed(chunk, role) for role in (config.actor_train, config.reference))
        columns = pipeline.actor_train.compute_log_probs(policy), reference.compute_log_probs(other)
        parts.append((PairFacts.of_step(policy), *columns))
    facts, policies, references = zip(*parts, strict=True)
    return LogProbs(PairFacts.concat(facts), _joined(policies), _joined(references))


def trained_weights(config: DPOConfig, model: str | None) -> str | Checkpoint:
    """The weights to compare on: as named, else the run's newest checkpoint, else its result."""
    if model is not None:
        return model
    newest = checkpoint.newest_good(config.run_dir)
    if newest is not None:
        return newest
    if (config.run_dir / "model").exists():
        return str(config.run_dir / "model")
    raise ConfigError(
        f"{config.run_dir}: has neither a checkpoint nor a model yet, and a policy equal to its reference makes every "
        "loss a constant. Train first, or name weights with --model."
    )


def rows_of(config: DPOConfig, x: LogProbs) -> list[Row]:
    own = f"this run: {' + '.join(config.loss_names)}"
    settings = config.loss_numbers | config.loss_modifiers
    if config.loss_weights:
        settings["loss_weights"] = config.loss_weights
    return [
        _row(own, from_config(config), settings, x),
        *(_row(name, configure([name], {}), rule.numbers, x) for name, rule in LOSSES.items()),
    ]


def _row(name: str, objective: PairLoss, numbers: Mapping[str, Any], x: LogProbs) -> Row:
    for column in sorted(objective.pair_columns):
        missing = int(getattr(x.facts, column).isnan().sum())
        if missing:
            return Row(
                name,
                objective,
                numbers,
                missing=f"{missing} of {len(x.margins)} pairs have no {column}",
            )
    weight = x.facts.weight / x.facts.weight.sum()
    losses, gradient = slopes(objective, x, x.policy)
    _, at_start = slopes(objective, x, at_zero_margin(objective, x))
    saturated = (gradient < SATURATED * at_start).double()
    value, size, share = (float(column @ weight) for column in (losses, gradient, saturated))
    return Row(name, objective, numbers, value, size, share)


def slopes(objective: PairLoss, x: LogProbs, policy: Columns) -> tuple[Tensor, Tensor]:
    """Loss of each pair, and the norm of its gradient by the pair's two log-probs."""
    leaves = {name: policy[name].clone().requires_grad_() for name in PREFERENCE if name in policy}
    losses = objective(x.pair_logps({**policy, **leaves}))
    # LD-DPO spreads the gradient over a response's sum and the part within the shorter length: together they are it.
    parts = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    gradient = torch.stack([part for part in parts if part is not None]).sum(dim=0)
    return losses.detach(), gradient.norm(dim=1)


def at_zero_margin(objective: PairLoss, x: LogProbs) -> Columns:
    """The policy without a preference: equal to the reference, or the same reward for both answers of a pair."""
    if objective.needs_reference:
        return {**x.policy, **{name: x.reference[name] for name in PREFERENCE if name in x.policy}}
    per_token = any(term.rule.rewards is averages for term in objective.terms)
    scale = x.facts.length if per_token else torch.ones_like(x.facts.length)
    columns = {name: x.policy[name] / scale for name in PREFERENCE if name in x.policy}
    return {
        **x.policy,
        **{name: column.mean(dim=1, keepdim=True) * scale for name, column in columns.items()},
    }


def _put(worker: ActorWorker, source: Checkpoint, group: str) -> None:
    saved, held = source.tensors(group), worker.weights()
    different = [
        name for name in held if name not in saved or saved[name].shape != held[name].shape
    ]
    if different:
        raise CheckpointError(
            f"{source.path}: its weights do not fit {worker.worker_config.model_path}, first {different[0]}; set the "
            "run's own model again, or name weights with --model."
        )
    worker.mix_weights(saved, 1.0)


def _spread(data: Prepared, count: int) -> list[TokenPair]:
    """So many pairs at even distances: files are often sorted."""
    sets = list(data.evals.values()) or [data.train]
    places = [(dataset, row) for dataset in sets for row in range(len(dataset))]
    chosen = np.linspace(0, len(places) - 1, min(count, len(places))).astype(int).tolist()
    return [pair for place in chosen for pair in places[place][0].take([places[place][1]])]


def _packed(pairs: Sequence[TokenPair], role: RoleConfig) -> list[PairBatch]:
    automatic = 2 * TOKENS["cuda" if torch.cuda.is_available() else "cpu"]
    return pack(pairs, role.max_tokens_per_microbatch_in_infer or automatic, role.infer_batch_size)


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
