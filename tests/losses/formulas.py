"""Every loss and modifier once more, in NumPy and float64, written from the papers and not from
our code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rather.data.batch import PairLogps
from rather.losses.losses import LOSSES

Array = NDArray[np.float64]
# Losses of pairs; those of single answers and reward models are in test_feedback.py.
PAIRWISE = {name: rule for name, rule in LOSSES.items() if rule.task == "preference"}


@dataclass(frozen=True)
class Numbers:
    """What is known of some pairs; columns of chosen (w) and rejected (l) answers."""

    policy_w: Array
    policy_l: Array
    reference_w: Array
    reference_l: Array
    length_w: Array
    length_l: Array
    shared: Array  # [role, side, pair]: log-probs of the first tokens, as many as the shorter answer has
    squares: Array  # [side, pair]
    margin: Array
    label: Array

    @property
    def a(self) -> Array:
        return self.policy_w - self.reference_w

    @property
    def b(self) -> Array:
        return self.policy_l - self.reference_l


def some_pairs(count: int = 6, seed: int = 0) -> Numbers:
    """Log-probs of a policy some way from its reference; answers of 1 to 9 tokens."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 10, size=(2, count)).astype(float)
    lengths[:, 0] = 1
    reference = -draw.uniform(0.5, 3, size=(2, count)) * lengths
    policy = np.minimum(reference + draw.normal(0, 2, size=(2, count)), -0.05)
    part = lengths.min(axis=0) / lengths * draw.uniform(0.7, 1.0, size=(2, count))
    part[lengths == lengths.min(axis=0)] = 1
    return Numbers(
        policy[0], policy[1], reference[0], reference[1], lengths[0], lengths[1],
        shared=np.stack([policy * part, reference * part]),
        squares=-draw.uniform(0.3, 1.5, size=(2, count)) * lengths,
        margin=draw.uniform(0, 2, size=count),
        label=draw.uniform(0.5, 1, size=count),
    )  # fmt: skip


def as_logps(pairs: Numbers, *, soft_labels: bool = False) -> PairLogps:
    """The same numbers as a loss takes them."""

    def columns(chosen: Array, rejected: Array) -> torch.Tensor:
        return torch.from_numpy(np.stack([chosen, rejected], axis=1))

    extra = {
        "margin": torch.from_numpy(pairs.margin),
        "mean_chosen_length": torch.tensor(pairs.length_w.mean(), dtype=torch.float64),
        "policy/shared": columns(*pairs.shared[0]),
        "reference/shared": columns(*pairs.shared[1]),
        "policy/squares": columns(*pairs.squares),
    }
    if soft_labels:
        extra["soft_label"] = torch.from_numpy(pairs.label)
    policy, reference = (
        columns(pairs.policy_w, pairs.policy_l),
        columns(pairs.reference_w, pairs.reference_l),
    )
    return PairLogps(policy, reference, columns(pairs.length_w, pairs.length_l), extra)


def cost(z: Any) -> Array:
    """-log sigmoid(z)."""
    return np.logaddexp(0, -z)


def prob(z: Any) -> Array:
    return np.exp(-cost(z))


def mixed(z: Array, wrong: Any) -> Array:
    """Expected cost when a label is wrong with probability `wrong`."""
    return (1 - wrong) * cost(z) + wrong * cost(-z)


def sigmoid(
    p: Numbers, beta: float, label_smoothing: Any, gamma: float, length_normalization: bool
) -> Array:
    n_w, n_l = (p.length_w, p.length_l) if length_normalization else (1.0, 1.0)
    return mixed(beta * (p.a / n_w - p.b / n_l) - gamma, label_smoothing)


def sigmoid_norm(p: Numbers, beta: float, label_smoothing: Any, gamma: float) -> Array:
    return mixed(beta * (p.a / p.length_w - p.b / p.length_l) - gamma, label_smoothing)


def hinge(p: Numbers, beta: float) -> Array:
    return np.maximum(0, 1 - beta * (p.a - p.b))


def ipo(p: Numbers, beta: float, length_normalization: bool) -> Array:
    if length_normalization:
        return (p.a / p.length_w - p.b / p.length_l - 1 / (2 * beta)) ** 2
    return (p.a - p.b - 1 / (2 * beta)) ** 2


def robust(p: Numbers, beta: float, label_smoothing: float) -> Array:
    z, e = beta * (p.a - p.b), label_smoothing
    return ((1 - e) * cost(z) - e * cost(-z)) / (1 - 2 * e)


def exo_pair(p: Numbers, beta: float, label_smoothing: float) -> Array:
    """KL from the model's preference to the label's."""
    model = np.stack([prob(beta * (p.a - p.b)), prob(-beta * (p.a - p.b))])
    label = np.array([1 - label_smoothing, label_smoothing])[:, None]
    return np.sum(model * np.log(model / label), axis=0)


def nca_pair(p: Numbers, beta: float) -> Array:
    return cost(beta * p.a) + (cost(-beta * p.a) + cost(-beta * p.b)) / 2


def bco_pair(p: Numbers, beta: float) -> Array:
    return cost(beta * p.a) + cost(-beta * p.b)


def sppo_hard(p: Numbers, beta: float) -> Array:
    return (p.a - 1 / (2 * beta)) ** 2 + (p.b + 1 / (2 * beta)) ** 2


def aot(p: Numbers, beta: float, label_smoothing: float) -> Array:
    policy, reference = np.sort(p.policy_w - p.policy_l), np.sort(p.reference_w - p.reference_l)
    return mixed(beta * (policy - reference), label_smoothing)


def aot_unpaired(p: Numbers, beta: float, label_smoothing: float) -> Array:
    return mixed(beta * (np.sort(p.a) - np.sort(p.b)), label_smoothing)


def apo_zero(p: Numbers, beta: float) -> Array:
    return 1 - prob(beta * p.a) + prob(beta * p.b)


def apo_down(p: Numbers, beta: float) -> Array:
    return prob(beta * p.a) + 1 - prob(beta * (p.a - p.b))


def discopop(p: Numbers, beta: float, discopop_tau: float) -> Array:
    z = beta * (p.a - p.b)
    blend = prob(z / discopop_tau)
    return (1 - blend) * cost(z) + blend * np.exp(-z)


def odpo(p: Numbers, beta: float, odpo_alpha: float) -> Array:
    return cost(beta * (p.a - p.b) - odpo_alpha * p.margin)


def dpop(p: Numbers, beta: float, dpop_lambda: float) -> Array:
    fallen = np.maximum(0, p.reference_w - p.policy_w)
    return cost(beta * (p.a - p.b - dpop_lambda * fallen))


def rdpo(p: Numbers, beta: float, rdpo_alpha: float) -> Array:
    return cost(beta * (p.a - p.b) + rdpo_alpha * p.length_w - rdpo_alpha * p.length_l)


def sft(p: Numbers) -> Array:
    """Its mean over pairs is the mean over all chosen tokens."""
    return -p.policy_w * len(p.policy_w) / p.length_w.sum()


def orpo(p: Numbers, beta: float) -> Array:
    chosen, rejected = np.exp(p.policy_w / p.length_w), np.exp(p.policy_l / p.length_l)
    odds_ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
    return -np.log(chosen) + beta * cost(np.log(odds_ratio))


def simpo(
    p: Numbers, beta: float, gamma: float, gamma_beta_ratio: float | None, label_smoothing: Any
) -> Array:
    target = gamma if gamma_beta_ratio is None else gamma_beta_ratio * beta
    return mixed(
        beta * p.policy_w / p.length_w - beta * p.policy_l / p.length_l - target, label_smoothing
    )


def cpo(p: Numbers, beta: float, cpo_alpha: float, label_smoothing: Any) -> Array:
    return mixed(beta * (p.policy_w - p.policy_l), label_smoothing) + cpo_alpha * sft(p)


def alphapo(p: Numbers, beta: float, gamma: float, alphapo_alpha: float) -> Array:
    def reward(average: Array) -> Array:
        return (1 - np.exp(average) ** -alphapo_alpha) / alphapo_alpha if alphapo_alpha else average

    return cost(beta * (reward(p.policy_w / p.length_w) - reward(p.policy_l / p.length_l)) - gamma)


FORMULAS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        sigmoid, sigmoid_norm, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired,
        apo_zero, apo_down, discopop, odpo, dpop, rdpo, sft, orpo, simpo, cpo, alphapo,
    )
}  # fmt: skip


# --- modifiers: pairs as a loss with a reference sees them ---


def bent(p: Numbers, kind: str, coef: float = 0.5) -> Numbers:
    """f-DPO: each log-ratio u becomes f'(e^u) of the divergence, up to constants that cancel."""
    slope: dict[str, Callable[[Array], Array]] = {
        "reverse_kl": np.log,
        "forward_kl": lambda t: 1 - 1 / t,
        "js": lambda t: np.log(2 * t / (1 + t)),
        "alpha": lambda t: (t ** (coef - 1) - 1) / (coef - 1),
    }
    zero = np.zeros_like(p.a)
    chosen, rejected = slope[kind](np.exp(p.a)), slope[kind](np.exp(p.b))
    return replace(p, policy_w=chosen, policy_l=rejected, reference_w=zero, reference_l=zero)


def damped(p: Numbers, alpha: float) -> Numbers:
    """LD-DPO: tokens past the shorter answer's length count alpha."""
    totals = np.stack([[p.policy_w, p.policy_l], [p.reference_w, p.reference_l]])
    mixture = alpha * totals + (1 - alpha) * p.shared
    return replace(
        p,
        policy_w=mixture[0, 0],
        policy_l=mixture[0, 1],
        reference_w=mixture[1, 0],
        reference_l=mixture[1, 1],
    )


def without_reference(p: Numbers) -> Numbers:
    return replace(p, reference_w=np.zeros_like(p.a), reference_l=np.zeros_like(p.a))


def likelihood(p: Numbers) -> Array:
    """WPO: geometric mean over tokens of p / sum p^2, of both answers."""
    chosen = np.exp(p.policy_w - p.squares[0]) ** (1 / p.length_w)
    return chosen * np.exp(p.policy_l - p.squares[1]) ** (1 / p.length_l)
