"""The health rules: each looks at the state of a run and returns the values of its finding.

A threshold is a constant at the top, with the reason for its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rather.config.values import BY_CHANCE
from rather.tracking.health.state import (
    LATEST,
    EvaluationHistory,
    Line,
    RunState,
    right_share,
)

Severity = Literal["serious", "warning", "info"]

ENOUGH = 100  # held-out pairs: their accuracy is known to +- 0.1
# Nats per token by which chosen answers have fallen: each token is seven times less likely. In
# bench/health_runs.py healthy runs fall by 0.2 at most and drift by 0.5, wrecked ones fall by 2.8.
WRECKED = 2.0
DRIFTED = 3.0  # the same of chosen and rejected answers, of which only rejected ones should fall
UNLIKELY = 7.0  # nats per token, 1 in 1,100: text costs a trained model 1 to 5, random tokens 10
FALLEN = 0.3  # nats per token: each token of a chosen answer is a quarter less likely than before
MOST = 0.8  # of the pairs
# Of the loss at the start: with sigmoid a margin of 4.3, where the gradient is 3 % of the first.
SATURATED = 0.02
ALL = 0.99  # of the pairs
LENGTH_DECIDES = 0.8  # correlation: length alone explains two thirds of the differences in margin
STUCK = 0.55  # accuracy; a coin stays below it in 95 of 100 windows of 256 pairs
REVERSED = 1.5  # over the square root of the pairs: three standard deviations of a coin
GRACE = 1 / 3  # of the run, in which a small learning rate or its warm-up may hold accuracy back
DIVERGED = 1.5  # times the loss at the start; learning makes it smaller
STORMY = 30.0  # times the first gradient norm; where a run learns, norms fall
RISEN = 0.1  # of the first held-out loss; evaluations differ by less
PASSED = 0.02  # of the first held-out loss, above the lowest one: the same pairs, so no chance
# Nats per token that are always allowed, and more for each share of the held-out pairs above a half:
# 1.0 with 70 % right, 2.5 with all. The demo drifts by 0.3 with all right.
FREE_DRIFT, DRIFT_OF_GAIN = 0.5, 5.0
FORGOTTEN = 0.05  # of the loss on neutral texts, or of the right answers: forgetting_limit
GIVEN_BACK = 0.25  # of what the calibrated held-out loss had gained
LONGER, LONGER_TOKENS = 1.5, 3.0  # times as long as the reference's answers, and tokens longer
REPEATED = 0.25  # more repeated runs of four tokens than in the reference's answers
IDLE, UNEVEN = 0.1, 1.5  # more of the experts idle than at first, times the first router loss
MORE_OFTEN = 0.1  # of the answers; beyond it, chance decides
UNENDED = 0.25  # more answers without an end token than the reference


@dataclass(frozen=True)
class HealthFinding:
    """One line of health.jsonl."""

    step: int
    name: str
    severity: Severity
    text: str
    number: float
    advice: str


# The values that the text of a finding shows, with its "number"; empty if nothing was found.
Found = dict[str, Any]
Find = Callable[[RunState], Found]


@dataclass
class HealthRule:
    """Adds the function that it decorates to RULES, under the name of its findings."""

    severity: Severity
    text: str
    advice: str
    for_answers: str = ""  # advice if rows are single answers: their losses have fewer keys
    find: Find = field(init=False)

    def __call__(self, find: Find) -> None:
        self.find, RULES[find.__name__] = find, self

    def finding(self, step: int, name: str, values: Found) -> HealthFinding:
        advice = self.advice
        if self.for_answers and values.get("unit") == "answers":
            advice = self.for_answers
        return HealthFinding(
            step,
            name,
            self.severity,
            self.text.format(**values),
            values["number"],
            advice.format(**values),
        )


RULES: dict[str, HealthRule] = {}


@HealthRule(
    "serious",
    "{what} by {number:.1f} nats per token ({kind} {unit}): each token is {times:.2g} times less "
    "likely. The model is wrecked.",
    "Do not use this model: take an earlier checkpoint, or train again with learning_rate at a "
    "tenth or less, a larger beta or rpo_alpha.",
    "Do not use this model: take an earlier checkpoint, or train again with learning_rate at a "
    "tenth or less.",
)
def model_wrecked(h: RunState) -> Found:
    """Chosen answers fell by 2 nats per token, or policy and reference differ by 3.

    Healthy runs of bench/health_runs.py stay below 0.2 and 0.5. Two training lines with 16 pairs
    are enough, the last line of a run, or one evaluation.
    """
    for known in h.evaluations.values():
        for line in list(known.last)[-1:]:
            fall = line.get("sft_loss", 0.0) - known.first.get("sft_loss", math.inf)
            drift = line.get("drift", 0.0) - known.first.get("drift", 0.0)
            if found := _wreck(h, fall, drift, "held-out"):
                return found
    lines = h.last_few or ([h.first] if h.is_over and h.first else [])
    if not lines:
        return {}
    before = h.first.get("sft_loss", math.inf)
    fall = min(_fall(line, before) for line in lines)
    # A reference of another model differs from the start; a single line has no start.
    drift_at_start = 0.0 if lines == [h.first] else _drift(h.first)
    return _wreck(h, fall, min(map(_drift, lines)) - drift_at_start, "training")


def _wreck(h: RunState, fall: float, drift: float, kind: str) -> Found:
    for number, limit, what in (
        (fall, WRECKED, f"the {h.answers_to_learn} have become less likely"),
        (drift, DRIFTED, "the policy has drifted from its reference"),
    ):
        if number >= limit:
            times = math.exp(min(number, 700.0))
            return {"number": number, "what": what, "kind": kind, "times": times}
    return {}


def _fall(line: Line, before: float) -> float:
    """Return by how much chosen answers have fallen, if the reference does not explain it.

    Two batches can differ by that much, but not policy and reference on the same pairs.
    """
    differs = "kl" not in line or _drift(line) >= WRECKED / 2
    return line.get("sft_loss", 0.0) - before if differs else 0.0


def _drift(line: Line) -> float:
    """Return by how much both answers of a training line have fallen, per token."""
    lengths = [line.get(f"lengths/{side}", 0.0) for side in ("chosen", "rejected")]
    return -2 * line.get("kl", 0.0) / sum(lengths) if all(lengths) else 0.0


@HealthRule(
    "serious",
    "the {learned} cost {number:.1f} nats per token before training, where text costs a "
    "trained model 1 to 5: to this model they are not text.",
    "Check that tokenizer, chat template and weights belong to the same model; `rather data --show` "
    "prints the tokens.",
)
def answers_unlikely(h: RunState) -> Found:
    """Before training, chosen answers cost 7 nats per token or more."""
    costs = [line.get("sft_loss", 0.0) for line in (h.first, *h.last_few)]
    if len(costs) < 2 or min(costs) < UNLIKELY:
        return {}
    return {"number": costs[0], "learned": h.answers_to_learn}


@HealthRule(
    "serious",
    "only {number:.0%} of {pairs:.0f} held-out pairs are right, fewer than by chance, and {train:.0%} "
    "of the last training pairs: the model learns the opposite of what held-out pairs prefer.",
    "Look at both files (`rather data --show`): chosen and rejected are probably swapped in one of "
    "them.",
)
def labels_reversed(h: RunState) -> Found:
    """Fewer held-out pairs are right than by chance and at the start, by 3 standard deviations.

    It needs a third of the run, and a model that ranks more than half of its training pairs right.
    """
    train = right_share(h.recent)
    is_learning = train > 0.5 and "model_wrecked" not in h.known
    if h.unit != "pairs" or h.step < GRACE * h.total_steps or not is_learning:
        return {}
    # At the end the last evaluation counts, as it does alone: an earlier, milder one hides nothing.
    choose = _last if h.is_over else max
    for then, line, kind in h.changes("rewards/accuracies", choose, least=1):
        right, pairs = right_share(line), line.get("pairs", 0)
        if kind == "held-out" and pairs:
            # Without a reference, a model may have begun with less than half.
            chance = min(0.5, right_share(then))
            if right <= chance - REVERSED / math.sqrt(pairs):
                return {"number": right, "pairs": pairs, "train": train}
    return {}


def _last(lines: Sequence[Line], **_: object) -> Line:
    return lines[-1]


@HealthRule(
    "serious",
    "{number:.0%} of the last {pairs} {unit} have no difference in reward: nothing was learned.",
    "Look at lr in the metrics: raise learning_rate, or train in fp32 if bf16 rounds such small "
    "steps away.",
)
def nothing_learned(h: RunState) -> Found:
    """Both answers of 99 % of the pairs have the same reward.

    At the end of a run, its last four lines or its last evaluation are enough.
    """
    for ties, pairs in _ties(h):
        if ties >= ALL:
            return {"number": ties, "pairs": pairs}
    return {}


def _ties(h: RunState) -> Iterator[tuple[float, int]]:
    """Yield shares of ties that mean something: of a full window, and of what ends the run."""
    name = "rewards/ties"
    if h.recent.is_full:
        yield h.recent.get(name, 0.0), h.recent.pairs
    if not h.is_over:
        return
    for known in h.evaluations.values():
        for line in list(known.last)[-1:]:
            yield line.get(name, 0.0), int(line.get("pairs", 0))
    after_update = [line for line in h.recent.lines if line is not h.first][-LATEST:]
    if len(after_update) == LATEST and not h.evaluations:
        ties = min(line.get(name, 0.0) for line in after_update)
        yield ties, int(sum(line["pairs"] for line in after_update))


@HealthRule(
    "serious",
    "the {what} of the last lines is {number:.3g}, and was {start:.3g} at the start: steps "
    "overshoot.",
    "Lower learning_rate to a third or less, or lengthen the warm-up.",
)
def learning_rate_too_high(h: RunState) -> Found:
    """The loss is 1.5 times that of the first line, or the gradient norm 30 times.

    Medians of four lines are compared; with fewer than 128 pairs the factor is larger.
    """
    limits = (("loss", "loss", DIVERGED), ("grad_norm", "gradient norm", STORMY))
    for name, what, limit in limits:
        start, now = h.first.get(name), h.recent.latest(name)
        if start and now and now > (1 + (limit - 1) * h.recent.noise) * start:
            return {"number": now, "what": what, "start": start}
    return {}


@HealthRule(
    "warning",
    "the {learned}{share} have become less likely, by {number:.2f} nats per token (sft_loss "
    "is {loss:.2f}, and was {before:.2f}): the policy forgets what it could say before.",
    "Add likelihood with rpo_alpha or pref_ftx, raise beta, or lower learning_rate. Pairs whose "
    "answers are nearly alike cause this most.",
    "Raise beta or desirable_weight, or lower learning_rate. Undesirable answers that are nearly "
    "like desirable ones cause this most.",
)
def chosen_falling(h: RunState) -> Found:
    """`sft_loss` rose by 0.3 nats per token, and 80 % of chosen answers are below the reference."""
    is_sft = "nll_loss" in h.first and "rewards/accuracies" not in h.first  # nothing else to fall
    for then, now, _ in () if is_sft else h.changes("sft_loss", least=1):
        falling = now.get("logps/chosen_below_reference")  # None without a reference
        before, loss = then["sft_loss"], now.get("sft_loss", 0.0)
        if loss - before >= FALLEN and (falling is None or falling >= MOST):
            share = ""
            if falling is not None:
                of_which = f"of {falling:.0%} of the pairs"
                share = f" {of_which}" if h.unit == "pairs" else f" ({falling:.0%} of them)"
            losses = {"number": loss - before, "loss": loss, "before": before}
            return {"learned": h.answers_to_learn, "share": share, **losses}
    return {}


@HealthRule(
    "warning",
    "{right:.0%} of the last {pairs} {unit} are right with a margin of {number:.3g}, and the loss "
    "is down to {loss:.2g}: further training on them has little effect.",
    "Stop here, or train fewer epochs; a smaller learning_rate or a larger beta keeps the policy "
    "closer to its reference, harder data gives it something to learn.",
)
def margin_saturated(h: RunState) -> Found:
    """99 % of the pairs are right, and the loss is 2 % of the first one."""
    names = ("loss", "rewards/accuracies", "rewards/margins")
    loss, right, margin = (h.recent.get(name, math.nan) for name in names)
    saturated = loss <= SATURATED * h.first.get("loss", 0.0) and right >= ALL
    if not h.recent.is_full or not saturated or math.isnan(margin):
        return {}
    return {"number": margin, "right": right, "pairs": h.recent.pairs, "loss": loss}


@HealthRule(
    "warning",
    "reward margins follow the difference in length (correlation {number:.2f}): the policy learns "
    "which answer is longer.",
    "Use a loss that divides by length (sigmoid_norm, simpo), ld_alpha below 1, or pairs of "
    "similar length; watch eval/answers/policy/tokens (eval_prompts).",
)
def length_exploitation(h: RunState) -> Found:
    """`rewards/length_correlation` is 0.8 or more, and not less than at the start."""
    name = "rewards/length_correlation"
    for then, now, _ in h.changes(name):
        found = now.get(name, 0.0)
        if found >= max(LENGTH_DECIDES, then[name]) and now.get("rewards/margins", 0.0) > 0:
            return {"number": found}
    return {}


@HealthRule(
    "warning",
    "{number:.0%} of {pairs:.0f} {kind} {unit} are right, no more than by chance.",
    "Look at the data (`rather data --show`): are chosen and rejected, or labels, swapped in some "
    "files, or random? If they are good, raise learning_rate.",
)
def accuracy_stuck(h: RunState) -> Found:
    """After a third of the run, at most 55 % of the pairs are right."""
    is_explained = not h.known.isdisjoint(("labels_reversed", "model_wrecked"))
    if h.step < GRACE * h.total_steps or is_explained:
        return {}
    for _, line, kind in h.changes("rewards/accuracies", max):
        right = right_share(line)
        pairs = h.recent.pairs if kind == "training" else line.get("pairs", 0)
        if right <= STUCK and pairs >= ENOUGH:
            return {"number": right, "pairs": pairs, "kind": kind}
    return {}


@HealthRule(
    "warning",
    "the held-out loss{name} rises ({now:.3g}; its best was {best:.3g} at step {step}) while the "
    "training loss falls ({before:.3g} to {train:.3g}): the model memorises the training data.",
    "Train fewer epochs, set early_stopping_patience and save_best, lower learning_rate, or add "
    "data.",
)
def overfitting(h: RunState) -> Found:
    """The held-out loss is a tenth of its first value above its best, twice in a row.

    Meanwhile the training loss falls, and `calibrated_loss` has lost a quarter of its gain: margins
    that are only too large are not overfitting.
    """
    for name, known in h.evaluations.items():
        best, step, before = known.best
        least, train = best + RISEN * abs(known.first["loss"]), h.recent.get("loss", math.inf)
        rises = len(known.last) == 2 and all(line["loss"] > least for line in known.last)
        if rises and _gave_back(known) and before is not None and train < before:
            now = known.last[-1]["loss"]
            losses = {"now": now, "best": best, "before": before, "train": train, "step": step}
            return {"number": now - best, "name": f" of {name}" if name else "", **losses}
    return {}


def _gave_back(history: EvaluationHistory) -> bool:
    """Return whether the loss that any scale of margins may have rose again, too."""
    name = "calibrated_loss"
    first, best = history.first.get(name, 0.0), history.calibrated
    limit = best + GIVEN_BACK * (first - best)
    return name not in history.first or all(line.get(name, 0.0) > limit for line in history.last)


@HealthRule(
    "warning",
    "the held-out loss{name} was lowest at step {step} ({best:.4g}) and is {now:.4g} at the end: "
    "the steps after it made the model worse.",
    "Keep the best model with save_best, or train less: fewer steps or epochs, or a lower "
    "learning_rate. If step 0 was best, check labels and scores of both sets.",
)
def optimum_passed(h: RunState) -> Found:
    """At the end, the held-out loss is 2 % of its first value above its lowest."""
    explained = ("overfitting", "labels_reversed", "model_wrecked")
    if not (h.is_over and h.known.isdisjoint(explained)):
        return {}
    for name, known in h.evaluations.items():
        best, step, _ = known.best
        now = known.last[-1]["loss"] if known.last else best
        if now - best > PASSED * abs(known.first["loss"]):
            losses = {"best": best, "now": now, "step": step}
            return {"number": now - best, "name": f" of {name}" if name else "", **losses}
    return {}


@HealthRule(
    "warning",
    "the policy has drifted by {number:.2g} nats per held-out token, and {right:.0%} of the held-out "
    "{unit} are right: less drift ({allowed:.2g}) should do.",
    "Lower learning_rate, raise beta, or train fewer epochs; `rather tune` compares settings by both.",
)
def drift_without_gain(h: RunState) -> Found:
    """At the end, the held-out `drift` exceeds 0.5 nats per token and what its accuracy allows.

    It allows 5 times the share of pairs that are right beyond a half: 1.0 with 70 % right.
    """
    if not h.is_over or "model_wrecked" in h.known:
        return {}
    for known in h.evaluations.values():
        for line in list(known.last)[-1:]:
            drift = line.get("drift", 0.0) - known.first.get("drift", 0.0)
            right = right_share(line)
            allowed = max(FREE_DRIFT, DRIFT_OF_GAIN * (right - 0.5))
            if drift > allowed:
                return {"number": drift, "right": right, "allowed": allowed}
    return {}


@HealthRule(
    "warning",
    "the model forgets: {what}.",
    "Lower learning_rate, raise beta, add rpo_alpha, or train less; save_best keeps no model beyond "
    "forgetting_limit.",
)
def forgetting(h: RunState) -> Found:
    """The loss on neutral texts rose by 5 %, or 5 % of the answers that the base knew are lost."""
    if len(h.forgetting) < 2:
        return {}
    before, now = (line.get("loss", math.nan) for line in h.forgetting)
    if now > before * (1 + FORGOTTEN):
        what = f"its loss on neutral text was {before:.3f} and is {now:.3f} per token"
        return {"number": now - before, "what": what}
    kept, chance = h.forgetting[-1].get("kept", 1.0), h.forgetting[-1].get("chance", 0.0)
    if kept < 1 - FORGOTTEN and chance < BY_CHANCE:
        what = f"only {kept:.0%} of the simple questions that it answered right are still right"
        return {"number": kept, "what": what}
    return {}


@HealthRule(
    "warning",
    "{number:.0%} of the experts got no token, and {idle:.0%} at the start; the router loss is "
    "{loss:.3g}, and was {before:.3g}: the routers send more and more tokens to few experts.",
    "Raise moe_aux_loss_coef, or lower learning_rate; experts/load in the metrics shows which "
    "experts are used.",
)
def experts_collapse(h: RunState) -> Found:
    """A tenth more of the experts get no token than at first, or `router_loss` is 1.5 times it."""
    for then, now, _ in h.changes("router_loss"):
        before, loss = then["router_loss"], now.get("router_loss", 0.0)
        idle, number = then.get("experts/idle", 0.0), now.get("experts/idle", 0.0)
        if number - idle >= IDLE or loss >= UNEVEN * before:
            return {"number": number, "idle": idle, "loss": loss, "before": before}
    return {}


@HealthRule(
    "warning",
    "the learning rate rose until the last step, to {number:.3g}: the warm-up covers the whole "
    "run.",
    "Shorten the warm-up (warmup_steps, warmup_ratio), or train for more steps.",
)
def warmup_never_ends(h: RunState) -> Found:
    """The learning rate rises in every line up to the last step."""
    rates = [line["lr"] for line in h.recent.lines if "lr" in line] if h.is_over else []
    if len(rates) < LATEST or h.first.get("lr", math.inf) > rates[0]:
        return {}
    rises = all(earlier < later for earlier, later in pairwise(rates))
    return {"number": rates[-1]} if rises else {}


def _answers(h: RunState, name: str, found: Callable[[float, float], bool]) -> Found:
    """Compare policy and reference at the last evaluation of eval_prompts, if both are known."""
    policy, reference = (h.answers.get(f"{who}/{name}") for who in ("policy", "reference"))
    if policy is None or reference is None or not found(policy, reference):
        return {}
    return {"number": policy, "reference": reference}


@HealthRule(
    "warning",
    "answers have {number:.3g} tokens on average, the reference's {reference:.3g}: length is "
    "rewarded.",
    "Use a loss that divides by length (sigmoid_norm, simpo), ld_alpha below 1, or pairs of "
    "similar length.",
    "Use answers of similar length, or lower learning_rate.",
)
def answers_longer(h: RunState) -> Found:
    """Answers to `eval_prompts` are 1.5 times as long as the reference's."""
    return _answers(h, "tokens", lambda own, ref: own >= max(LONGER * ref, ref + LONGER_TOKENS))


@HealthRule(
    "serious",
    "answers repeat themselves: {number:.0%} of their runs of four tokens came before, "
    "{reference:.0%} in the reference's answers.",
    "The policy has lost its language: use an earlier checkpoint, lower learning_rate, raise beta "
    "or add rpo_alpha.",
    "The policy has lost its language: use an earlier checkpoint, or lower learning_rate.",
)
def answers_repeat(h: RunState) -> Found:
    """A quarter more of the answers' 4-grams are repeated than of the reference's."""
    return _answers(h, "repetition", lambda own, ref: own - ref >= REPEATED)


@HealthRule(
    "warning",
    "{number:.0%} of the answers end with an end token, {reference:.0%} of the reference's.",
    "Check whether chosen answers are cut (`rather data`: truncated_response loses the end token), "
    "and whether length is rewarded; lower learning_rate.",
)
def answers_do_not_end(h: RunState) -> Found:
    """A quarter fewer answers end than of the reference's."""
    return _answers(h, "ended", lambda own, ref: ref - own >= UNENDED)


def _habit(h: RunState, name: str) -> Found:
    """Compare answers to eval_prompts, or to the questions of `forgetting`, with the usual ones."""
    for line in (h.answers, *h.forgetting[-1:]):
        number, usual = (line.get(f"{who}/{name}", 0.0) for who in ("policy", "usual"))
        if number >= usual + MORE_OFTEN and line[f"{name}_chance"] < BY_CHANCE:
            return {"number": number, "usual": usual}
    return {}


@HealthRule(
    "warning",
    "{number:.0%} of the answers repeat a sentence; of the base's and of the chosen answers it is "
    "{usual:.0%} at most.",
    "Lower learning_rate, train less, or add likelihood with rpo_alpha.",
)
def sentences_repeat(h: RunState) -> Found:
    """A tenth more of the answers repeat a sentence than of the base's, by more than chance."""
    return _habit(h, "repeats")


@HealthRule(
    "warning",
    "{number:.0%} of the answers begin in the middle of a sentence; of the base's and of the "
    "chosen answers it is {usual:.0%} at most: answers have lost their first words.",
    "Lower learning_rate, train less, or add likelihood with rpo_alpha: pairs whose answers begin "
    "with the same words do not hold these up.",
)
def starts_lost(h: RunState) -> Found:
    """A tenth more of the answers begin with a small letter or a comma than of the base's."""
    return _habit(h, "starts_within")


class Health(RunState):
    """The state of a run, and the rules that are applied to it after each record."""

    def look(self, record: Mapping[str, Any]) -> list[HealthFinding]:
        """Return what this record shows for the first time."""
        self.add(record)
        found = []
        for name, rule in RULES.items():
            if name not in self.known and (values := rule.find(self)):
                self.known.add(name)
                found.append(rule.finding(self.step, name, {"unit": self.unit, **values}))
        return found
