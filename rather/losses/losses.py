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
    """DPO (2305.18290, eq. 7): the first to try.

    A Bradley-Terry classifier on log-ratios: the larger the margin of a pair already is, the
    smaller its gradient.

        -log σ(β (a - b) - γ)

    When: The first loss to try. It is the most widely used, and every other loss here is described
    by its difference from it.

    Start with: beta 0.01 with learning rate 3e-7 to 7e-7 for models of 7 to 9 billion weights
    (Zephyr, and SimPO's tuned baseline); beta 0.1 keeps the policy closer to the reference and
    suits small sets of pairs. `label_smoothing: 0.1` (cDPO) when some labels are wrong. `gamma` is
    ColossalChat's margin; leave it at 0 unless a config brings it.

    length_normalization: log-ratios per token instead of sums.
    """
    ratios = log_ratios(x) / x.length if length_normalization else log_ratios(x)
    return smoothed(beta * gap(ratios) - gamma, chance_wrong(x, label_smoothing))


@loss(divergence=True, soft_labels=True)
def sigmoid_norm(
    x: PairLogps, *, beta: float = 2.0, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """Length-normalised DPO (2411.15124, eq. 6): answers grow too long under DPO.

    DPO on log-ratios per token, so that long answers do not bring large margins by their length
    alone. The same as `sigmoid` with `length_normalization: true` and its own default of beta.

        -log σ(β (a / |chosen| - b / |rejected|) - γ)

    When: Chosen answers are longer than rejected ones and the policy becomes verbose:
    `rewards/length_correlation` far above 0.

    Start with: beta 5 (Tulu 3, learning rate 5e-7 at 8B, 2e-7 at 70B). Log-ratios per token are
    small: with beta 0.1 almost nothing changes.

    beta: scale of the log-ratios per token.
    """
    margin = beta * gap(log_ratios(x) / x.length) - gamma
    return smoothed(margin, chance_wrong(x, label_smoothing))


@loss(divergence=True)
def hinge(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """Hinge (2309.06657, eq. 10): pairs should stop contributing once decided.

    DPO's margin with a hinge loss: a pair that has reached its margin has no gradient.

        max(0, 1 - β (a - b))

    When: DPO keeps pushing pairs that already have a large margin.

    Start with: beta sets where learning ends: at a margin of 1 / beta nats, 10 for the default.
    Take the learning rate of DPO.
    """
    return torch.relu(1 - beta * gap(log_ratios(x)))


@loss(divergence=True)
def ipo(x: PairLogps, *, beta: float = 0.1, length_normalization: bool = True) -> Tensor:
    """IPO (2310.12036, eq. 17): few pairs or many epochs.

    A squared distance to a fixed margin: unlike DPO, it does not increase margins without limit.

        (a / |chosen| - b / |rejected| - 1 / (2 β))²
            with length_normalization: false: (a - b - 1 / (2 β))²

    When: Few pairs, several epochs, or labels without noise, where DPO overfits.

    Start with: beta is the paper's tau. Averages per token are the default: the summed form gives a
    target that depends on length. Hugging Face's study over 0.01 to 0.9 found 0.01 best on both of
    its 7B models. Gradients are large: `max_grad_norm` clips most steps, so the learning rate alone
    sets the step size.

    beta: the target margin is 1 / (2 beta); the paper's tau.
    length_normalization: averages per token; false is the summed form.
    """
    ratios = log_ratios(x) / x.length if length_normalization else log_ratios(x)
    return (gap(ratios) - 1 / (2 * beta)) ** 2


@loss(divergence=True)
def robust(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Robust DPO (2403.00409, eq. 12): a known share of labels is flipped.

    DPO corrected for a known rate of flipped labels, so that its mean over flipped labels is DPO's
    on true ones.

        (-(1 - ε) log σ(m) + ε log σ(-m)) / (1 - 2 ε),   m = β (a - b), ε = label_smoothing

    When: You know roughly how many labels are flipped, from double labelling. cDPO (`sigmoid` with
    `label_smoothing`) is the milder choice when you do not: `robust` rewards margins without end.

    Start with: label_smoothing at the measured rate, 0.05 to 0.2 for crowd labels; beta 0.1.

    label_smoothing: share of flipped labels; 0 is DPO.
    """
    margin = beta * gap(log_ratios(x))
    unflipped = -(1 - label_smoothing) * logsigmoid(margin)
    return (unflipped + label_smoothing * logsigmoid(-margin)) / (1 - 2 * label_smoothing)


@loss(divergence=True)
def exo_pair(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """EXO (2402.00856, eq. 16): mode-seeking variant of DPO.

    The reverse divergence, from the policy's own preference to the smoothed label, which is
    mode-seeking instead of mode-covering.

        q (log q - log(1 - ε)) + (1 - q) (log(1 - q) - log ε),
            q = σ(β (a - b)), ε = label_smoothing

    When: DPO spreads probability over answers that are neither chosen nor good.

    Start with: The authors' scripts: beta 0.5, learning rate 1e-6, batch 128. label_smoothing must
    be above 0; 1e-3 is nearly hard labels and starts with a large loss (2.76).

    label_smoothing: the paper's epsilon; above 0.
    """
    margin = beta * gap(log_ratios(x))
    chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(label_smoothing))


@loss()
def nca_pair(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """NCA (2402.05369, eq. 12 for pairs): chosen answers must stay likely.

    Noise-contrastive: each answer is judged on its own, and the chosen one is also kept near its
    initial likelihood.

        -log σ(β a) - ½ log σ(-β a) - ½ log σ(-β b)

    When: `logps/chosen` falls under DPO, as in reasoning and code, where the chosen answer is right
    and should stay likely.

    Start with: beta 0.01 (authors, with adapters at 5e-6; a tenth of that for all weights).
    """
    a, b = (beta * log_ratios(x)).unbind(1)
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


@loss()
def bco_pair(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """BCO on pairs (2404.04656, eq. 8): answers judged one by one.

    A classifier of single answers: chosen ones above the reference, rejected ones below it. Without
    the paper's running shift of the rewards.

        -log σ(β a) - log σ(-β b)

    When: Chosen and rejected answers differ in kind, or as one part of a mixture (MPO: with
    `sigmoid` and `sft`).

    Start with: beta 0.1. The mixture: `pref_loss: [sigmoid, bco_pair, sft]` with weights 0.8, 0.2
    and 1.
    """
    a, b = (beta * log_ratios(x)).unbind(1)
    return -logsigmoid(a) - logsigmoid(-b)


@loss()
def sppo_hard(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """SPPO with hard labels (2405.00675, eq. 4.7): rounds of self-play.

    Squared distances of both log-ratios to fixed targets, derived from self-play.

        (a - 1 / (2 β))² + (b + 1 / (2 β))²

    When: Rounds of self-play: sample answers, rank them, train, sample again.

    Start with: beta 0.001 (authors), learning rate 5e-7. The targets are then +500 and -500 nats,
    out of reach: the loss falls only slightly from 500,000; watch `rewards/accuracies`.

    beta: the targets are plus and minus 1 / (2 beta).
    """
    a, b = log_ratios(x).unbind(1)
    return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2


@loss(whole_batch=True)
def aot(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """AOT on pairs (2406.05882, eq. 9): shift the whole distribution of margins.

    Compares distributions instead of pairs: the sorted margins of the policy must be above the
    sorted margins of the reference, over all pairs of a step.

        -(1 - ε) log σ(β d) - ε log σ(-β d),
            d = sort(log π(chosen) - log π(rejected)) - sort(the same of the reference),
            ε = label_smoothing

    When: Large batches, and a wish that the whole distribution of margins moves, not its easiest
    pairs.

    Start with: beta 0.1 and a batch of 128 or more: with one pair it is DPO. Micro-batches change
    nothing, the sort sees the whole step.
    """
    assert x.reference is not None
    margin = gap(x.policy).sort().values - gap(x.reference).sort().values
    return smoothed(beta * margin, label_smoothing)


@loss(whole_batch=True)
def aot_unpaired(x: PairLogps, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """AOT without pairing (2406.05882, eq. 11): answers that do not belong in pairs.

    The sorted log-ratios of all chosen answers of a step against those of all rejected ones: which
    answer belongs to which prompt does not matter.

        -(1 - ε) log σ(β d) - ε log σ(-β d),   d = sort(a) - sort(b), ε = label_smoothing

    When: The two answers of a row have little to do with each other.

    Start with: As `aot`: beta 0.1, a batch of 128 or more.
    """
    a, b = log_ratios(x).sort(dim=0).values.unbind(1)
    return smoothed(beta * (a - b), label_smoothing)


@loss()
def apo_zero(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """APO-zero (2408.06266, eq. 4): chosen answers better than the model.

    Anchored at the reference: raises chosen answers above it and lowers rejected ones below it.

        σ(-β a) + σ(β b)

    When: The chosen answers are better than what the model writes, as with answers of a stronger
    model.

    Start with: beta 0.05, learning rate 1e-6 (SmolLM3-3B). Both parts saturate: pairs far on the
    right side stop teaching.
    """
    a, b = (beta * log_ratios(x)).unbind(1)
    return torch.sigmoid(-a) + torch.sigmoid(b)


@loss()
def apo_down(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """APO-down (2408.06266, eq. 5): model better than the chosen answers.

    Anchored at the reference: lowers both answers, the rejected one more.

        σ(β a) + σ(β (b - a))

    When: The model already writes better than the chosen answers, and only the difference should be
    learnt. Watch `logps/chosen`: it is meant to fall.

    Start with: beta 0.05 as for `apo_zero`.
    """
    a, b = (beta * log_ratios(x)).unbind(1)
    return torch.sigmoid(a) + torch.sigmoid(b - a)


@loss(divergence=True)
def discopop(x: PairLogps, *, beta: float = 0.05, discopop_tau: float = 0.05) -> Tensor:
    """DiscoPOP (2406.08414, eq. 5): reproduce the paper.

    Found by a search over programs: logistic loss for negative margins and exponential loss for
    positive ones, blended by the margin itself.

        (1 - w) · (-log σ(m)) + w · exp(-m),   m = β (a - b), w = σ(m / τ), τ = discopop_tau

    When: Out of interest, or to reproduce the paper. With the paper's temperature 0.05 (the
    default) the loss RISES for m between -0.12 and 0.07: its slope at 0 is (1 - ln 2) / (4 τ) -
    0.75, positive below τ = 0.102. A policy equal to its reference starts at m = 0 and walks to the
    minimum at m = -0.12, where rejected answers are the likelier ones. Above τ = 0.11 the loss
    falls everywhere.

    Start with: beta 0.05 and learning rate 5e-7 (authors, Gemma-7B, two epochs), with
    `discopop_tau: 0.2`, whose slope at 0 is -0.37. With the paper's 0.05 the policy must already be
    ahead of its reference.

    discopop_tau: temperature of the blend; above 0.11 for training from the reference.
    """
    margin = beta * gap(log_ratios(x))
    # One exponential for the blend times exp(-margin), which would be 0 * inf at large
    # negative margins.
    exponential = torch.exp(
        (logsigmoid(margin / discopop_tau) - margin).clamp(max=LARGEST_EXPONENT)
    )
    return torch.sigmoid(-margin / discopop_tau) * -logsigmoid(margin) + exponential


@loss(extra=("margin",))
def odpo(x: PairLogps, *, beta: float = 0.1, odpo_alpha: float = 1.0) -> Tensor:
    """ODPO (2402.10571, eq. 8): pairs with scores.

    DPO with a target margin per pair: how much better its chosen answer is. Reads the column
    `margin` of every row.

        -log σ(β (a - b) - α · margin),   α = odpo_alpha

    When: Your pairs come with scores. A pair of two nearly equal answers should not be pulled as
    far apart as one of a good and a bad answer.

    Start with: The paper writes the logarithm of the difference of the scores into the margin; beta
    0.05 with alpha 1 (toxicity), beta 0.7 with alpha 0.5 (sentiment), learning rate 5e-7.

    odpo_alpha: scale of the margin column; 0 is DPO.
    """
    return -logsigmoid(beta * gap(log_ratios(x)) - odpo_alpha * x.extra["margin"])


@loss()
def dpop(x: PairLogps, *, beta: float = 0.1, dpop_lambda: float = 50.0) -> Tensor:
    """DPOP (2402.13228, eq. 3): answers that differ in few tokens.

    DPO with a penalty if the chosen answer becomes less likely than under the reference.

        -log σ(β (a - b - λ max(0, -a))),   λ = dpop_lambda

    When: Both answers share most of their tokens, as in mathematics or code, and
    `logps/chosen_below_reference` is near 1.

    Start with: The paper takes beta 0.3 and lambda 50; it reports little difference between 5 and
    500.

    dpop_lambda: weight of the fall of the chosen log-prob; 0 is DPO.
    """
    ratios = log_ratios(x)
    return -logsigmoid(beta * (gap(ratios) - dpop_lambda * torch.relu(-ratios[:, 0])))


@loss(divergence=True)
def rdpo(x: PairLogps, *, beta: float = 0.1, rdpo_alpha: float = 0.01) -> Tensor:
    """Length-regularised DPO (2403.19159, eq. 9): chosen answers are longer, and answers grow.

    DPO for a reward that each token of an answer lowers: a longer chosen answer must be better by
    that much.

        -log σ(β (a - b) + α (|chosen| - |rejected|)),   α = rdpo_alpha

    When: Chosen answers are longer than rejected ones, and the trained model writes more and more,
    as in several rounds.

    Start with: Alpha from 0.005 to 0.05 at beta 0.1: ten tokens more then cost as much as one nat
    of log-ratio at 0.01. Watch `rewards/length_correlation`.

    rdpo_alpha: reward that each token costs; 0 is DPO.
    """
    return -logsigmoid(beta * gap(log_ratios(x)) + rdpo_alpha * gap(x.length))


# --- without a reference ---


@loss(reference=False, rewards=averages)
def sft(x: PairLogps) -> Tensor:
    """SFT: baseline, or a part of a mixture.

    Plain fine-tuning on the chosen answers: the mean negative log-prob over all their tokens in the
    step. No preference, no numbers.

        -Σ log π(chosen) / Σ |chosen|        sums over the pairs of the step

    When: A baseline on the chosen answers of pairs (with `task: sft` also on other rows), or one
    part of a mixture: `pref_loss: [sigmoid, sft]` with `loss_weights`.

    Start with: As a part: weight 0.1 to 1. Alone: learning rate 2e-5, which is far above that of a
    preference loss.
    """
    return token_mean(x)


@loss(reference=False, rewards=averages)
def orpo(x: PairLogps, *, beta: float = 0.1) -> Tensor:
    """ORPO (2403.07691, eq. 6 and 7): a single stage from a base model.

    Fine-tuning and preference in one loss: the negative log-prob per token of the chosen answer,
    plus the odds of chosen against rejected. No reference.

        -L(chosen) - β log σ(log odds(chosen) - log odds(rejected)),
            L = log-prob per token, odds(p) = p / (1 - p) of p = exp(L)

    When: From a base model, with no fine-tuning before it, or when there is no memory for a
    reference.

    Start with: beta 0.1 (the paper's lambda) and learning rate 5e-6: authors, Mistral 7B, batch 32,
    five epochs. SimPO's comparison searched lambda in 0.1 to 2.

    beta: weight of the preference; the paper's lambda.
    """
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
    """SimPO (2405.14734, eq. 6): no reference, ranked answers of the model itself.

    The reward is the log-prob per token itself: no reference, no bonus for length, and a margin to
    reach.

        -log σ(β (L(chosen) - L(rejected)) - γ),
            L = log-prob per token, γ = gamma or gamma_beta_ratio · β

    When: No memory for a reference, or answers of the model itself ranked by a reward model, where
    the paper beats DPO. Only a small learning rate keeps the policy near its start.

    Start with: Authors: beta 2 to 10, gamma_beta_ratio 0.3 to 0.8 (start at 0.5), learning rate
    3e-7 to 1e-6, batch 128; six recipes with their numbers. `gamma` is absolute: 1.375 is 0.55
    times beta 2.5.

    beta: scale of the log-prob per token.
    gamma: margin to reach, absolute.
    gamma_beta_ratio: the margin as a multiple of beta, instead of gamma.
    """
    target = gamma if gamma_beta_ratio is None else gamma_beta_ratio * beta
    return smoothed(beta * gap(averages(x)) - target, chance_wrong(x, label_smoothing))


@loss(reference=False, rewards=sums, soft_labels=True)
def cpo(
    x: PairLogps, *, beta: float = 0.1, cpo_alpha: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """CPO (2401.08417, eq. 5): no reference, chosen answers worth imitating.

    DPO with a uniform reference (so none is loaded), plus the likelihood of the chosen answers as
    an anchor.

        -log σ(β (log π(chosen) - log π(rejected))) + α · NLL(chosen),
            α = cpo_alpha, NLL a mean over tokens

    When: No memory for a reference, and chosen answers good enough to imitate, as translations.

    Start with: beta 0.1 and cpo_alpha 1 (authors, ALMA-R, adapters at 1e-4); SimPO's comparison
    searched beta in 0.01 to 0.1. Sums of log-probs favour short answers: prefer `simpo` where
    lengths differ.

    beta: scale of the difference of log-probs.
    cpo_alpha: weight of the likelihood of the chosen answers.
    """
    preference = smoothed(beta * gap(x.policy), chance_wrong(x, label_smoothing))
    return preference + cpo_alpha * token_mean(x)


@loss(reference=False, rewards=averages)
def alphapo(
    x: PairLogps, *, beta: float = 2.5, gamma: float = 0.25, alphapo_alpha: float = 0.25
) -> Tensor:
    """AlphaPO (2501.03884, eq. 4): SimPO with less decline of the chosen answers.

    SimPO with a reshaped reward; a parameter controls how fast it saturates.

        -log σ(β (r(chosen) - r(rejected)) - γ),
            r = (1 - p^-α) / α of p = exp(log-prob per token), α = alphapo_alpha

    When: SimPO works but pushes `logps/chosen` down too far: a small positive alpha keeps it up.

    Start with: alphapo_alpha 0.25 with SimPO's beta; 0 is SimPO. Search alpha from -0.5 to 0.5
    before the margin.

    beta: scale of the bent reward.
    gamma: margin to reach, absolute.
    alphapo_alpha: shape of the reward; 0 is SimPO's.
    """
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
    """Reward model on pairs (2203.02155, eq. 1): pairs.

    The score of the chosen answer should exceed that of the rejected one, by the pair's `margin` if
    it has one.

        -log σ(r(chosen) - r(rejected) - margin) + c (r(chosen) + r(rejected))²

    When: A reward model for sampling, ranking or filtering, or as a judge.

    Start with: Learning rate 1e-5, one epoch; `center_rewards_coefficient: 0.01` if scores of
    different runs are compared.

    center_rewards_coefficient: c: keeps scores around 0, which the first term leaves open.
    """
    margin = torch.nan_to_num(x.extra["margin"])  # 0 for pairs without one
    return -logsigmoid(gap(x.policy) - margin) + center_rewards_coefficient * x.policy.sum(1) ** 2


@loss(task="reward", reference=False, rewards=sums, extra=("score",))
def regression(x: PairLogps) -> Tensor:
    """Reward model on scores: answers with scores.

    The score of each answer should equal the number in the column `score`.

        (r(answer) - score)²

    When: Answers have scores, such as ratings from 1 to 5, and the numbers themselves matter.

    Start with: Learning rate 1e-5; subtract the mean of the scores first, and divide by their
    spread.
    """
    return (x.policy[:, 0] - x.extra["score"]) ** 2


# --- single answers with labels (`task: unpaired`): x.extra["label"] is 1 or 0 ---


def _by_label(
    x: PairLogps,
    margin: Tensor,
    desirable: float,
    undesirable: float,
    loss_fn: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Tensor:
    """Apply `loss_fn` to -margin of desirable answers, +margin of undesirable ones; weighted."""
    label = x.extra["label"]
    weight = desirable * label + undesirable * (1 - label)
    return weight * loss_fn(torch.where(label > 0.5, -margin, margin))


@loss(task="unpaired", extra=("label",), baseline="kl")
def kto(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (2402.01306, eq. 8): the first to try.

    Single answers with a thumb up or down. Each is compared with a common number, an estimate of
    how far the policy is from the reference.

        1 - σ(β (a - KL))        a desirable answer
        1 - σ(β (KL - a))        an undesirable answer
        KL = max(0, mean of log π(y'|x) - log π_ref(y'|x)) over the step

    When: There are thumbs, not pairs. The answers are of mixed quality, and many prompts have one
    answer.

    Start with: beta 0.1, the learning rate of DPO, and steps of 32 answers or more. Set
    `undesirable_weight` so that the weighted sums of both labels are about equal (advice).
    """
    margin = beta * (log_ratios(x)[:, 0] - x.extra["baseline"])
    return _by_label(x, margin, desirable_weight, undesirable_weight)


@loss(task="unpaired", extra=("label",), baseline="mean")
def bco(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """BCO on single answers (2404.04656, eq. 8): most answers belong to one prompt.

    A classifier of desirable and undesirable answers around the mean reward of all answers so far.
    For pairs there is `bco_pair`.

        -log σ(β a - d)          a desirable answer
        -log σ(d - β a)          an undesirable answer
        d = running mean of β a over all answers so far, those of this step included

    When: There are thumbs, not pairs, and one prompt has most of the answers, so that KTO has no
    other prompts to compare with.

    Start with: beta 0.1. The running mean is part of a checkpoint, and `rather eval` of a run's
    result compares with that of its newest checkpoint. For other weights it is not known: `rather
    eval` then compares with the mean reward over the held-out answers, and says so.
    """
    margin = beta * log_ratios(x)[:, 0] - x.extra["baseline"]
    return _by_label(x, margin, desirable_weight, undesirable_weight, lambda m: -logsigmoid(-m))


@loss(task="unpaired", extra=("label",))
def apo_zero_unpaired(
    x: PairLogps,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero on single answers (2408.06266, eq. 4): answers better than the model.

    Desirable answers up, undesirable ones down, around a reward of 0. It needs no statistics of the
    step, so it is the cheapest of the three.

        1 - σ(β a)               a desirable answer
        σ(β a)                   an undesirable answer

    When: There are thumbs, not pairs, and desirable answers are better than those of the model.

    Start with: beta 0.1, the learning rate of DPO.
    """
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
        columns = (x.policy[:, 0], x.reference[:, 0], x.length[:, 0], x.extra["score"])
        per_answer = function(GroupLogps(*(column[rows] for column in columns)))
        if per_answer.ndim == 1:  # one value per group
            per_answer = per_answer[:, None].expand(rows.shape)
        values = values.index_put((rows,), per_answer)
    return values


@loss(task="scored", groups=True, extra=("score",))
def reward_rpo(x: GroupLogps, *, beta: float = 0.1, reward_scale: float = 1.0) -> Tensor:
    """Reward-aware RPO (2502.00203): the size of the differences matters.

    The differences of implicit rewards should equal the differences of the given scores. The
    distance is the squared one.

        mean over all pairs i, j of (β (aᵢ - aⱼ) - η (sᵢ - sⱼ))²,   η = reward_scale

    When: The size of a difference matters: two nearly equal answers should not be pulled apart. It
    stops when the differences are reached, where DPO goes on.

    Start with: Scores from 0 to 1 and beta 0.1; a difference of 1 then asks for 10 nats.

    reward_scale: factor of the scores.
    """
    error = beta * (x.policy - x.reference) - reward_scale * x.scores
    differences = error[:, :, None] - error[:, None, :]
    answers = error.shape[1]
    return differences.square().sum(dim=(1, 2)) / max(1, answers * (answers - 1))


@loss(task="scored", groups=True, extra=("score",))
def listwise(x: GroupLogps, *, beta: float = 0.1) -> Tensor:
    """Plackett-Luce DPO (2305.18290, eq. 20): the order of the answers is what you trust.

    DPO on the whole order of the answers instead of one pair. Answers of equal score do not compete
    with each other.

        - Σᵢ log( exp(β aᵢ) / Σⱼ exp(β aⱼ) ),   j: i itself and all answers with a lower score

    When: There are more than two answers to a prompt and the order is what you trust, not the size
    of the differences.

    Start with: The settings of DPO.
    """
    rewards = beta * (x.policy - x.reference)
    is_worse = x.scores[:, :, None] > x.scores[:, None, :]
    competes = is_worse | torch.eye(rewards.shape[1], dtype=torch.bool, device=rewards.device)
    rivals = rewards[:, None, :].expand(is_worse.shape).masked_fill(~competes, -math.inf)
    return (rivals.logsumexp(dim=2) - rewards).sum(dim=1)


@loss(task="scored", groups=True, extra=("score",))
def advantage(
    x: GroupLogps, *, clip_range: float = 0.2, length_normalization: bool = False
) -> Tensor:
    """GRPO on whole answers (2402.03300, eq. 3): answers of the reference itself, in rounds.

    Answers above the mean of their prompt become more likely, those below it less, within a clip.
    The reference must be the model that wrote the answers. Aᵢ is 0 if all scores of a prompt are
    equal.

        - mean over i of min(ρᵢ Aᵢ, clip(ρᵢ, 1 - c, 1 + c) Aᵢ),
            ρᵢ = exp(aᵢ)
            Aᵢ = (sᵢ - mean s) / std s
            c = clip_range

    When: In rounds with `reference: previous`: GRPO whose answers are renewed each round instead of
    each step.

    Start with: Few steps per round; with `length_normalization: true`, a clip_range of 0.01 or
    less.

    clip_range: how far the ratio moves before an answer has no more effect.
    length_normalization: the ratio per token, exp(aᵢ / length), as in GSPO.
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
