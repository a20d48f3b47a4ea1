"""The losses: one pure function each, PairLogps -> one loss per pair.

In formulas a is log policy/reference of the chosen answer and b that of the rejected one. All
arithmetic is float64 on two numbers per pair. Equations are those of the papers. The signature of a
loss is its schema; rather/losses/objective.py composes losses and modifiers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rather.config.plugins import Registry
from rather.data.batch import GroupLogps, PairLogps

# Exponents are clamped to it: in ipo's gradient exp() is squared and must stay finite in float32.
LARGEST_EXPONENT = 40.0
FLAT = 1e-12  # a deviation of scores, relative to them, that is only rounding


def gap(chosen_and_rejected: Tensor) -> Tensor:
    """[P, 2] -> [P]: chosen minus rejected."""
    return chosen_and_rejected[:, 0] - chosen_and_rejected[:, 1]


def log_ratios(x: PairLogps) -> Tensor:
    """[P, 2]: log policy / reference of each answer."""
    assert x.reference is not None
    return x.policy - x.reference


def averages(x: PairLogps) -> Tensor:
    """[P, 2]: log-prob per scored token."""
    return x.policy / x.length


def sums(x: PairLogps) -> Tensor:
    return x.policy


@dataclass(frozen=True)
class LossRule:
    """A loss and what it needs."""

    function: Callable[..., Tensor]
    reference: bool = True  # compares with a reference
    rewards: Callable[[PairLogps], Tensor] = log_ratios  # [P, 2] before beta
    divergence: bool = False  # built on log-ratios that an f-divergence may bend
    soft_labels: bool = False  # takes a label between 0 and 1 per pair
    whole_batch: bool = False  # sorts all pairs of a step, so it must see them together
    groups: bool = False  # takes GroupLogps, all scored answers of each prompt; one loss per group
    extra: tuple[str, ...] = ()  # columns of the pairs that it reads
    task: str = "preference"  # the value of the key `task` that it belongs to
    # A number of the whole step that each row is compared with, x.extra["baseline"]. "kl": from the
    # log-ratios of answers to other prompts; "mean": the running mean of all rewards.
    baseline: Literal["kl", "mean"] | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        """Return name -> default of every number, from the signature."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


LOSSES: Registry[LossRule] = Registry("loss", "rather.losses")


def loss(**needs: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a loss under the name of its function, with the fields of LossRule that differ."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        LOSSES.add(function.__name__, LossRule(function, **needs), function.__module__)
        return function

    return register


def smoothed(margin: Tensor, wrong: float | Tensor) -> Tensor:
    """Return -log sigmoid(margin), expected over labels that are wrong with chance `wrong`."""
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


def chance_wrong(x: PairLogps, label_smoothing: float) -> float | Tensor:
    """Return the chance that a label is wrong: label_smoothing, or from the soft labels."""
    return 1 - x.extra["soft_label"] if "soft_label" in x.extra else label_smoothing


def token_mean(x: PairLogps) -> Tensor:
    """Return the chosen NLL, scaled so that the pairs' mean is that of all chosen tokens."""
    return -x.policy[:, 0] / x.extra["mean_chosen_length"]


# --- with a reference ---


@loss(divergence=True, soft_labels=True)
def sigmoid(
    x: PairLogps,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    length_normalization: bool = False,
) -> Tensor:
    """DPO (2305.18290 eq. 7): -log sigmoid(beta (a - b) - gamma).

    `label_smoothing` is the probability that a label is wrong (cDPO). `gamma` is a target margin.
    `length_normalization` divides the log-ratio of each answer by its number of tokens.
    """
    ratios = log_ratios(x) / x.length if length_normalization else log_ratios(x)
    return smoothed(beta * gap(ratios) - gamma, chance_wrong(x, label_smoothing))


@loss(divergence=True, soft_labels=True)
def sigmoid_norm(
    x: PairLogps, *, beta: float = 2.0, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """Length-normalised DPO (Tulu 3, 2411.15124 eq. 6): DPO on log-ratios per token."""
    margin = beta * gap(log_ratios(x) / x.length) - gamma
    return smoothed(margin, chance_wrong(x, label_smoothing))


@loss(divergence=True)
def hinge(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """SLiC-style hinge on DPO's margin (2309.06657 eq. 10): max(0, 1 - beta (a - b))."""
    return torch.relu(1 - beta * gap(log_ratios(x)))


@loss(divergence=True)
def ipo(x: PairLogps, *, beta: float = 0.1, length_normalization: bool = True) -> Tensor:
    """IPO (2310.12036 eq. 17): (a - b - 1 / (2 beta))^2, per token; beta is the paper's tau."""
    ratios = log_ratios(x) / x.length if length_normalization else log_ratios(x)
    return (gap(ratios) - 1 / (2 * beta)) ** 2


@loss(divergence=True)
def robust(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Robust DPO (2403.00409 eq. 12): unbiased if a share label_smoothing of labels is flipped."""
    margin = beta * gap(log_ratios(x))
    kept = -(1 - label_smoothing) * logsigmoid(margin)
    return (kept + label_smoothing * logsigmoid(-margin)) / (1 - 2 * label_smoothing)


@loss(divergence=True)
def exo_pair(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """EXO (2402.00856 eq. 16): reverse KL from the policy's preference to the smoothed label."""
    margin = beta * gap(log_ratios(x))
    chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(label_smoothing))


@loss()
def nca_pair(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """NCA (2402.05369 eq. 12 for pairs): also keeps the chosen likelihood from falling."""
    a, b = (beta * log_ratios(x)).unbind(1)
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


@loss()
def bco_pair(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """BCO for pairs (2404.04656 eq. 8) without the running reward shift: classifies answers."""
    a, b = (beta * log_ratios(x)).unbind(1)
    return -logsigmoid(a) - logsigmoid(-b)


@loss()
def sppo_hard(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """SPPO with hard labels (2405.00675 eq. 4.7): pushes a to 1 / (2 beta), b to -1 / (2 beta)."""
    a, b = log_ratios(x).unbind(1)
    return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2


@loss(whole_batch=True)
def aot(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """AOT on pairs (2406.05882 eq. 9): sorted policy margins against sorted reference margins."""
    assert x.reference is not None
    margin = gap(x.policy).sort().values - gap(x.reference).sort().values
    return smoothed(beta * margin, label_smoothing)


@loss(whole_batch=True)
def aot_unpaired(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """AOT without pairing (2406.05882 eq. 11): sorted chosen against sorted rejected log-ratios."""
    a, b = log_ratios(x).sort(dim=0).values.unbind(1)
    return smoothed(beta * (a - b), label_smoothing)


@loss()
def apo_zero(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """APO-zero (2408.06266 eq. 4): chosen up, rejected down; for a model worse than chosen."""
    a, b = (beta * log_ratios(x)).unbind(1)
    return torch.sigmoid(-a) + torch.sigmoid(b)


@loss()
def apo_down(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """APO-down (2408.06266 eq. 5): both down, rejected more; for a model better than chosen."""
    a, b = (beta * log_ratios(x)).unbind(1)
    return torch.sigmoid(a) + torch.sigmoid(b - a)


@loss(divergence=True)
def discopop(x: PairLogps, *, beta: float = 0.05, discopop_tau: float = 0.05) -> Tensor:
    """DiscoPOP (2406.08414 eq. 5): logistic and exponential loss, blended by the margin."""
    margin = beta * gap(log_ratios(x))
    # One exponential for the blend times exp(-margin), which would be 0 * inf at large
    # negative margins.
    exponential = torch.exp(
        (logsigmoid(margin / discopop_tau) - margin).clamp(max=LARGEST_EXPONENT)
    )
    return torch.sigmoid(-margin / discopop_tau) * -logsigmoid(margin) + exponential


@loss(extra=("margin",))
def odpo(x: PairLogps, *, beta: float = 0.1, odpo_alpha: float = 1.0) -> Tensor:
    """ODPO (2402.10571 eq. 8): DPO whose margin must exceed odpo_alpha times the pair's offset."""
    return -logsigmoid(beta * gap(log_ratios(x)) - odpo_alpha * x.extra["margin"])


@loss()
def dpop(x: PairLogps, *, beta: float = 0.1, dpop_lambda: float = 50.0) -> Tensor:
    """DPOP (2402.13228 eq. 3): -log sigmoid(beta (a - b - dpop_lambda max(0, -a)))."""
    ratios = log_ratios(x)
    return -logsigmoid(beta * (gap(ratios) - dpop_lambda * torch.relu(-ratios[:, 0])))


@loss(divergence=True)
def rdpo(x: PairLogps, *, beta: float = 0.1, rdpo_alpha: float = 0.01) -> Tensor:
    """Length-regularised DPO (2403.19159 eq. 9): rdpo_alpha of reward is paid for by each token."""
    return -logsigmoid(beta * gap(log_ratios(x)) + rdpo_alpha * gap(x.length))


# --- without a reference ---


@loss(reference=False, rewards=averages)
def sft(x: PairLogps) -> Tensor:
    """Negative log-prob of the chosen answers, a mean over all their tokens."""
    return token_mean(x)


@loss(reference=False, rewards=averages)
def orpo(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """ORPO (2403.07691 eq. 6-7): chosen NLL per token plus beta times the odds-ratio loss."""
    return -averages(x)[:, 0] - beta * logsigmoid(log_odds_ratio(x))


@loss(reference=False, rewards=averages, soft_labels=True)
def simpo(
    x: PairLogps,
    *,
    beta: float = 2.5,
    gamma: float = 1.375,
    gamma_beta_ratio: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """SimPO (2405.14734 eq. 6): average log-probs with a target margin."""
    target = gamma if gamma_beta_ratio is None else gamma_beta_ratio * beta
    return smoothed(beta * gap(averages(x)) - target, chance_wrong(x, label_smoothing))


@loss(reference=False, rewards=sums, soft_labels=True)
def cpo(
    x: PairLogps, *, beta: float = 0.1, cpo_alpha: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """CPO (2401.08417 eq. 5): DPO with a uniform reference plus cpo_alpha times the chosen NLL."""
    preference = smoothed(beta * gap(x.policy), chance_wrong(x, label_smoothing))
    return preference + cpo_alpha * token_mean(x)


@loss(reference=False, rewards=averages)
def alphapo(
    x: PairLogps, *, beta: float = 2.5, gamma: float = 0.25, alphapo_alpha: float = 0.25
) -> Tensor:
    """AlphaPO (2501.03884 eq. 4): SimPO with the reward (1 - p^-alpha) / alpha."""
    bent = averages(x)
    if alphapo_alpha:
        bent = -torch.expm1((-alphapo_alpha * bent).clamp(max=LARGEST_EXPONENT)) / alphapo_alpha
    return -logsigmoid(beta * gap(bent) - gamma)


def log_odds_ratio(x: PairLogps) -> Tensor:
    """log odds(chosen) - log odds(rejected), odds(p) = p / (1 - p) of the average log-prob."""
    average = averages(x).clamp(max=-1e-7)  # at p = 1 the odds are infinite
    return gap(average - torch.log(-torch.expm1(average)))


# --- reward models (`task: reward`): x.policy holds scores instead of log-probs ---


@loss(task="reward", reference=False, rewards=sums)
def bradley_terry(x: PairLogps, *, center_rewards_coefficient: float = 0.0) -> Tensor:
    """Reward model on pairs (2203.02155 eq. 1): -log sigmoid(chosen - rejected - margin)."""
    margin = torch.nan_to_num(x.extra["margin"])  # 0 for pairs without one
    return -logsigmoid(gap(x.policy) - margin) + center_rewards_coefficient * x.policy.sum(1) ** 2


@loss(task="reward", reference=False, rewards=sums, extra=("margin",))
def regression(x: PairLogps) -> Tensor:
    """Reward model on scored answers: the squared error of the score."""
    return (x.policy[:, 0] - x.extra["margin"]) ** 2


# --- single answers with labels (`task: unpaired`): x.extra["soft_label"] is 1 or 0 ---


def _by_label(
    x: PairLogps,
    margin: Tensor,
    desirable: float,
    undesirable: float,
    of: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Tensor:
    """Return the weighted loss `of` minus the margin; an undesirable answer has the opposite one."""
    label = x.extra["soft_label"]
    weight = desirable * label + undesirable * (1 - label)
    return weight * of(torch.where(label > 0.5, -margin, margin))


@loss(task="unpaired", extra=("soft_label",), baseline="kl")
def kto(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (2402.01306 eq. 8): 1 - sigmoid(beta (a - KL)), or 1 - sigmoid(beta (KL - a))."""
    margin = beta * (log_ratios(x)[:, 0] - x.extra["baseline"])
    return _by_label(x, margin, desirable_weight, undesirable_weight)


@loss(task="unpaired", extra=("soft_label",), baseline="mean")
def bco(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """BCO (2404.04656 eq. 8): -log sigmoid(beta a - d), or of the opposite; d: mean reward."""
    margin = beta * log_ratios(x)[:, 0] - x.extra["baseline"]
    return _by_label(x, margin, desirable_weight, undesirable_weight, lambda m: -logsigmoid(-m))


@loss(task="unpaired", extra=("soft_label",))
def apo_zero_unpaired(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero (2408.06266 eq. 4) on single answers: 1 - sigmoid(beta a), or sigmoid(beta a)."""
    return _by_label(x, beta * log_ratios(x)[:, 0], desirable_weight, undesirable_weight)


# --- groups of scored answers (`task: scored`): all tensors are [groups, K] ---


def in_groups(x: PairLogps, function: Callable[[GroupLogps], Tensor]) -> Tensor:
    """Return a value for each answer, from a function of all answers of its prompt.

    The function returns one value per group, or one per answer. Groups of different sizes are
    passed separately, so it needs no mask.
    """
    assert x.reference is not None
    _, group_of, sizes = torch.unique(x.extra["group"], return_inverse=True, return_counts=True)
    by_group = group_of.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    values = torch.zeros_like(x.policy[:, 0])
    for size in sizes.unique().tolist():
        of_size = first[sizes == size]
        rows = by_group[of_size[:, None] + torch.arange(size, device=first.device)]
        columns = (x.policy[:, 0], x.reference[:, 0], x.length[:, 0], x.extra["margin"])
        result = function(GroupLogps(*(column[rows] for column in columns)))
        if result.ndim == 1:
            result = result[:, None].expand(rows.shape)
        values = values.index_put((rows,), result)
    return values


@loss(task="scored", groups=True, extra=("margin",))
def reward_rpo(x: GroupLogps, *, beta: float = 0.1, reward_scale: float = 1.0) -> Tensor:
    """Reward-aware RPO (2502.00203, squared distance): implicit against given differences.

    The mean over all pairs of answers i, j of (beta (a_i - a_j) - reward_scale (s_i - s_j))^2.
    """
    error = beta * (x.policy - x.reference) - reward_scale * x.scores
    differences = error[:, :, None] - error[:, None, :]
    answers = error.shape[1]
    return differences.square().sum(dim=(1, 2)) / max(1, answers * (answers - 1))


@loss(task="scored", groups=True, extra=("margin",))
def listwise(x: GroupLogps, *, beta: float = 0.1) -> Tensor:
    """Plackett-Luce DPO (2305.18290 eq. 20): each answer is the best of itself and the worse ones.

    Answers of equal score do not compete with each other.
    """
    rewards = beta * (x.policy - x.reference)
    is_worse = x.scores[:, :, None] > x.scores[:, None, :]
    competes = is_worse | torch.eye(rewards.shape[1], dtype=torch.bool, device=rewards.device)
    rivals = rewards[:, None, :].expand(is_worse.shape).masked_fill(~competes, -math.inf)
    return (rivals.logsumexp(dim=2) - rewards).sum(dim=1)


@loss(task="scored", groups=True, extra=("margin",))
def advantage(
    x: GroupLogps, *, clip_range: float = 0.2, length_normalization: bool = False
) -> Tensor:
    """GRPO on sequences (2402.03300 eq. 3): clipped ratio to the reference times the advantage.

    The advantage is the score minus the mean of the group, over its standard deviation; 0 if all
    scores are equal. `length_normalization` takes the ratio per token, as GSPO (2507.18071) does.
    """
    ratios = x.policy - x.reference
    if length_normalization:
        ratios = ratios / x.length
    ratio = torch.exp(ratios.clamp(max=LARGEST_EXPONENT))
    centred = x.scores - x.scores.mean(dim=1, keepdim=True)
    deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
    is_flat = deviation <= FLAT * x.scores.abs().amax(dim=1, keepdim=True)
    advantages = torch.where(is_flat, 0.0, centred / deviation)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean(dim=1)
