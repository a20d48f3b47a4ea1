"""The health watch: looks at each record of metrics.jsonl once and reports each finding once.

A resumed run looks at its records again, so a checkpoint needs nothing of this.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from rather.tracking.json_lines import current_name, strict_json

log = logging.getLogger(__name__)

Severity = Literal["serious", "warning", "info"]
Verdict = tuple[float, str, str] | None  # number, text, advice
Line = Mapping[str, float]

# A window has at least so many lines and pairs: the accuracy of 256 pairs is known to +- 0.06.
LINES, PAIRS = 8, 256
LATEST = 4  # training lines that `latest` looks at
ENOUGH = 100  # held-out pairs: their accuracy is known to +- 0.1

FALLEN = 0.3  # nats per token: each token of a chosen answer is a quarter less likely than before
MOST = 0.8  # of the pairs
# Of the loss at the start: with sigmoid a margin of 4.3, where the gradient is 3 % of the first.
SATURATED = 0.02
ALL = 0.99  # of the pairs
LENGTH_DECIDES = 0.8  # correlation: length alone explains two thirds of the differences in margin
STUCK = 0.55  # accuracy; a coin stays below it in 95 of 100 windows of 256 pairs
GRACE = 1 / 3  # of the run, in which a small learning rate or its warm-up may hold accuracy back
DIVERGED = 1.5  # times the loss at the start; learning makes it smaller
STORMY = 30.0  # times the first gradient norm; where a run learns, norms fall
RISEN = 0.1  # of the first held-out loss; evaluations differ by less
LONGER, LONGER_TOKENS = 1.5, 3.0  # times as long as the reference's answers, and tokens longer
REPEATED = 0.25  # more repeated runs of four tokens than in the reference's answers
UNENDED = 0.25  # more answers without an end token than the reference
SLOWER = "Lower learning_rate to a third or less, or lengthen the warm-up."
SHORTER = (
    "Use a loss that divides by length (sigmoid_norm, simpo), ld_alpha below 1, or pairs of "
    "similar length"
)


class RecentLines:
    """The last training lines, as many as hold enough pairs; `get` returns means over pairs.

    Means are computed when a rule asks: with one pair per line there are hundreds of lines.
    """

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()
        self.pairs = 0

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.pairs += int(line["pairs"])
        while len(self.lines) > LINES and self.pairs - self.lines[0]["pairs"] >= PAIRS:
            self.pairs -= int(self.lines.popleft()["pairs"])

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= LINES and self.pairs >= PAIRS

    def get(self, name: str, default: Any = None) -> Any:
        if name == "pairs":
            return self.pairs
        found = [(line[name], line["pairs"]) for line in self.lines if name in line]
        weight = sum(pairs for _, pairs in found)
        return sum(value * pairs for value, pairs in found) / weight if weight else default

    def latest(self, name: str) -> float | None:
        """Return the median of the last few lines, which one spike does not move."""
        values = [line[name] for line in list(self.lines)[-LATEST:] if name in line]
        return median(values) if len(values) == LATEST else None


@dataclass
class EvaluationHistory:
    """The evaluations of one set. A rule believes two evaluations in a row, never one."""

    first: Line
    best: tuple[float, int, float | None]  # loss, step, training loss at that time
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=2))  # after the first one

    @property
    def is_believed(self) -> bool:
        return len(self.last) == 2


@dataclass
class MetricsHistory:
    """What the rules may ask about the records of metrics.jsonl so far; its size is bounded."""

    total_steps: int
    step: int = 0
    first: Line = field(default_factory=dict)  # training line, before the first update
    recent: RecentLines = field(default_factory=RecentLines)
    evaluations: dict[str, EvaluationHistory] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        line = {
            current_name(name): float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self.step = int(record["step"])
        if "pairs" in line:
            self.first = self.first or line
            self.recent.add(line)
        for name in line:
            if name.startswith("eval/") and name.endswith("/loss"):
                prefix = name.removesuffix("loss")
                own = {
                    key.removeprefix(prefix): value
                    for key, value in line.items()
                    if key.startswith(prefix)
                }
                self._add_evaluation(prefix[5:-1], own)
        self.answers |= {name: x for name, x in line.items() if name.startswith("eval/answers/")}

    def _add_evaluation(self, name: str, line: Line) -> None:
        best = (line["loss"], self.step, self.recent.get("loss"))
        known = self.evaluations.setdefault(name, EvaluationHistory(line, best))
        if line is not known.first:
            known.last.append(line)
            known.best = min(known.best, best, key=lambda each: each[0])

    def changes(self, name: str) -> Iterator[tuple[Line, Line | RecentLines]]:
        """Yield (then, now) of each held-out set (the milder of its last two) and of training."""
        for held_out in self.evaluations.values():
            if held_out.is_believed and all(name in x for x in (held_out.first, *held_out.last)):
                yield held_out.first, min(held_out.last, key=lambda line: line[name])
        if self.recent.is_full and name in self.first and self.recent.get(name) is not None:
            yield self.first, self.recent

    def accuracies(self) -> Iterator[tuple[Line | RecentLines, str]]:
        """Yield lines with the accuracy of enough pairs, and the kind of these pairs."""
        name = "rewards/accuracies"
        for held_out in self.evaluations.values():
            last = held_out.last[-1] if held_out.is_believed else {}
            if last.get("pairs", 0) >= ENOUGH and name in last:
                yield max(held_out.last, key=lambda line: line.get(name, 1.0)), "held-out"
        if self.recent.is_full and self.recent.get(name) is not None:
            yield self.recent, "training"

    def answer_statistic(self, name: str) -> tuple[float, float] | None:
        """Return (policy's, reference's) at the last evaluation of eval_prompts, if both exist."""
        found = [self.answers.get(f"eval/answers/{who}/{name}") for who in ("policy", "reference")]
        return None if None in found else (found[0], found[1])  # type: ignore[return-value]


class HealthRule(NamedTuple):
    """A rule and how serious its findings are."""

    severity: Severity
    find: Callable[[MetricsHistory], Verdict]


RULES: dict[str, HealthRule] = {}


def rule(severity: Severity) -> Callable[[Callable[[MetricsHistory], Verdict]], object]:
    """Add a function to the rules under its own name, which is the name of the finding."""

    def add(find: Callable[[MetricsHistory], Verdict]) -> object:
        RULES[find.__name__] = HealthRule(severity, find)
        return find

    return add


@rule("serious")
def nothing_learned(h: MetricsHistory) -> Verdict:
    ties = h.recent.get("rewards/ties", 0.0)
    if not h.recent.is_full or ties < ALL:
        return None
    return (
        ties,
        f"{ties:.0%} of the last {h.recent.pairs} pairs have the same reward for both answers: the "
        "policy is still the reference.",
        "Look at lr in the metrics: raise learning_rate, or train in fp32 if bf16 rounds such "
        "small steps away.",
    )


@rule("serious")
def learning_rate_too_high(h: MetricsHistory) -> Verdict:
    limits = (("loss", "loss", DIVERGED), ("grad_norm", "gradient norm", STORMY))
    for name, what, limit in limits:
        start, now = h.first.get(name), h.recent.latest(name)
        if start and now and now > limit * start:
            text = f"the {what} of the last lines is {now:.3g}, and was {start:.3g} at the start"
            return now, f"{text}: steps overshoot.", SLOWER
    return None


@rule("warning")
def chosen_falling(h: MetricsHistory) -> Verdict:
    name = "logps/chosen_below_reference"
    for then, now in h.changes("sft_loss"):
        falling = now.get(name)  # None without a reference
        before, loss = then["sft_loss"], now.get("sft_loss", 0.0)
        if loss - before >= FALLEN and (falling is None or falling >= MOST):
            share = "" if falling is None else f" of {falling:.0%} of the pairs"
            return (
                loss - before,
                f"the chosen answers{share} have become less likely, by {loss - before:.2f} nats "
                f"per token (sft_loss is {loss:.2f}, and was {before:.2f}): the policy forgets "
                "what it could say before.",
                "Add likelihood with rpo_alpha or pref_ftx, raise beta, or lower learning_rate. "
                "Pairs whose answers are nearly alike cause this most.",
            )
    return None


@rule("warning")
def margin_saturated(h: MetricsHistory) -> Verdict:
    start, loss = h.first.get("loss"), h.recent.get("loss", math.inf)
    margin, right = h.recent.get("rewards/margins"), h.recent.get("rewards/accuracies", 0.0)
    if not h.recent.is_full or not start or margin is None:
        return None
    if loss > SATURATED * start or right < ALL:
        return None
    return (
        margin,
        f"{right:.0%} of the last {h.recent.pairs} pairs are right with a margin of {margin:.3g}, "
        f"and the loss is down to {loss:.2g}: these pairs teach hardly anything more.",
        "Stop here, or train fewer epochs; a smaller learning_rate or a larger beta keeps the "
        "policy closer to its reference, harder pairs give it something to learn.",
    )


@rule("warning")
def length_exploitation(h: MetricsHistory) -> Verdict:
    name = "rewards/length_correlation"
    for then, now in h.changes(name):
        found = now.get(name, 0.0)
        if found >= max(LENGTH_DECIDES, then[name]) and now.get("rewards/margins", 0.0) > 0:
            return (
                found,
                f"reward margins follow the difference in length (correlation {found:.2f}): the "
                "policy learns which answer is longer.",
                f"{SHORTER}; watch eval/answers/policy/tokens (eval_prompts).",
            )
    return None


@rule("warning")
def accuracy_stuck(h: MetricsHistory) -> Verdict:
    if h.step < GRACE * h.total_steps:
        return None
    for line, what in h.accuracies():
        right = line.get("rewards/accuracies", 0.0) + line.get("rewards/ties", 0.0) / 2
        if right <= STUCK:
            return (
                right,
                f"{right:.0%} of {line.get('pairs', 0):.0f} {what} pairs are right, no more than "
                "by chance.",
                "Look at the pairs (`rather data --show`): are chosen and rejected swapped in some "
                "files, or labelled at random? If they are good, raise learning_rate.",
            )
    return None


@rule("warning")
def overfitting(h: MetricsHistory) -> Verdict:
    for name, found in h.evaluations.items():
        best, step, train_then = found.best
        least, train = best + RISEN * abs(found.first["loss"]), h.recent.get("loss", math.inf)
        rises = found.is_believed and all(line["loss"] > least for line in found.last)
        if not rises or train_then is None or train >= train_then:
            continue
        now = found.last[-1]["loss"]
        return (
            now - best,
            f"the held-out loss{f' of {name}' if name else ''} rises ({now:.3g}; its best was "
            f"{best:.3g} at step {step}) while the training loss falls ({train_then:.3g} to "
            f"{train:.3g}): the policy memorises pairs.",
            "Train fewer epochs, set early_stopping_patience and save_best, lower learning_rate, "
            "or add pairs.",
        )
    return None


@rule("warning")
def answers_longer(h: MetricsHistory) -> Verdict:
    policy, reference = h.answer_statistic("tokens") or (0.0, math.inf)
    if policy < max(LONGER * reference, reference + LONGER_TOKENS):
        return None
    return (
        policy,
        f"answers have {policy:.3g} tokens on average, the reference's {reference:.3g}: length is "
        "rewarded.",
        f"{SHORTER}.",
    )


@rule("serious")
def answers_repeat(h: MetricsHistory) -> Verdict:
    policy, reference = h.answer_statistic("repetition") or (0.0, 0.0)
    if policy - reference < REPEATED:
        return None
    return (
        policy,
        f"answers repeat themselves: {policy:.0%} of their runs of four tokens came before, "
        f"{reference:.0%} in the reference's answers.",
        "The policy has lost its language: use an earlier checkpoint, lower learning_rate, raise "
        "beta or add rpo_alpha.",
    )


@rule("warning")
def answers_do_not_end(h: MetricsHistory) -> Verdict:
    policy, reference = h.answer_statistic("ended") or (0.0, 0.0)
    if reference - policy < UNENDED:
        return None
    return (
        policy,
        f"{policy:.0%} of the answers end with an end token, {reference:.0%} of the reference's.",
        "Check whether chosen answers are cut (`rather data`: truncated_response loses the end "
        "token), and whether length is rewarded; lower learning_rate.",
    )


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


class Health:
    """Applies the rules to the records of a run."""

    def __init__(self, total_steps: int, known: Iterable[str] = ()) -> None:
        self.history, self.known = MetricsHistory(total_steps), set(known)

    def look(self, record: Mapping[str, Any]) -> list[HealthFinding]:
        """Return what this record shows for the first time."""
        self.history.add(record)
        found = []
        for name, rule in RULES.items():
            if name not in self.known and (verdict := rule.find(self.history)):
                self.known.add(name)
                number, text, advice = verdict
                step = self.history.step
                found.append(HealthFinding(step, name, rule.severity, text, number, advice))
        return found


class HealthWatch:
    """A tracker that writes health.jsonl, from a run that has done `start_step` steps on."""

    def __init__(self, run_dir: Path, total_steps: int, start_step: int) -> None:
        self.file = run_dir / HEALTH
        before = read_findings(run_dir) if start_step else []
        kept = [one for one in before if one.step <= start_step]
        self.health = Health(total_steps, (one.name for one in kept))
        kept += [one for one in data_findings(run_dir) if one.name not in self.health.known]
        # Do not log again what the log has already: findings after the checkpoint come back, and
        # those of the data are in the data report.
        self.logged = {one.name for one in before + kept}
        self.file.unlink(missing_ok=True)
        self._write(kept)
        for record in _records(run_dir / "metrics.jsonl"):
            self.log(0, record)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        found = self.health.look(metrics)
        self._write(found)
        for one in found:
            if one.name not in self.logged:
                level = logging.INFO if one.severity == "info" else logging.WARNING
                log.log(level, "health, step %d: %s %s", one.step, one.text, one.advice)
        self.logged |= {one.name for one in found}

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: every line is in the file already."""

    def _write(self, findings: list[HealthFinding]) -> None:
        if findings:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(strict_json(asdict(one)) + "\n" for one in findings)


def read_findings(run_dir: Path) -> list[HealthFinding]:
    """Return the lines of health.jsonl, without damaged lines and those of other versions."""
    names = HealthFinding.__dataclass_fields__.keys()
    records = _records(run_dir / HEALTH)
    return [HealthFinding(**fields) for fields in records if fields.keys() == names]


def counts(run_dir: Path) -> dict[str, int]:
    """Return the number of findings by severity."""
    found = [one.severity for one in read_findings(run_dir)]
    return {severity: found.count(severity) for severity in SEVERITIES}


def data_findings(run_dir: Path) -> Iterator[HealthFinding]:
    """Yield the problems that were found in the pairs before the run, without mere information."""
    try:
        report = json.loads((run_dir / "data_report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for one in report.get("look", {}).get("findings", ()):
        if one["severity"] != "info":
            place = "data" if one["set"] == "train" else f"data/{one['set']}"
            fields = {name: one[name] for name in ("severity", "text", "advice")}
            yield HealthFinding(0, f"{place}/{one['name']}", number=float(one["number"]), **fields)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file up to a line, or a character, that a kill has cut."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            return
        if isinstance(fields, dict):
            yield fields
