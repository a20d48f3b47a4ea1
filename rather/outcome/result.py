"""What a run achieved, in four lines: accuracy, win rate, what was forgotten, drift.

Everything is read from metrics and reports of the run folder, so a report can say it again later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rather.config.values import FORGETTING, WIN_RATE
from rather.files import JsonObject
from rather.run_folder.names import ANSWERS, DATA_REPORT
from rather.tracking.json_lines import held_out_prefix, read_lines, read_object, read_records

LINES = 4  # of the result, before the answers
MOST_ANSWERS, MOST_CHARACTERS = 2, 200
Values = Mapping[str, Sequence[float]]  # of each metric, one per line of metrics.jsonl


def judge_accuracy(metrics: Values, data: JsonObject, prefix: str) -> tuple[str, str]:
    """Return an answer and its reason: accuracy against the untrained model and against length."""
    first, last, low, high = accuracy_of(metrics, prefix)
    ties = metrics.get(prefix + "rewards/ties")
    before = f"{first:.1%} before training"
    if ties and ties[0] == 1:  # policy and reference are equal before the first step
        first, before = 0.5, "all ties before training"
    pairs = metrics.get(prefix + "pairs")
    count = f"{pairs[-1]:,.0f} " if pairs else ""
    unit = "pairs" if data.get("rows", "pairs") == "pairs" else "answers"
    text = f"Held-out accuracy is {last:.1%} (95 %: {low:.1%} to {high:.1%}) "
    text += f"on {count}{unit}; {before}."
    name = f"eval {prefix[5:-1]}".strip()
    sets = data.get("look", {}).get("sets", {})
    longer = sets.get(name, {}).get("length_bias", {}).get("longer_wins", 0.5)
    by_length = max(longer, 1 - longer)
    which = "longer" if longer >= 0.5 else "shorter"
    if low <= max(first, 0.5):
        return "No" if last <= max(first, 0.5) else "Not shown", f"{text} That may be chance."
    length_alone = f" Always picking the {which} answer is right on {by_length:.1%}"
    if data.get("rows") == "labelled":
        length_alone = f" The {which} of a desirable and an undesirable answer is the desirable "
        length_alone += f"one in {by_length:.1%}"
    if low <= by_length:
        return "Not shown", f"{text}{length_alone}: the model has not been shown to beat length."
    if by_length > 0.5:
        text += f"{length_alone}."
    return "Yes", text


def accuracy_of(metrics: Values, prefix: str) -> tuple[float, float, float, float]:
    """Return the accuracy at the first and the last evaluation, and the last one's interval."""
    values = metrics[prefix + "rewards/accuracies"]
    low, high = (
        metrics.get(f"{prefix}rewards/accuracies_{end}", values) for end in ("low", "high")
    )
    return values[0], values[-1], low[-1], high[-1]


def judged_prefix(metrics: Values) -> str | None:
    """Return the prefix of the first held-out set with an accuracy."""
    prefixes = sorted(filter(None, map(held_out_prefix, metrics)))
    return next((prefix for prefix in prefixes if prefix + "rewards/accuracies" in metrics), None)


def result_lines(metrics: Values, data: JsonObject) -> list[str]:
    """Return the four lines; each says so if it was not measured."""
    prefix, loss = judged_prefix(metrics), metrics.get("eval/loss")
    accuracy = "Held-out accuracy was not measured; it needs held-out data (validation.data_args)."
    if prefix:
        accuracy = judge_accuracy(metrics, data, prefix)[1]
    elif loss:  # of single answers without labels
        accuracy = f"Held-out loss went from {loss[0]:.4g} to {loss[-1]:.4g}."
    drifts = [values[-1] - values[0] for name, values in metrics.items() if name.endswith("/drift")]
    drift = "Drift was not measured; it needs held-out data and a reference."
    if drifts:
        drift = f"Drift from the base: {max(drifts):.3g} nats per held-out token."
        limit = data.get("drift_limit", math.inf)
        if max(drifts) > limit:
            drift += f" That is above drift_limit ({limit:g})."
    if "loss" in metrics and "sft_loss" not in metrics:
        no_text = "was not measured: a reward model writes no text."
        return [accuracy, f"Win rate {no_text}", f"Forgetting {no_text}", drift]
    return [accuracy, _win_rate(metrics), _forgetting(metrics, data), drift]


def _win_rate(metrics: Values) -> str:
    if WIN_RATE not in metrics:
        return "Win rate against the base was not measured; set eval_prompts.judge."
    rate, low, high = (metrics[f"{WIN_RATE}{end}"][-1] for end in ("", "_low", "_high"))
    text = f"Win rate against the base is {rate:.1%} (95 %: {low:.1%} to {high:.1%})."
    return text if low > 0.5 or high < 0.5 else f"{text} That may be chance."


def _forgetting(metrics: Values, data: JsonObject) -> str:
    losses = metrics.get(f"{FORGETTING}loss")
    if not losses:
        reason = data.get("forgetting_left_out", "see `forgetting` in the config")
        return f"Forgetting was not measured: {reason or 'the tokenizer does not know the texts'}."
    text = f"Forgetting: the loss on neutral text went from {losses[0]:.3f} to {losses[-1]:.3f}"
    kept, right, before = (
        metrics.get(f"{FORGETTING}{name}") for name in ("kept", "right", "right_before")
    )
    if kept and right and before:
        text += f"; {before[-1]:.0%} of the answers were right and {right[-1]:.0%} are now, with "
        text += f"{kept[-1]:.0%} of what the base knew kept"
    return f"{text}."


def read_values(run_dir: Path) -> dict[str, list[float]]:
    """Return the values of each metric of a run."""
    metrics: dict[str, list[float]] = {}
    with suppress(OSError):  # without a file there is nothing to say
        for record in read_records(run_dir / "metrics.jsonl"):
            for name, value in record.items():
                if isinstance(value, int | float):
                    metrics.setdefault(name, []).append(value)
    return metrics


def run_result(run_dir: Path) -> list[str]:
    """Return the four lines of a run folder, and some answers before and after."""
    lines = result_lines(read_values(run_dir), read_object(run_dir / DATA_REPORT))
    return lines + answer_lines(read_lines(run_dir / ANSWERS)[0])


def shown_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the result as a run prints it: only the first line if nothing was measured."""
    is_measured = any("was not measured" not in line for line in lines)
    return lines if is_measured else lines[:1]


def answer_lines(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the newest answers of the policy next to those of the reference."""
    newest = list(
        {
            each["prompt"]: each for each in answers if {"policy", "reference"} <= each.keys()
        }.values()
    )
    lines = []
    for answer in newest[:MOST_ANSWERS]:
        for name, key in (("Prompt", "prompt"), ("Before", "reference"), ("After", "policy")):
            text = " ".join(str(answer[key]).split())
            shown = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
            lines.append(f"{name}: {shown}")
    return lines
