"""The objective of a run: a weighted sum of losses with its modifiers, made from a config's names
and numbers.

Every number and modifier that would have no effect is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.config.schema import DPOConfig
from rather.data.batch import PairLogps
from rather.errors import ConfigError
from rather.losses.losses import (
    LARGEST_EXPONENT,
    LOSSES,
    LossRule,
    averages,
    log_ratios,
    token_mean,
)


def _reverse_kl(ratio: Tensor, _coef: float) -> Tensor:
    return ratio


def _forward_kl(ratio: Tensor, _coef: float) -> Tensor:
    return 1 - torch.exp((-ratio).clamp(max=LARGEST_EXPONENT))


def _js(ratio: Tensor, _coef: float) -> Tensor:
    return math.log(2) + logsigmoid(ratio)


def _alpha(ratio: Tensor, coef: float) -> Tensor:
    power = coef - 1
    return ratio if power == 0 else torch.expm1((power * ratio).clamp(max=LARGEST_EXPONENT)) / power


# f-DPO (2309.16240): the log-ratio is bent by the divergence's derivative; constants that cancel
# are left out.
DIVERGENCES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js": _js,
    "alpha": _alpha,
}
AVERAGED = (
    "sigmoid_norm",
    "orpo",
    "simpo",
    "alphapo",
)  # always per token, so length_normalization: true says nothing


@dataclass(frozen=True)
class Modifiers:
    """What composes with the losses. The defaults change nothing."""

    rpo_alpha: float = 0.0  # RPO (2404.19733): plus so much chosen NLL, a mean over tokens
    pref_ftx: float = 0.0  # plus so much chosen NLL, averaged within each answer first
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float | None = None
    ld_alpha: float = 1.0  # LD-DPO (2409.06411): weight of tokens past the shorter answer's length
    use_weighting: bool = (
        False  # WPO (2406.11827): pairs weighted by how likely the policy is to write them
    )
    soft_labels: bool = False  # the `soft_label` column: chance that chosen is the better answer
    reference_free: bool = False  # a uniform reference


@dataclass(frozen=True)
class Term:
    name: str
    rule: LossRule
    numbers: Mapping[str, Any]
    weight: float

    @cached_property
    def beta(self) -> float:
        return float(self.numbers.get("beta", self.rule.numbers.get("beta", 1.0)))


@dataclass(frozen=True)
class PairLoss:
    """A weighted sum of losses with its modifiers: PairLogps -> one loss per pair."""

    terms: tuple[Term, ...]
    modifiers: Modifiers = Modifiers()

    @cached_property
    def needs_reference(self) -> bool:
        return not self.modifiers.reference_free and any(term.rule.reference for term in self.terms)

    @cached_property
    def whole_batch(self) -> bool:
        return any(term.rule.whole_batch for term in self.terms)

    @cached_property
    def token_columns(self) -> frozenset[str]:
        """Columns in addition to the sums: log-probs within the shared length, log sum of squares."""
        wanted = {"shared": self.modifiers.ld_alpha != 1, "squares": self.modifiers.use_weighting}
        return frozenset(name for name, on in wanted.items() if on)

    @property
    def pair_columns(self) -> frozenset[str]:
        """Columns of the data that it reads."""
        read = {name for term in self.terms for name in term.rule.extra}
        return frozenset(read | ({"soft_label"} if self.modifiers.soft_labels else set()))

    def description(self) -> dict[str, Any]:
        """Names, weights and effective numbers, as plain values: two objectives with one
        description are the same."""
        terms = [
            [term.name, term.weight, {**term.rule.numbers, **term.numbers}] for term in self.terms
        ]
        sources = {term.name: LOSSES.source_of(term.name) for term in self.terms}
        imported = {
            name: sha256(text.encode()).hexdigest() for name, text in sources.items() if text
        }
        own = {"imported": imported} if imported else {}  # a changed file is another loss
        return {"losses": terms, **asdict(self.modifiers), **own}

    @cached_property
    def own_metrics(self) -> frozenset[str]:
        """Names of metrics that mean something for these losses only."""
        wanted = {
            "odds_ratio": any(term.name == "orpo" for term in self.terms),
            "nll_loss": bool(self.modifiers.rpo_alpha)
            or any(term.name in ("sft", "cpo") for term in self.terms),
        }
        return frozenset(name for name, on in wanted.items() if on)

    def __call__(self, x: PairLogps) -> Tensor:
        if not self.modifiers.soft_labels:
            x = x._replace(extra={name: x.extra[name] for name in x.extra if name != "soft_label"})
        total = sum(
            term.weight * term.rule.function(self._seen(term.rule, x), **term.numbers)
            for term in self.terms
        )
        assert isinstance(total, Tensor)
        if self.modifiers.use_weighting:
            total = total * likelihood_weight(x)
        if self.modifiers.rpo_alpha:
            total = total + self.modifiers.rpo_alpha * token_mean(x)
        if self.modifiers.pref_ftx:
            total = total - self.modifiers.pref_ftx * averages(x)[:, 0]
        return total

    def rewards(self, x: PairLogps) -> Tensor:
        """[P, 2] implicit rewards of the first loss that has a preference in it."""
        term = next((t for t in self.terms if t.name != "sft"), self.terms[0])
        return term.beta * term.rule.rewards(self.effective(x))

    def _seen(self, rule: LossRule, x: PairLogps) -> PairLogps:
        """Return x as a loss sees it: only comparisons with a reference are modified."""
        if not rule.reference:
            return x
        bends = rule.divergence and self.modifiers.f_divergence_type != "reverse_kl"
        return self._bent(self.effective(x)) if bends else self.effective(x)

    def effective(self, x: PairLogps) -> PairLogps:
        """Return x with a uniform reference, or with less weight past the shorter answer."""
        uniform, alpha = self.modifiers.reference_free, self.modifiers.ld_alpha
        if uniform:
            x = x._replace(reference=torch.zeros_like(x.policy))
        if alpha != 1:
            x = x._replace(policy=_damped(x.policy, x.extra["policy/shared"], alpha))
            if x.reference is not None and not uniform:
                damped = _damped(x.reference, x.extra["reference/shared"], alpha)
                x = x._replace(reference=damped)
        return x

    def _bent(self, x: PairLogps) -> PairLogps:
        """Return x with its log-ratios bent by the f-divergence."""
        coef = self.modifiers.f_alpha_divergence_coef
        bend = DIVERGENCES[self.modifiers.f_divergence_type]
        assert x.reference is not None
        return x._replace(policy=x.reference + bend(log_ratios(x), 0.5 if coef is None else coef))


def _damped(total: Tensor, shared: Tensor, alpha: float) -> Tensor:
    return shared + alpha * (total - shared)


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
    """The objective of a run. `numbers` and `modifiers` hold what the user wrote; None and neutral
    values pass.

    A number goes to every loss that has it; one that no loss has, and a modifier that is not
    defined for a loss, are errors: all of them at once.
    """
    rules = [rule(name) for name in names]
    problems = _number_problems(names, rules, numbers)
    given = {name: value for name, value in numbers.items() if value is not None}
    terms = tuple(
        Term(name, rule, {k: v for k, v in given.items() if k in rule.numbers}, weight)
        for name, rule, weight in zip(names, rules, weights or [1.0] * len(names), strict=True)
    )
    chosen = Modifiers(
        **{name: value for name, value in (modifiers or {}).items() if value is not None}
    )
    problems += _modifier_problems(terms, chosen)
    if problems:
        raise ConfigError(problems)
    return PairLoss(terms, chosen)


def own_loss(function: Callable[[PairLogps], Tensor]) -> PairLoss:
    """A user's own function of the pairs as an objective; it may compare with the reference."""
    rule = LossRule(
        function, True, log_ratios, divergence=False, soft_labels=False, whole_batch=False, extra=()
    )
    return PairLoss((Term(getattr(function, "__name__", "own"), rule, {}, 1.0),))


def from_config(config: DPOConfig) -> PairLoss:
    """The objective that a config asks for, with or without a reference as it says."""
    objective = configure(
        config.loss_names, config.loss_numbers, config.loss_weights, config.loss_modifiers
    )
    wanted = (
        not config.disable_reference_model if config.use_ref_model is None else config.use_ref_model
    )
    stated = config.use_ref_model is not None or config.disable_reference_model is not None
    key = "disable_reference_model" if config.use_ref_model is None else "use_ref_model"
    named = " + ".join(config.loss_names)
    if stated and wanted and not objective.needs_reference:
        raise ConfigError(f"{key}: loss '{named}' compares with no reference; remove the key.")
    if stated and not wanted and objective.needs_reference:
        without = ", ".join(name for name, each in LOSSES.items() if not each.reference)
        raise ConfigError(
            f"{key}: loss '{named}' needs a reference model. Leave it on, set reference_free: true for a uniform "
            f"reference, or take a loss without one ({without})."
        )
    if config.sync_ref_model and not objective.needs_reference:
        raise ConfigError(
            f"sync_ref_model: loss '{named}' has no reference model to move; remove the key."
        )
    return objective


def rule(name: str) -> LossRule:
    """Return a loss by its name."""
    return LOSSES.find(name, "pref_loss")


def _number_problems(
    names: Sequence[str], rules: Sequence[LossRule], numbers: Mapping[str, Any]
) -> list[str]:
    known = {number for each in rules for number in each.numbers}
    taken = {
        name: ", ".join(each.numbers) or "no numbers"
        for name, each in zip(names, rules, strict=True)
    }
    listed = "; ".join(f"loss '{name}' takes {those}" for name, those in taken.items())
    foreign = [
        key
        for key, value in numbers.items()
        if key not in known and not _neutral(key, value, names)
    ]
    problems = [f"{key}: {listed}; it has no {key}." for key in foreign]
    if numbers.get("gamma") is not None and numbers.get("gamma_beta_ratio") is not None:
        problems.append("gamma, gamma_beta_ratio: two ways to say the same margin; keep one.")
    if "exo_pair" in names and numbers.get("label_smoothing") == 0:
        problems.append(
            "label_smoothing: loss 'exo_pair' takes its logarithm; set it above 0, such as 1e-3."
        )
    return problems


def _neutral(key: str, value: Any, names: Sequence[str]) -> bool:
    """Whether a number that none of the losses has says no more than what they do anyway."""
    if key == "length_normalization" and value is not None:
        return all(value is (name in AVERAGED) for name in names if name != "sft")
    return not value


def _modifier_problems(terms: Sequence[Term], chosen: Modifiers) -> list[str]:
    """Each modifier that one of the losses cannot take, named with the losses that can."""

    def refused(key: str, able: Callable[[Term], bool], why: str) -> list[str]:
        # `sft` in a mixture stays as it is; alone it would leave the modifier without effect.
        unable = [
            term.name
            for term in terms
            if not able(term) and (term.name != "sft" or len(terms) == 1)
        ]
        takers = ", ".join(name for name, each in LOSSES.items() if able(Term(name, each, {}, 1.0)))
        return [f"{key}: loss '{name}' {why}; those that can take it: {takers}." for name in unable]

    problems: list[str] = []
    if chosen.f_divergence_type not in DIVERGENCES:
        problems.append(
            f"f_divergence_type: '{chosen.f_divergence_type}' is none of {', '.join(DIVERGENCES)}."
        )
    elif chosen.f_divergence_type != "reverse_kl":
        problems += refused(
            "f_divergence_type", lambda t: t.rule.divergence, "is not built on a bent log-ratio"
        )
    if chosen.f_alpha_divergence_coef is not None and chosen.f_divergence_type != "alpha":
        problems.append("f_alpha_divergence_coef: only f_divergence_type: alpha has a coefficient.")
    if chosen.soft_labels:
        problems += refused("soft_labels", lambda t: t.rule.soft_labels, "has no soft label")
        if any(term.numbers.get("label_smoothing") for term in terms):
            problems.append(
                "soft_labels, label_smoothing: two sources of the same chance; keep one."
            )
    if chosen.reference_free:
        problems += refused(
            "reference_free", lambda t: t.rule.reference, "has no reference to leave out"
        )
    if chosen.ld_alpha != 1:
        problems += refused("ld_alpha", lambda t: t.rule.reference, "has no log-ratio to damp")
    if chosen.use_weighting:
        problems += refused(
            "use_weighting", lambda t: not t.rule.whole_batch, "sorts the batch: no pair to weight"
        )
    return problems
