"""The illnesses of a run: a small function each, over what its metrics have told so far.

Each gives the number behind it, a sentence and advice, or None. Thresholds stand beside their causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from rather.tracking.health_history import History

Severity = Literal["info", "warning", "serious"]

FALLEN = (
    0.3  # nats per token: each token of a chosen answer has a quarter less probability than before
)
MOST = 0.8  # of the pairs
SATURATED = 0.02  # of the loss at the start: with sigmoid a margin of 4.3, where a pair's gradient is 3 % of the first
ALL = 0.99  # of the pairs
LENGTH_DECIDES = 0.8  # a correlation: length alone tells two thirds of what margins differ by
STUCK = 0.55  # accuracy; of windows of 256 pairs a coin stays below it in 95 of 100
GRACE = (
    1 / 3
)  # of the run, in which a small learning rate or its warm-up may leave accuracy where it began
DIVERGED = 1.5  # times the loss at the start; what is learnt makes it smaller
STORMY = 30.0  # times the first gradient norm; where a run learns, norms fall
RISEN = 0.1  # of the first held-out loss; less is what evaluations differ by
LONGER, LONGER_TOKENS = (
    1.5,
    3.0,
)  # times as long as the reference's answers, and at least so many tokens longer
REPEATED = (
    0.25  # more of an answer's runs of four tokens have come before in it than with the reference
)
UNENDED = 0.25  # more of the answers do not end by themselves
SLOWER = "Lower learning_rate to a third or less, or lengthen the warm-up."


class Told(NamedTuple):
    number: float
    text: str
    advice: str


class Rule(NamedTuple):
    severity: Severity
    find: Callable[[History], Told | None]


def nothing_learned(h: History) -> Told | None:
    ties = h.recent.mean("rewards/ties")
    if not h.recent.is_full or ties is None or ties < ALL:
        return None
    return Told(
        ties,
        f"{ties:.0%} of the last {h.recent.pairs} pairs have the same reward for both answers: the policy is still the "
        "reference.",
        "Look at lr in the metrics: raise learning_rate, or train in fp32 where bf16 rounds so small a step away.",
    )


def learning_rate_too_high(h: History) -> Told | None:
    start, now = h.start("loss"), h.recent.latest("loss")
    if start and now and now > DIVERGED * start:
        what = f"the loss is {now:.3g} on the last lines and was {start:.3g} at the start"
        return Told(now, f"{what}: steps overshoot.", SLOWER)
    start, now = h.start("grad_norm"), h.recent.latest("grad_norm")
    if start and now and now > STORMY * start:
        what = f"the gradient norm is {now:.3g} on the last lines and was {start:.3g} at the start"
        return Told(now, f"{what}: steps overshoot.", SLOWER)
    return None


def chosen_falling(h: History) -> Told | None:
    """By the held-out pairs, which stay the same ones; or by those of training."""
    for then, now in h.changes("sft_loss"):
        falling = now.get("logps/falling", 1.0)  # without a reference nobody tells
        rise = now["sft_loss"] - then["sft_loss"]
        if rise >= FALLEN and falling >= MOST:
            share = f" of {falling:.0%} of the pairs" if "logps/falling" in now else ""
            return Told(
                rise,
                f"the chosen answers{share} have become less likely, by {rise:.2f} nats per token (sft_loss "
                f"{now['sft_loss']:.2f}, at first {then['sft_loss']:.2f}): the policy leaves what it could say before.",
                "Hold their likelihood with rpo_alpha or pref_ftx, raise beta, or lower learning_rate. Pairs whose "
                "answers are nearly alike do this most.",
            )
    return None


def margin_saturated(h: History) -> Told | None:
    start, loss, margin = h.start("loss"), h.recent.mean("loss"), h.recent.mean("rewards/margins")
    right = h.recent.mean("rewards/accuracies")
    if not h.recent.is_full or not start or loss is None or right is None or margin is None:
        return None
    if loss > SATURATED * start or right < ALL:
        return None
    return Told(
        margin,
        f"{right:.0%} of the last {h.recent.pairs} pairs are right with a margin of {margin:.3g}, and the loss is down "
        f"to {loss:.2g}: they teach hardly anything more.",
        "Stop here, or train fewer epochs; a smaller learning_rate or a larger beta keeps the policy nearer to its "
        "reference, harder pairs give it something to learn.",
    )


def length_exploitation(h: History) -> Told | None:
    name = "rewards/length_correlation"
    for then, now in h.changes(name):
        if now[name] >= max(LENGTH_DECIDES, then[name]) and now.get("rewards/margins", 0.0) > 0:
            return Told(
                now[name],
                f"reward margins follow the difference in length (correlation {now[name]:.2f}): the policy learns "
                "which answer is longer.",
                "Take a loss that divides by length (sigmoid_norm, simpo), ld_alpha below 1, or pairs of similar "
                "length; watch eval/answers/policy/tokens (eval_prompts).",
            )
    return None


def accuracy_stuck(h: History) -> Told | None:
    if h.step < GRACE * h.total_steps:
        return None
    for line, what in h.accuracies():
        right = line["rewards/accuracies"] + line.get("rewards/ties", 0.0) / 2
        if right <= STUCK:
            return Told(
                right,
                f"{right:.0%} of {line['pairs']:.0f} {what} pairs are right, no more than a coin.",
                "Look at the pairs (`rather data --show`): are chosen and rejected swapped in some files, or judged at "
                "random? If they are good, raise learning_rate.",
            )
    return None


def overfitting(h: History) -> Told | None:
    for name, held in h.held.items():
        if not held.is_rising(RISEN):
            continue
        now, best = held.last[-1]["loss"], held.best
        if (
            best.train_loss is None
            or (train := h.recent.mean("loss")) is None
            or train >= best.train_loss
        ):
            continue
        return Told(
            now - best.loss,
            f"the held-out loss{f' of {name}' if name else ''} rises ({now:.3g}, at best {best.loss:.3g} at step "
            f"{best.step}) while that of training falls ({best.train_loss:.3g} to {train:.3g}): pairs are memorised.",
            "Train fewer epochs, set early_stopping_patience and save_best, lower learning_rate, or bring more pairs.",
        )
    return None


def answers_longer(h: History) -> Told | None:
    policy, reference = h.answered("tokens")
    if (
        policy is None
        or reference is None
        or policy < max(LONGER * reference, reference + LONGER_TOKENS)
    ):
        return None
    return Told(
        policy,
        f"answers have {policy:.3g} tokens on average, the reference's {reference:.3g}: length is rewarded.",
        "Take a loss that divides by length (sigmoid_norm, simpo), ld_alpha below 1, or pairs of similar length.",
    )


def answers_repeat(h: History) -> Told | None:
    policy, reference = h.answered("repetition")
    if policy is None or reference is None or policy - reference < REPEATED:
        return None
    return Told(
        policy,
        f"answers repeat themselves: {policy:.0%} of their runs of four tokens came before, {reference:.0%} with the "
        "reference.",
        "The policy has lost language: take an earlier checkpoint, lower learning_rate, raise beta or add rpo_alpha.",
    )


def answers_do_not_end(h: History) -> Told | None:
    policy, reference = h.answered("ended")
    if policy is None or reference is None or reference - policy < UNENDED:
        return None
    return Told(
        policy,
        f"{policy:.0%} of the answers end by themselves, {reference:.0%} of the reference's.",
        "Look whether chosen answers are cut (`rather data`: truncated_response loses the end token), and whether "
        "length is rewarded; lower learning_rate.",
    )


RULES: Mapping[str, Rule] = {
    "nothing_learned": Rule("serious", nothing_learned),
    "learning_rate_too_high": Rule("serious", learning_rate_too_high),
    "chosen_falling": Rule("warning", chosen_falling),
    "margin_saturated": Rule("warning", margin_saturated),
    "length_exploitation": Rule("warning", length_exploitation),
    "accuracy_stuck": Rule("warning", accuracy_stuck),
    "overfitting": Rule("warning", overfitting),
    "answers_longer": Rule("warning", answers_longer),
    "answers_repeat": Rule("serious", answers_repeat),
    "answers_do_not_end": Rule("warning", answers_do_not_end),
}
