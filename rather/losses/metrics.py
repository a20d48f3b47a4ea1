"""Metrics as weighted sums: kept on the device, added over steps, divided once per log line.

Each pair has its own weight, so that no number depends on how pairs were batched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rather.data.batch import GroupLogps, PairFacts, PairLogps
from rather.losses.losses import gap, in_groups, log_odds_ratio, log_ratios, token_mean
from rather.losses.objective import PairLoss

Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations
ROUNDING = 1e-6  # relative, of a log-prob that was computed in another layout


@dataclass(frozen=True)
class Scored:
    """The inputs of the metrics of some pairs."""

    x: PairLogps
    losses: Tensor  # [P]
    rewards: Tensor  # [P, 2]
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [P]: a trainer's own metrics

    @property
    def ties(self) -> Tensor:
        """[P]: rewards are equal, or both log-ratios are 0 within the rounding of log-probs."""
        tied = self.rewards[:, 0] == self.rewards[:, 1]
        return tied if self.x.reference is None else tied | ~differs(self.x).any(dim=1)


def differs(x: PairLogps) -> Tensor:
    """[P, 2]: policy and reference differ by more than the rounding of float32 log-probs."""
    return log_ratios(x).abs() > ROUNDING * x.policy.abs()


Metrics = Mapping[str, Callable[[Scored], Tensor]]
PER_PAIR: Metrics = {
    "loss": lambda s: s.losses,
    "rewards/chosen": lambda s: s.rewards[:, 0],
    "rewards/rejected": lambda s: s.rewards[:, 1],
    "rewards/accuracies": lambda s: (~s.ties & (s.rewards[:, 0] > s.rewards[:, 1])).double(),
    "rewards/ties": lambda s: s.ties.double(),
    "rewards/margins": lambda s: gap(s.rewards),
    "logps/chosen": lambda s: s.x.policy[:, 0],
    "logps/rejected": lambda s: s.x.policy[:, 1],
    "sft_loss": lambda s: -s.x.policy[:, 0] / s.x.length[:, 0],
    "lengths/chosen": lambda s: s.x.length[:, 0],
    "lengths/rejected": lambda s: s.x.length[:, 1],
}
WITH_REFERENCE: Metrics = {
    "logps/chosen_below_reference": lambda s: (differs(s.x) & (log_ratios(s.x) < 0))[:, 0].double(),
    "kl": lambda s: log_ratios(s.x).mean(dim=1),  # exact for answers sampled from the policy
}
OF_A_LOSS: Metrics = {
    "odds_ratio": lambda s: log_odds_ratio(s.x),
    "nll_loss": lambda s: token_mean(s.x),
}
# Of a reward model on pairs, and on scored answers.
OF_REWARDS = {
    name: metric
    for name, metric in PER_PAIR.items()
    if name not in ("logps/chosen", "logps/rejected", "sft_loss")
}
OF_SCORES: Metrics = {
    "loss": lambda s: s.losses,
    "scores/mean": lambda s: s.rewards[:, 0],
    "scores/error": lambda s: (s.rewards[:, 0] - s.x.extra["score"]).abs(),
}
OF_ANSWERS = {
    name: PER_PAIR[name] for name in ("loss", "logps/chosen", "sft_loss", "lengths/chosen")
}


def order_agreement(x: GroupLogps) -> Tensor:
    """[groups, K]: how many answers of another score are ordered as the scores say; else 0.5."""
    ratios = x.policy - x.reference
    by_score = (x.scores[:, :, None] - x.scores[:, None, :]).sign()
    by_policy = (ratios[:, :, None] - ratios[:, None, :]).sign()
    differ = by_score.abs().sum(dim=2)
    agree = (by_score * by_policy > 0).sum(dim=2)
    return torch.where(differ > 0, agree / differ.clamp(min=1), 0.5)


OF_DESIRABLE: Metrics = {
    "sft_loss": PER_PAIR["sft_loss"],
    "logps/chosen_below_reference": WITH_REFERENCE["logps/chosen_below_reference"],
}
OF_GROUPS: Metrics = {
    **OF_ANSWERS,
    "rewards/accuracies": lambda s: in_groups(s.x, order_agreement),
    "kl": lambda s: log_ratios(s.x)[:, 0],
}
# Moments of reward margin and length difference, for their correlation.
MOMENTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_m": lambda m, d: m,
    "_d": lambda m, d: d,
    "_mm": lambda m, d: m * m,
    "_dd": lambda m, d: d * d,
    "_md": lambda m, d: m * d,
}


def of_labelled(scored: Scored, loss: PairLoss) -> dict[str, Tensor]:
    """Return the metrics of single answers with labels.

    Those of desirable answers have "chosen" in their name, and count no others; likewise
    "rejected". An answer is right if its reward is on its label's side of the baseline.
    """
    x = scored.x
    reward = scored.rewards[:, 0]
    good = x.extra["label"]
    threshold = torch.zeros_like(reward)
    columns: dict[str, Tensor] = {"loss": scored.losses}
    if loss.baseline_kind:
        columns["baseline"] = x.extra["baseline"].expand_as(reward)
        beta = loss.terms[0].beta if loss.baseline_kind == "kl" else 1.0
        threshold = beta * columns["baseline"]
    tied = (reward == threshold) | ~differs(x)[:, 0]
    columns["rewards/accuracies"] = (~tied & ((reward > threshold) == (good > 0.5))).double()
    columns["rewards/ties"] = tied.double()
    for side, share in (("chosen", good), ("rejected", 1 - good)):
        columns[f"rewards/{side}"] = reward * share
        columns[f"logps/{side}"] = x.policy[:, 0] * share
        columns[f"lengths/{side}"] = x.length[:, 0] * share
        columns[f"_{side}"] = share
    for name, metric in OF_DESIRABLE.items():
        columns[name] = metric(scored) * good
    return columns


@cache
def _metrics_of(task: str, loss: str, has_reference: bool) -> tuple[Metrics, bool]:
    """Return the metrics of a task, and whether it is about pairs."""
    is_paired = task == "preference" or (task == "reward" and loss != "regression")
    single: Mapping[str, Metrics] = {
        "reward": OF_SCORES,
        "sft": OF_ANSWERS,
        "unpaired": {},
        "scored": OF_GROUPS,
    }
    if not is_paired:
        return single[task], False
    metrics = OF_REWARDS if task == "reward" else PER_PAIR
    return {**metrics, **(WITH_REFERENCE if has_reference else {})}, True


def weighted_sums(scored: Scored, weight_P: Tensor, loss: PairLoss) -> dict[str, Tensor]:
    """Return name -> weighted sum over the pairs, on the device; "weight" sums the weights."""
    metrics, is_paired = _metrics_of(loss.task, loss.terms[0].name, loss.needs_reference)
    columns = {name: metric(scored).detach() for name, metric in metrics.items()}
    columns |= {name: OF_A_LOSS[name](scored).detach() for name in loss.own_metrics}
    if loss.task == "unpaired":
        columns |= {name: column.detach() for name, column in of_labelled(scored, loss).items()}
    columns |= scored.extra
    if is_paired:
        margin = gap(scored.rewards).detach()
        longer = gap(scored.x.length)
        columns |= {name: moment(margin, longer) for name, moment in MOMENTS.items()}
    columns["weight"] = torch.ones_like(weight_P)
    return dict(zip(columns, torch.stack(list(columns.values())) @ weight_P, strict=True))


@dataclass
class Window:
    """Sums since the last log line. Checkpoints contain them, so a resume loses nothing."""

    sums: dict[str, float] = field(default_factory=dict)
    pairs: int = 0
    tokens: int = 0
    skipped: int = 0

    def add(self, sums: Mapping[str, float], *, pairs: int, tokens: int, skipped: int = 0) -> None:
        for name, total in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
        self.pairs += pairs
        self.tokens += tokens
        self.skipped += skipped

    def means(self) -> dict[str, float]:
        """Return the mean of each metric; nothing if no pair has weight."""
        weight = self.sums.get("weight")
        if not weight:
            return {}
        mean = {name: total / weight for name, total in self.sums.items() if name != "weight"}
        shown = {name: mean[name] for name in mean if not name.startswith("_")}
        if "_chosen" in mean:
            return _by_label(shown, {side: mean[f"_{side}"] for side in ("chosen", "rejected")})
        return shown | ({"rewards/length_correlation": _correlation(mean)} if "_m" in mean else {})


# Metrics of single answers that are means over the answers of one label.
SIDE = {
    "rewards/chosen": "chosen",
    "logps/chosen": "chosen",
    "logps/chosen_below_reference": "chosen",
    "lengths/chosen": "chosen",
    "sft_loss": "chosen",
    "rewards/rejected": "rejected",
    "logps/rejected": "rejected",
    "lengths/rejected": "rejected",
}


def _by_label(mean: Mapping[str, float], share: Mapping[str, float]) -> dict[str, float]:
    """Return means over the answers of each label, whose `share` of the weight is given.

    A label without answers has no mean.
    """
    means: dict[str, float] = {}
    for name, mean_of_all in mean.items():
        side = SIDE.get(name)
        if side is None:
            means[name] = mean_of_all
        elif share[side]:
            means[name] = mean_of_all / share[side]
    if share["chosen"] and share["rejected"]:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def interval_of_accuracy(facts: PairFacts, accuracy: float) -> dict[str, float]:
    """Return the 95 % interval of the accuracy on a whole set."""
    share = facts.weight / facts.weight.sum()
    low, high = wilson(accuracy, float(1 / share.square().sum()))
    return {"rewards/accuracies_low": low, "rewards/accuracies_high": high}


def drift(facts: PairFacts, policy: Tensor, reference: Tensor, *, is_paired: bool) -> float:
    """Return the mean of |log policy / reference| per token, over the answers of a held-out set.

    Log-probs are sums, [P, 2]; the second column of single answers is not theirs.
    """
    answers = slice(None) if is_paired else slice(1)
    per_token = (policy - reference)[:, answers] / facts.length[:, answers]
    return float(per_token.abs().mean(dim=1) @ (facts.weight / facts.weight.sum()))


def whole_set_metrics(
    facts: PairFacts, policy: Tensor, reference: Tensor | None
) -> dict[str, float]:
    """Return what only a whole held-out set of pairs has: accuracy beyond length.

    `policy` and `reference` are summed log-probs, [P, 2]. Length-controlled accuracy is that of the
    margins minus the part that is linear in the difference of lengths.
    """
    share = facts.weight / facts.weight.sum()
    metrics: dict[str, float] = {}
    values = policy / facts.length if reference is None else policy - reference
    tied = torch.zeros_like(share, dtype=torch.bool)
    if reference is not None:
        tied = (values.abs() <= ROUNDING * policy.abs()).all(dim=1)
    margin = gap(values)
    longer = gap(facts.length)
    apart = longer - longer @ share
    spread = float(apart.square() @ share)
    slope = float((apart * margin) @ share) / spread if spread > 0 else 0.0
    right = ~tied & (margin - slope * longer > 0)
    metrics["calibrated_loss"] = calibrated_loss(margin, share)
    metrics["rewards/accuracies_length_controlled"] = float(right.double() @ share)
    return metrics


def calibrated_loss(margin: Tensor, share: Tensor) -> float:
    """Return the logistic loss of margins, times the factor that makes it smallest.

    So it does not depend on beta, and settings with different losses can be compared. It is ln 2 if
    margins say nothing. The loss is convex in the factor; its slope is halved by bisection.
    """
    scale = float(margin.abs() @ share)
    if not 0 < scale < math.inf:
        return math.log(2) if scale == 0 else math.nan
    low = 0.0
    high = 1000.0
    unit = margin / scale
    for _ in range(60):
        middle = (low + high) / 2
        slope = float((unit * torch.sigmoid(-middle * unit)) @ share)
        low, high = (middle, high) if slope > 0 else (low, middle)
    return float(softplus(-low * unit) @ share)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent pairs (Wilson, 1927), also near 0."""
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _correlation(mean: Mapping[str, float]) -> float:
    """Return the correlation of reward margin and length difference; 0 if either is constant."""
    spread = 1.0
    for name, squares in (("_m", "_mm"), ("_d", "_dd")):
        variance = mean[squares] - mean[name] * mean[name]
        # A variance no larger than its rounding error counts as 0.
        spread *= variance if variance > 1e-12 * mean[squares] else 0.0
    covariance = mean["_md"] - mean["_m"] * mean["_d"]
    return max(-1.0, min(1.0, covariance / math.sqrt(spread))) if spread > 0 else 0.0
