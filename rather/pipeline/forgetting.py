"""Forgetting as a part of evaluations, and the limits that the best model must keep."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.cluster.launch import Roles
from rather.config.schema import DataArgs, StepKeys
from rather.config.values import BY_CHANCE, FORGETTING
from rather.data.batch import Columns, TokenPair
from rather.data.tokens import Ids
from rather.files import JsonObject
from rather.model.generate import GeneratedAnswer
from rather.model.policy import PolicyModel
from rather.outcome.forgetting import (
    LEAST_KNOWN,
    PHRASINGS,
    Figures,
    ForgettingSet,
    Forgotten,
    figures_of,
    known_answers,
)
from rather.outcome.habits import habit_metrics
from rather.pipeline.evaluation import Interrupted, Stopped, answer_all, is_local
from rather.pipeline.guard import OutOfMemoryRetry
from rather.pipeline.progress import RunState
from rather.pipeline.steps import PreparedSteps

log = logging.getLogger(__name__)

# Tokens of a training run from which two measurements take less than 5 % of its time. On a CPU 50
# answers took 2 % and the texts 0.5 % of 181,000 tokens (bench/forgetting_cost.py), and 150 answers
# are asked; on a GPU it is an estimate: they take about a second, however small the model is.
LONG_ENOUGH = {"cpu": 500_000, "cuda": 2_000_000}
# Times forgetting_limit: a model that lost so many answers is refused, whatever it won.
BEYOND_NOISE = 5


@dataclass
class ForgettingCheck:
    """Measures what the policy can do before the first step and after the last, or always."""

    roles: Roles
    retry: OutOfMemoryRetry
    state: RunState
    last_step: int
    is_always_due: bool
    data: DataArgs
    sequence_length: int
    file: Path | None
    last: Figures | None = None  # the last measurement
    chosen: Sequence[str] = ()  # answers of the training data

    @staticmethod
    def of(
        keys: StepKeys,
        data_args: DataArgs,
        sequence_length: int,
        roles: Roles,
        retry: OutOfMemoryRetry,
        state: RunState,
        source: PreparedSteps,
    ) -> ForgettingCheck | None:
        """Return the check, or None if the config or the length of the run leaves it out."""
        if why_left_out(keys, roles.kind, source):
            return None
        file = None if keys.forgetting == "auto" else data_args.locate(keys.forgetting)
        return ForgettingCheck(
            roles,
            retry,
            state,
            source.total_steps,
            keys.selects_a_step,
            data_args,
            sequence_length,
            file,
        )

    def begin(self, tokenizer: Any) -> None:
        """Tokenise texts and questions, as training does."""
        self.measured = ForgettingSet(tokenizer, self.sequence_length, self.data, self.file)
        if not self.measured.is_readable:
            log.warning("forgetting: is not measured: the tokenizer does not know the texts")

    def record(self, step: int, stopped: Stopped) -> dict[str, Any]:
        """Return the metrics of this step, if they are due."""
        is_due = self.is_always_due or step in (0, self.last_step)
        if not is_due or not self.measured.is_readable:
            return {}
        if stopped():
            raise Interrupted
        policy, base = self.roles.actor_train, self.state.progress.base

        def log_probs(pairs: Sequence[TokenPair]) -> Columns:
            packed = self.retry.packing.step(pairs, 0)
            return self.retry.run("actor_train", packed, policy.compute_log_probs)

        def answer(prompts: Sequence[Ids], tokens: int) -> list[GeneratedAnswer]:
            tokenizer = self.measured.tokenizer
            return answer_all(policy, prompts, tokenizer, tokens, stopped, "forgetting")

        digest = self.measured.digest
        before = base.get("forgetting", {}) if step else {}
        is_comparable = before.get("digest") == digest  # not changed in the config since then
        # A model that knew too few answers is not judged by them, so it is not asked again.
        knows_little = is_comparable and len(known_answers(before["right"])) < LEAST_KNOWN
        asks = is_local(policy) and not knows_little
        self.last = self.measured.measure(log_probs, answer if asks else None)
        metrics: dict[str, Any] = {f"{FORGETTING}loss": self.last.loss}
        if step == 0:
            before = base["forgetting"] = self.last.as_json() | {"digest": digest}
        if step == 0 or is_comparable:
            metrics |= answer_metrics(before, self.last, self.chosen)
        return metrics

    def figures_of(self, policy: PolicyModel) -> Figures | None:
        """Return the figures of a model that is whole in this process; None if not readable."""
        return figures_of(policy, self.measured) if self.measured.is_readable else None


def answer_metrics(before: JsonObject, now: Figures, chosen: Sequence[str]) -> dict[str, float]:
    """Return what became of known answers; empty if the first model knew too few."""
    forgotten = Forgotten.between(before, now.as_json())
    if forgotten.kept_share is None:
        return {}
    habits = {}
    if "texts" in before:  # an older checkpoint has none
        habits = habit_metrics(FORGETTING, before["texts"], now.replies, chosen)
    return habits | {
        f"{FORGETTING}right_before": len(before["right"]) / len(now.replies),
        f"{FORGETTING}right": len(now.right) / len(now.replies),
        f"{FORGETTING}known": forgotten.known * len(PHRASINGS) / len(now.replies),
        f"{FORGETTING}kept": forgotten.kept_share,
        f"{FORGETTING}chance": forgotten.chance,
    }


def why_left_out(keys: StepKeys, kind: str, source: PreparedSteps) -> str:
    """Return why a run does not measure forgetting; "" if it does."""
    if keys.forgetting == "off":
        return "`forgetting` is off"
    is_needed = keys.forgetting != "auto" or keys.selects_by(FORGETTING)
    if is_needed or _tokens_of(source) >= LONG_ENOUGH[kind]:
        return ""
    return f"`auto` leaves out runs below {LONG_ENOUGH[kind]:,} training tokens"


def _tokens_of(source: PreparedSteps) -> float:
    """Return about how many tokens a run trains on."""
    return float(source.data.train.tokens.mean()) * source.order.batch * source.total_steps


def drifts(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the drift on each held-out set."""
    return {name: value for name, value in metrics.items() if name.endswith("/drift")}


@dataclass(frozen=True)
class Limits:
    """What the best model must keep; see drift_limit and forgetting_limit."""

    drift: float = 1.0
    forgetting: float = 0.05

    def problem(self, metrics: Mapping[str, Any], base: Mapping[str, Any]) -> str:
        """Return which limit a model exceeds; "" if none. `base` is Progress.base."""
        for name, drift in drifts(metrics).items():
            moved = drift - base.get(name, 0.0)  # a reference of another model begins with some
            if not moved <= self.drift:
                return f"{name} is {moved:.3g} nats per token, above drift_limit ({self.drift:g})."
        before = base.get("forgetting", {}).get("loss")
        loss, kept = (metrics.get(f"{FORGETTING}{name}") for name in ("loss", "kept"))
        if before is not None and loss is not None and not loss <= before * (1 + self.forgetting):
            return (
                f"{FORGETTING}loss is {loss:.3f} and was {before:.3f}, above forgetting_limit "
                f"({self.forgetting:g})."
            )
        chance = metrics.get(f"{FORGETTING}chance", 0.0)
        if kept is None or kept >= 1 - self.forgetting:
            return ""
        if chance < BY_CHANCE or kept < 1 - BEYOND_NOISE * self.forgetting:
            before, now = (metrics.get(f"{FORGETTING}{n}") for n in ("right_before", "right"))
            shares = "" if before is None else f" (right: {before:.0%} before, {now:.0%} now)"
            return (
                f"only {kept:.0%} of the answers that the base knew are still right{shares}, "
                f"beyond forgetting_limit ({self.forgetting:g}) by more than chance."
            )
        return ""
