"""The objective of a run: a weighted sum of losses with its modifiers.

A number or modifier that would have no effect is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.config.schema import LossConfig
from rather.data.batch import Columns, PairLogps
from rather.errors import ConfigError
from rather.losses.losses import (
    LARGEST_EXPONENT,
    LOSSES,
    LossRule,
    averages,
    in_groups,
    log_ratios,
    token_mean,
)


def _alpha(ratio: Tensor, coef: float) -> Tensor:
    power = coef - 1
    return ratio if power == 0 else torch.expm1((power * ratio).clamp(max=LARGEST_EXPONENT)) / power


# f-DPO (2309.16240): the log-ratio is bent by the divergence's derivative; constants that cancel
# are left out.
DIVERGENCES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratio, _: ratio,
    "forward_kl": lambda ratio, _: 1 - torch.exp((-ratio).clamp(max=LARGEST_EXPONENT)),
    "js": lambda ratio, _: math.log(2) + logsigmoid(ratio),
    "alpha": _alpha,
}
# These losses are always per token, so length_normalization: true changes nothing.
AVERAGED = ("sigmoid_norm", "orpo", "simpo", "alphapo")
# Modifier -> whether it is defined for a loss.
TAKES: Mapping[str, Callable[[LossRule], bool]] = {
    "f_divergence_type": lambda rule: rule.divergence,
    "soft_labels": lambda rule: rule.soft_labels,
    "reference_free": lambda rule: rule.reference,
    "ld_alpha": lambda rule: rule.reference,
    "use_weighting": lambda rule: not rule.whole_batch and not rule.groups,
    "rpo_alpha": lambda rule: True,
    "pref_ftx": lambda rule: True,
}


Running = list[float]  # how many rows were seen, and their mean reward


@dataclass(frozen=True)
class Modifiers:
    """Settings that combine with the losses. The defaults change nothing."""

    rpo_alpha: float = 0.0  # RPO (2404.19733): weight of the chosen NLL, a mean over tokens
    pref_ftx: float = 0.0  # weight of the chosen NLL, averaged within each answer first
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float | None = None
    ld_alpha: float = 1.0  # LD-DPO (2409.06411): weight of tokens past the shorter answer's length
    use_weighting: bool = False  # WPO (2406.11827): weight pairs by the policy's likelihood
    soft_labels: bool = False  # the `soft_label` column: chance that chosen is the better answer
    reference_free: bool = False  # a uniform reference


@dataclass(frozen=True)
class Term:
    name: str
    rule: LossRule
    numbers: Mapping[str, Any]
    weight: float = 1.0

    @cached_property
    def beta(self) -> float:
        return float({**self.rule.numbers, **self.numbers}.get("beta", 1.0))


@dataclass(frozen=True)
class PairLoss:
    """A weighted sum of losses with its modifiers: PairLogps -> one loss per pair."""

    terms: tuple[Term, ...]
    modifiers: Modifiers = Modifiers()
    task: str = "preference"

    @cached_property
    def needs_reference(self) -> bool:
        return not self.modifiers.reference_free and any(term.rule.reference for term in self.terms)

    @cached_property
    def whole_batch(self) -> bool:
        return any(term.rule.whole_batch or term.rule.groups for term in self.terms)

    @cached_property
    def baseline_kind(self) -> str | None:
        return next((term.rule.baseline for term in self.terms if term.rule.baseline), None)

    def with_baseline(
        self, policy: Columns, reference: Columns, running: Running
    ) -> tuple[Columns, Running]:
        """Return the reference's columns with the baseline of all these rows."""
        sums = policy["sum"].to(reference["sum"].device)
        x = PairLogps(sums, reference["sum"], torch.ones_like(sums))
        baseline, running = self.baseline(x, running)
        return {**reference, "baseline": baseline.expand_as(sums).clone()}, running

    def baseline(self, x: PairLogps, running: Running) -> tuple[Tensor, Running]:
        """Return the number that each row of a step is compared with, and the next running mean.

        `x` holds all rows of the step, each with the same weight. For "kl", the second column is
        the answer to another prompt.
        """
        if self.baseline_kind == "kl":
            return log_ratios(x)[:, 1].mean().clamp(min=0), running
        rewards = self.rewards(x)[:, 0]
        rows, mean = running
        rows += len(rewards)
        mean += float((rewards - mean).sum()) / rows
        return rewards.new_tensor(mean), [rows, mean]

    @cached_property
    def token_columns(self) -> frozenset[str]:
        """Name columns besides the sums: log-probs within the shared length, log sum of squares."""
        names = set()
        if self.modifiers.ld_alpha != 1:
            names.add("shared")
        if self.modifiers.use_weighting:
            names.add("squares")
        return frozenset(names)

    @property
    def pair_columns(self) -> frozenset[str]:
        """Return the names of the data columns that the losses read."""
        read = {name for term in self.terms for name in term.rule.extra}
        return frozenset(read | ({"soft_label"} if self.modifiers.soft_labels else set()))

    @cached_property
    def own_metrics(self) -> frozenset[str]:
        """Return the names of metrics that only these losses have."""
        losses = {term.name for term in self.terms}
        names = set()
        if "orpo" in losses:
            names.add("odds_ratio")
        if self.modifiers.rpo_alpha or losses & {"sft", "cpo"}:
            names.add("nll_loss")
        return frozenset(names)

    def description(self) -> dict[str, Any]:
        """Return names, weights and effective numbers; equal for equal objectives."""
        terms = [
            [term.name, term.weight, {**term.rule.numbers, **term.numbers}] for term in self.terms
        ]
        sources = {term.name: LOSSES.source_of(term.name) for term in self.terms}
        imported = {
            name: sha256(text.encode()).hexdigest() for name, text in sources.items() if text
        }
        description = {"losses": terms, **asdict(self.modifiers)}
        if imported:  # a changed file is another loss
            description["imported"] = imported
        return description

    def of(self, term: Term, x: PairLogps) -> Tensor:
        """Return one term of the sum, without its weight: one loss per pair."""
        if not self.modifiers.soft_labels:
            x = x._replace(extra={name: x.extra[name] for name in x.extra if name != "soft_label"})
        function = partial(term.rule.function, **term.numbers)
        if term.rule.reference:  # only comparisons with a reference are modified
            x = self.effective(x)
            if term.rule.divergence and self.modifiers.f_divergence_type != "reverse_kl":
                x = self._bent(x)
        return in_groups(x, function) if term.rule.groups else function(x)

    def __call__(self, x: PairLogps) -> Tensor:
        modifiers = self.modifiers
        total = sum(term.weight * self.of(term, x) for term in self.terms)
        assert isinstance(total, Tensor)
        if modifiers.use_weighting:
            total = total * likelihood_weight(x)
        if modifiers.rpo_alpha:
            total = total + modifiers.rpo_alpha * token_mean(x)
        if modifiers.pref_ftx:
            total = total - modifiers.pref_ftx * averages(x)[:, 0]
        return total

    def rewards(self, x: PairLogps) -> Tensor:
        """Return [P, 2] implicit rewards of the first preference loss."""
        term = next((t for t in self.terms if t.name != "sft"), self.terms[0])
        return term.beta * term.rule.rewards(self.effective(x))

    def _bent(self, x: PairLogps) -> PairLogps:
        """Return x with its log-ratios bent by the f-divergence."""
        coef = self.modifiers.f_alpha_divergence_coef
        bend = DIVERGENCES[self.modifiers.f_divergence_type]
        assert x.reference is not None
        return x._replace(policy=x.reference + bend(log_ratios(x), 0.5 if coef is None else coef))

    def effective(self, x: PairLogps) -> PairLogps:
        """Return x with a uniform reference, or with less weight past the shorter answer."""
        x = x if self.modifiers.ld_alpha == 1 else self._damped(x)
        is_uniform = self.modifiers.reference_free
        return x._replace(reference=torch.zeros_like(x.policy)) if is_uniform else x

    def _damped(self, x: PairLogps) -> PairLogps:
        alpha = self.modifiers.ld_alpha
        shared = x.extra["policy/shared"]
        x = x._replace(policy=shared + alpha * (x.policy - shared))
        if x.reference is None or self.modifiers.reference_free:
            return x
        shared = x.extra["reference/shared"]
        return x._replace(reference=shared + alpha * (x.reference - shared))


def likelihood_weight(x: PairLogps) -> Tensor:
    """WPO: exp of the mean per token of log p - log sum p^2, of both answers, without gradient."""
    return torch.exp((x.policy - x.extra["policy/squares"]) / x.length).detach().prod(dim=1)


# --- from a config ---


def configure(
    names: Sequence[str],
    numbers: Mapping[str, Any],
    weights: Sequence[float] | None = None,
    modifiers: Mapping[str, Any] | None = None,
) -> PairLoss:
    """Return the objective of a run from what the user set; None and neutral values pass.

    Numbers go to every loss that takes them. Numbers that no loss takes, and modifiers that a loss
    does not support, are reported together in one ConfigError.
    """
    set_numbers = {name: number for name, number in numbers.items() if number is not None}
    terms = []
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        rule = LOSSES.find(name, "pref_loss")
        numbers_of_loss = {key: set_numbers[key] for key in set_numbers if key in rule.numbers}
        terms.append(Term(name, rule, numbers_of_loss, weight))
    chosen = Modifiers(**{k: v for k, v in (modifiers or {}).items() if v is not None})
    if problems := _number_problems(terms, set_numbers) + _modifier_problems(terms, chosen):
        raise ConfigError(problems)
    return PairLoss(tuple(terms), chosen, terms[0].rule.task)


def own_loss(function: Callable[[PairLogps], Tensor]) -> PairLoss:
    """Return a user's own function of the pairs as an objective that may use the reference."""
    return PairLoss((Term(getattr(function, "__name__", "own"), LossRule(function), {}),))


def from_config(config: LossConfig) -> PairLoss:
    """Return the objective of a config; its reference settings must agree with the loss."""
    objective = configure(
        config.loss_names, config.loss_numbers, config.loss_weights, config.loss_modifiers
    )
    _check_task(config.task, objective.terms)
    objective = replace(objective, task=config.task)
    loss = f"loss '{' + '.join(config.loss_names)}'"
    is_opposite = config.disable_reference_model is not None
    stated = {
        "disable_reference_model" if is_opposite else "use_ref_model": config.use_ref_model,
        "sync_ref_model": config.sync_ref_model or None,
        "drift_limit": config.drift_limit != LossConfig().drift_limit or None,
    }
    for key, has_reference in stated.items():
        if has_reference and not objective.needs_reference:
            raise ConfigError(f"{key}: {loss} compares with no reference; remove the key.")
        if has_reference is False and objective.needs_reference:
            without = _names_of(lambda rule: not rule.reference)
            raise ConfigError(
                f"{key}: {loss} needs a reference model. Leave it on, set reference_free: true for "
                f"a uniform reference, or take a loss without one ({without})."
            )
    return objective


def _names_of(fits: Callable[[LossRule], bool]) -> str:
    """Return the names of the losses that fit, for a message."""
    return ", ".join(name for name, rule in LOSSES.items() if fits(rule))


def _check_task(task: str, terms: Sequence[Term]) -> None:
    """Check that the losses belong to the task; `sft` also trains on chosen answers of pairs."""
    for term in terms:
        is_sft = term.name == "sft" and task in ("preference", "sft")
        if not is_sft and term.rule.task != task:
            losses_of_task = _names_of(lambda rule: rule.task == task) or "sft"
            raise ConfigError(
                f"pref_loss: loss '{term.name}' is for task: {term.rule.task}, and task is {task}; "
                f"set that task, or take one of its losses ({losses_of_task})."
            )
    if task != "preference" and len(terms) > 1:
        raise ConfigError(f"pref_loss: task: {task} takes one loss; name one of them.")


def _number_problems(terms: Sequence[Term], numbers: Mapping[str, Any]) -> list[str]:
    names = [term.name for term in terms]
    listed = "; ".join(
        f"loss '{term.name}' takes {', '.join(term.rule.numbers) or 'no numbers'}" for term in terms
    )
    problems = []
    for key, number in numbers.items():
        is_read = any(key in term.rule.numbers for term in terms)
        if not is_read and not _is_neutral(key, number, names):
            problems.append(f"{key}: {listed}; it has no {key}.")
    if "gamma" in numbers and "gamma_beta_ratio" in numbers:
        problems.append("gamma, gamma_beta_ratio: two ways to set the same margin; keep one.")
    if "exo_pair" in names and numbers.get("label_smoothing") == 0:
        problems.append("label_smoothing: loss 'exo_pair' takes its logarithm; set it above 0.")
    return problems


def _is_neutral(key: str, value: Any, names: Sequence[str]) -> bool:
    """Return whether a number that no loss takes only states what the losses do anyway."""
    if key == "length_normalization":
        return all(value is (name in AVERAGED) for name in names if name != "sft")
    return not value


def _takes(modifier: str, rule: LossRule) -> bool:
    return rule.task == "preference" and TAKES[modifier](rule)


def _modifier_problems(terms: Sequence[Term], chosen: Modifiers) -> list[str]:
    problems = []
    for key in TAKES:
        if getattr(chosen, key) == getattr(Modifiers, key):
            continue
        takers = _names_of(partial(_takes, key))
        for term in terms:
            # `sft` in a mixture stays as it is; alone it would leave the modifier without effect.
            if not _takes(key, term.rule) and (term.name != "sft" or len(terms) == 1):
                text = f"not supported by loss '{term.name}'; supported by: {takers}."
                problems.append(f"{key}: {text}")
    if chosen.f_alpha_divergence_coef is not None and chosen.f_divergence_type != "alpha":
        problems.append("f_alpha_divergence_coef: only f_divergence_type: alpha has a coefficient.")
    if chosen.soft_labels and any(term.numbers.get("label_smoothing") for term in terms):
        problems.append("soft_labels, label_smoothing: two sources of the same chance; keep one.")
    return problems
