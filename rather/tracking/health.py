"""The health watch: looks at each record of metrics.jsonl once and reports each finding once.

A resumed run looks at its records again, so a checkpoint needs nothing of this.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from rather.config.redaction import redact
from rather.tracking.json_lines import append_line, current_name, read_lines, read_object
from rather.tracking.outcome import is_unchanged, percent, skipped_text
from rather.tracking.trackers import Tracker

log = logging.getLogger(__name__)

Severity = Literal["serious", "warning", "info"]
Line = Mapping[str, float]

# A window has at least so many lines and pairs: the accuracy of 256 pairs is known to +- 0.06.
LINES, PAIRS = 8, 256
LATEST = 4  # training lines that `latest` looks at
LATEST_PAIRS = 128  # with fewer in these lines, chance moves the loss more, by the square root
ENOUGH = 100  # held-out pairs: their accuracy is known to +- 0.1

# Nats per token by which chosen answers have fallen: each token is seven times less likely. In
# bench/health_runs.py healthy runs fall by 0.2 at most and drift by 0.5, wrecked ones fall by 2.8.
WRECKED = 2.0
DRIFTED = 3.0  # the same of chosen and rejected answers, of which only rejected ones should fall
UNLIKELY = 7.0  # nats per token, 1 in 1,100: text costs a trained model 1 to 5, random tokens 10
FEW = 16  # pairs: rules without a window believe the mildest of the lines that hold so many
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
GIVEN_BACK = 0.25  # of what the calibrated held-out loss had gained
LONGER, LONGER_TOKENS = 1.5, 3.0  # times as long as the reference's answers, and tokens longer
REPEATED = 0.25  # more repeated runs of four tokens than in the reference's answers
IDLE, UNEVEN = 0.1, 1.5  # more of the experts idle than at first, times the first router loss
UNENDED = 0.25  # more answers without an end token than the reference


class RecentLines:
    """The last training lines, as many as hold enough pairs; `get` returns means over pairs.

    Means are computed when a rule asks: with one pair per line there are hundreds of lines.
    """

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()

    @property
    def pairs(self) -> int:
        return int(sum(line["pairs"] for line in self.lines))

    def add(self, line: Line) -> None:
        self.lines.append(line)
        while len(self.lines) > LINES and self.pairs - self.lines[0]["pairs"] >= PAIRS:
            self.lines.popleft()

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= LINES and self.pairs >= PAIRS

    def get(self, name: str, default: Any = None) -> Any:
        found = [(line[name], line["pairs"]) for line in self.lines if name in line]
        weight = sum(pairs for _, pairs in found)
        return sum(value * pairs for value, pairs in found) / weight if weight else default

    def latest(self, name: str) -> float:
        """Return the median of the last few lines, which one spike does not move; else 0."""
        values = [line[name] for line in list(self.lines)[-LATEST:] if name in line]
        return median(values) if len(values) == LATEST else 0.0

    @property
    def noise(self) -> float:
        """Return how much more chance moves `latest` than with LATEST_PAIRS pairs; at least 1."""
        pairs = sum(line["pairs"] for line in list(self.lines)[-LATEST:])
        return math.sqrt(max(1.0, LATEST_PAIRS / max(1.0, pairs)))


@dataclass
class EvaluationHistory:
    """The evaluations of one set. A rule believes two evaluations in a row, never one."""

    first: Line
    best: tuple[float, int, float | None]  # loss, step, training loss at that time
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=2))  # after the first one
    calibrated: float = math.inf  # the best calibrated loss

    @property
    def gave_back(self) -> bool:
        """Whether the loss that any scale of margins may have rose again, too."""
        name = "calibrated_loss"
        least = self.calibrated + GIVEN_BACK * (self.first.get(name, 0.0) - self.calibrated)
        return name not in self.first or all(line.get(name, 0.0) > least for line in self.last)


def right_share(line: Line | RecentLines) -> float:
    """Return the share of the pairs that are right; a tie counts half."""
    return float(line.get("rewards/accuracies", 0.0)) + float(line.get("rewards/ties", 0.0)) / 2


@dataclass
class Health:
    """Applies the rules to what it keeps of the records so far; its size is bounded."""

    total_steps: int
    unit: str = "pairs"  # what rows are: pairs, or answers
    step: int = 0
    first: Line = field(default_factory=dict)  # training line, before the first update
    recent: RecentLines = field(default_factory=RecentLines)
    evaluations: dict[str, EvaluationHistory] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # the names of what was found

    def add(self, record: Mapping[str, Any]) -> None:
        line = {
            current_name(name): float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self.step = int(record["step"])
        if "pairs" in line:
            self.first = self.first if "loss" in self.first else line
            self.recent.add(line)
        losses = [name for name in line if name.startswith("eval/") and name.endswith("/loss")]
        for prefix in (name.removesuffix("loss") for name in losses):
            own = {key.removeprefix(prefix): x for key, x in line.items() if key.startswith(prefix)}
            best = (own["loss"], self.step, self.recent.get("loss"))
            name = prefix.removeprefix("eval/").rstrip("/")
            known = self.evaluations.setdefault(name, EvaluationHistory(own, best))
            known.calibrated = min(known.calibrated, own.get("calibrated_loss", math.inf))
            if own is not known.first:
                known.last.append(own)
                known.best = min(known.best, best, key=lambda each: each[0])
        prefix = "eval/answers/"
        self.answers |= {
            key.removeprefix(prefix): x for key, x in line.items() if key.startswith(prefix)
        }

    def look(self, record: Mapping[str, Any]) -> list[HealthFinding]:
        """Return what this record shows for the first time."""
        self.add(record)
        found = []
        for name, rule in RULES.items():
            if name not in self.known and (values := rule.find(self)):
                self.known.add(name)
                found.append(rule.finding(self.step, name, {"unit": self.unit, **values}))
        return found

    @property
    def is_over(self) -> bool:
        """Whether this is the last step; never if their number is unknown, which is 0 here."""
        return 0 < self.total_steps <= self.step

    @property
    def last_few(self) -> list[Line]:
        """Return the last training lines after the first one, newest first, if they hold FEW pairs.

        At the end of the run half as many are enough, and all that there are.
        """
        least_lines, least_pairs = (1, FEW // 2) if self.is_over else (2, FEW)
        lines: list[Line] = []
        for line in reversed(self.recent.lines):
            if line is not self.first:
                lines.append(line)
            if len(lines) >= least_lines and sum(x["pairs"] for x in lines) >= least_pairs:
                return lines
        return lines if self.is_over else []

    def changes(
        self, name: str, mildest: Callable[..., Line] = min, *, least: int = 2
    ) -> Iterator[tuple[Line, Line | RecentLines, str]]:
        """Yield first and last line of each held-out set and of training.

        Of a held-out set, the milder of two evaluations; `least` are enough at the end of the run.
        """
        for known in self.evaluations.values():
            enough = len(known.last) >= (least if self.is_over else 2)
            if enough and all(name in line for line in (known.first, *known.last)):
                yield known.first, mildest(known.last, key=lambda line: line[name]), "held-out"
        if self.recent.is_full and name in self.first and self.recent.get(name) is not None:
            yield self.first, self.recent, "training"


# The values that the text of a finding shows, with its "number"; empty if nothing was found.
Found = dict[str, Any]
Find = Callable[[Health], Found]


@dataclass
class HealthRule:
    """Adds the function that it decorates to RULES, under the name of its findings."""

    severity: Severity
    text: str
    advice: str
    find: Find = field(init=False)

    def __call__(self, find: Find) -> None:
        self.find, RULES[find.__name__] = find, self

    def finding(self, step: int, name: str, values: Found) -> HealthFinding:
        text, advice = self.text.format(**values), self.advice.format(**values)
        return HealthFinding(step, name, self.severity, text, values["number"], advice)


RULES: dict[str, HealthRule] = {}


@HealthRule(
    "serious",
    "{what} by {number:.1f} nats per token ({kind} {unit}): each token is {times:.2g} times less "
    "likely. The model is wrecked.",
    "Do not use this model: take an earlier checkpoint, or train again with learning_rate at a "
    "tenth or less, a larger beta or rpo_alpha.",
)
def model_wrecked(h: Health) -> Found:
    for known in h.evaluations.values():
        for line in list(known.last)[-1:]:
            fall = line.get("sft_loss", 0.0) - known.first.get("sft_loss", math.inf)
            drift = line.get("drift", 0.0) - known.first.get("drift", 0.0)
            if found := _wreck(fall, drift, "held-out"):
                return found
    lines = h.last_few or ([h.first] if h.is_over and h.first else [])
    if not lines:
        return {}
    before = h.first.get("sft_loss", math.inf)
    fall = min(_fall(line, before) for line in lines)
    # A reference of another model differs from the start; a single line has no start.
    drift_at_start = 0.0 if lines == [h.first] else _drift(h.first)
    return _wreck(fall, min(map(_drift, lines)) - drift_at_start, "training")


def _wreck(fall: float, drift: float, kind: str) -> Found:
    for number, limit, what in (
        (fall, WRECKED, "the chosen answers have become less likely"),
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
    "the chosen answers cost {number:.1f} nats per token before training, where text costs a "
    "trained model 1 to 5: to this model they are not text.",
    "Check that tokenizer, chat template and weights belong to the same model; `rather data --show` "
    "prints the tokens.",
)
def answers_unlikely(h: Health) -> Found:
    costs = [line.get("sft_loss", 0.0) for line in (h.first, *h.last_few)]
    return {"number": costs[0]} if len(costs) > 1 and min(costs) >= UNLIKELY else {}


@HealthRule(
    "serious",
    "only {number:.0%} of {pairs:.0f} held-out pairs are right, fewer than by chance, and {train:.0%} "
    "of the last training pairs: the model learns the opposite of what held-out pairs prefer.",
    "Look at both files (`rather data --show`): chosen and rejected are probably swapped in one of "
    "them.",
)
def labels_reversed(h: Health) -> Found:
    train = right_share(h.recent)
    is_learning = train > 0.5 and "model_wrecked" not in h.known
    if h.unit != "pairs" or h.step < GRACE * h.total_steps or not is_learning:
        return {}
    for then, line, kind in h.changes("rewards/accuracies", max, least=1):
        right, pairs = right_share(line), line.get("pairs", 0)
        if kind == "held-out" and pairs:
            # Without a reference, a model may have begun with less than half.
            chance = min(0.5, right_share(then))
            if right <= chance - REVERSED / math.sqrt(pairs):
                return {"number": right, "pairs": pairs, "train": train}
    return {}


@HealthRule(
    "serious",
    "{number:.0%} of the last {pairs} {unit} have no difference in reward: nothing was learned.",
    "Look at lr in the metrics: raise learning_rate, or train in fp32 if bf16 rounds such small "
    "steps away.",
)
def nothing_learned(h: Health) -> Found:
    for ties, pairs in _ties(h):
        if ties >= ALL:
            return {"number": ties, "pairs": pairs}
    return {}


def _ties(h: Health) -> Iterator[tuple[float, int]]:
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
def learning_rate_too_high(h: Health) -> Found:
    limits = (("loss", "loss", DIVERGED), ("grad_norm", "gradient norm", STORMY))
    for name, what, limit in limits:
        start, now = h.first.get(name), h.recent.latest(name)
        if start and now and now > (1 + (limit - 1) * h.recent.noise) * start:
            return {"number": now, "what": what, "start": start}
    return {}


@HealthRule(
    "warning",
    "the chosen answers{share} have become less likely, by {number:.2f} nats per token (sft_loss "
    "is {loss:.2f}, and was {before:.2f}): the policy forgets what it could say before.",
    "Add likelihood with rpo_alpha or pref_ftx, raise beta, or lower learning_rate. Pairs whose "
    "answers are nearly alike cause this most.",
)
def chosen_falling(h: Health) -> Found:
    is_sft = "nll_loss" in h.first and "rewards/accuracies" not in h.first  # nothing else to fall
    for then, now, _ in () if is_sft else h.changes("sft_loss", least=1):
        falling = now.get("logps/chosen_below_reference")  # None without a reference
        before, loss = then["sft_loss"], now.get("sft_loss", 0.0)
        if loss - before >= FALLEN and (falling is None or falling >= MOST):
            share = "" if falling is None else f" of {falling:.0%} of the {h.unit}"
            return {"number": loss - before, "share": share, "loss": loss, "before": before}
    return {}


@HealthRule(
    "warning",
    "{right:.0%} of the last {pairs} {unit} are right with a margin of {number:.3g}, and the loss "
    "is down to {loss:.2g}: they teach hardly anything more.",
    "Stop here, or train fewer epochs; a smaller learning_rate or a larger beta keeps the policy "
    "closer to its reference, harder data gives it something to learn.",
)
def margin_saturated(h: Health) -> Found:
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
def length_exploitation(h: Health) -> Found:
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
def accuracy_stuck(h: Health) -> Found:
    if h.step < GRACE * h.total_steps or "labels_reversed" in h.known:
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
def overfitting(h: Health) -> Found:
    for name, known in h.evaluations.items():
        best, step, before = known.best
        least, train = best + RISEN * abs(known.first["loss"]), h.recent.get("loss", math.inf)
        rises = len(known.last) == 2 and all(line["loss"] > least for line in known.last)
        if rises and known.gave_back and before is not None and train < before:
            now = known.last[-1]["loss"]
            losses = {"now": now, "best": best, "before": before, "train": train, "step": step}
            return {"number": now - best, "name": f" of {name}" if name else "", **losses}
    return {}


@HealthRule(
    "warning",
    "{number:.0%} of the experts got no token, and {idle:.0%} at the start; the router loss is "
    "{loss:.3g}, and was {before:.3g}: the routers send more and more tokens to few experts.",
    "Raise moe_aux_loss_coef, or lower learning_rate; experts/load in the metrics shows which "
    "experts are used.",
)
def experts_collapse(h: Health) -> Found:
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
def warmup_never_ends(h: Health) -> Found:
    rates = [line["lr"] for line in h.recent.lines if "lr" in line] if h.is_over else []
    if len(rates) < LATEST or h.first.get("lr", math.inf) > rates[0]:
        return {}
    rises = all(earlier < later for earlier, later in pairwise(rates))
    return {"number": rates[-1]} if rises else {}


def _answers(h: Health, name: str, found: Callable[[float, float], bool]) -> Found:
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
)
def answers_longer(h: Health) -> Found:
    return _answers(h, "tokens", lambda own, ref: own >= max(LONGER * ref, ref + LONGER_TOKENS))


@HealthRule(
    "serious",
    "answers repeat themselves: {number:.0%} of their runs of four tokens came before, "
    "{reference:.0%} in the reference's answers.",
    "The policy has lost its language: use an earlier checkpoint, lower learning_rate, raise beta "
    "or add rpo_alpha.",
)
def answers_repeat(h: Health) -> Found:
    return _answers(h, "repetition", lambda own, ref: own - ref >= REPEATED)


@HealthRule(
    "warning",
    "{number:.0%} of the answers end with an end token, {reference:.0%} of the reference's.",
    "Check whether chosen answers are cut (`rather data`: truncated_response loses the end token), "
    "and whether length is rewarded; lower learning_rate.",
)
def answers_do_not_end(h: Health) -> Found:
    return _answers(h, "ended", lambda own, ref: ref - own >= UNENDED)


HEALTH = "health.jsonl"
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class HealthFinding:
    """One line of health.jsonl."""

    step: int
    name: str
    severity: Severity
    text: str
    number: float
    advice: str


class HealthWatch(Tracker):
    """A tracker that writes health.jsonl, from a run that has done `start_step` steps on."""

    def __init__(
        self, run_dir: Path, total_steps: int, start_step: int, unit: str = "pairs"
    ) -> None:
        self.file = run_dir / HEALTH
        before = read_findings(run_dir) if start_step else []
        # The rules read all lines again, below: a longer run is not over where a shorter one was.
        again = {*AT_END, *RULES}
        kept = [one for one in before if one.step <= start_step and one.name not in again]
        self.health = Health(total_steps, unit, known={one.name for one in kept})
        kept += [one for one in data_findings(run_dir) if one.name not in self.health.known]
        # Do not log again what the log has already: findings after the checkpoint come back, and
        # those of the data are in the data report.
        self.logged = {one.name for one in before + kept}
        self.file.unlink(missing_ok=True)
        for one in kept:
            append_line(self.file, asdict(one))
        for record in read_lines(run_dir / "metrics.jsonl")[0]:
            self.log(0, record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for one in self.health.look(metrics):
            append_line(self.file, asdict(one))
            if one.name not in self.logged:
                log.warning("health, step %d: %s %s", one.step, one.text, one.advice)
            self.logged.add(one.name)

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: every line is in the file already."""


# --- the end of a run ---

SKIPPED = 0.1  # of the steps; float16 skips a few until it has found its loss scale
KEPT = 0.5  # of the update
SHRUNK = 0.1  # of the size that the weights had; a run changes it by a few percent
# Root mean square. That of real models is between 0.01 and 1; at this size no text changes the
# output by more than rounding.
NOTHING = 1e-6
AT_END = {
    "run_failed": HealthRule(
        "serious",
        "the run ended with exit code {number} (steps done: {steps}). {error}",
        "The log has the details{more}.",
    ),
    "weights_unchanged": HealthRule(
        "serious",
        "the weights did not change (updates made: {number}).",
        "Look at lr and grad_norm in the metrics: raise learning_rate or beta, shorten the warm-up.",
    ),
    "steps_skipped": HealthRule(
        "serious",
        "{skipped}.",
        "Train in bf16 or fp32 if float16 overflows{more}.",
    ),
    "weights_vanished": HealthRule(
        "serious",
        "the weights have a size of {number:.2g} (root mean square), and had {before:.2g}: the model "
        "answers the same to every text.",
        "Lower weight_decay and learning_rate (each step multiplies weights by 1 - their product); "
        "if the size was as small before, the model in pretrain is damaged.",
    ),
    "update_lost": HealthRule(
        "serious",
        "the written file keeps only {kept} of the update.",
        "Export with rounding: dithered or --dtype fp32.",
    ),
}


def record_end(run_dir: Path, outcome: Mapping[str, Any], error: Exception | None) -> None:
    """Append what is wrong with a run that has ended to health.jsonl; a resume removes it."""
    steps, skipped, kept = outcome["steps"], outcome["skipped_steps"], outcome.get("kept_share")
    found: dict[str, Found] = {}
    if error:
        code, text = getattr(error, "exit_code", 1), redact(str(error) or type(error).__name__)
        found["run_failed"] = {"number": code, "steps": steps, "error": text}
    elif is_unchanged(outcome):
        found["weights_unchanged"] = {"number": outcome["updates"]}
    if not error and steps and skipped / steps >= SKIPPED:
        found["steps_skipped"] = {"number": skipped, "skipped": skipped_text(outcome)}
    if kept is not None and kept < KEPT:
        found["update_lost"] = {"number": kept, "kept": percent(kept)}
    size, before = outcome.get("weight_size"), outcome.get("weight_size_before", 0.0)
    if size is not None and size < max(NOTHING, SHRUNK * before):
        found["weights_vanished"] = {"number": size, "before": before}
    more = "; incidents.jsonl describes NaN, Inf, spikes and lost workers"
    more = more if (run_dir / "incidents.jsonl").exists() else ""
    for name, values in found.items():
        one = AT_END[name].finding(steps, name, {**values, "more": more})
        if not error:  # the command prints an error itself
            log.warning("health, step %d: %s %s", one.step, one.text, one.advice)
        try:
            append_line(run_dir / HEALTH, asdict(one))
        except OSError as problem:
            log.warning("%s: %s", run_dir / HEALTH, problem.strerror)


def read_findings(run_dir: Path) -> list[HealthFinding]:
    """Return the lines of health.jsonl, without damaged lines and those of other versions."""
    names = HealthFinding.__dataclass_fields__.keys()
    records, _ = read_lines(run_dir / HEALTH)
    return [HealthFinding(**fields) for fields in records if fields.keys() == names]


def urgency(name: str, severity: str) -> tuple[int, int]:
    """Return the key that sorts findings by harm: a failed run, a bad model, then the data."""
    place = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    first = ("run_failed", "model_wrecked", "labels_reversed")
    if name in first:
        return place, first.index(name)
    return place, len(first) + name.startswith("data/")


def counts(run_dir: Path) -> dict[str, int]:
    """Return the number of findings by severity."""
    found = [one.severity for one in read_findings(run_dir)]
    return {severity: found.count(severity) for severity in SEVERITIES}


def data_findings(run_dir: Path) -> Iterator[HealthFinding]:
    """Yield the problems that were found in the pairs before the run, without mere information."""
    for one in read_object(run_dir / "data_report.json").get("look", {}).get("findings", ()):
        if one["severity"] != "info":
            place = "data" if one["set"] == "train" else f"data/{one['set']}"
            fields = {name: one[name] for name in ("severity", "text", "advice")}
            yield HealthFinding(0, f"{place}/{one['name']}", number=float(one["number"]), **fields)
