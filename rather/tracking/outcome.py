"""What a run has changed: fields of report.json, each of which may be missing, and their text.

`result` has the lines of rather.outcome.result.

`updates`, `skipped_steps`, `skip_reasons` and `idle_updates` are counted during the run. The export
adds `changed_masters` and `changed_file` (shares of the float32 weights and of the written weights
that differ from the source), `kept_share` (share of the update that the written file keeps), and
`weight_size_before` and `weight_size` (root mean square of the weights in matrices, of source and
file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONS = {
    "overflow": "float16 overflow",
    "nonfinite": "NaN or Inf",
    "spike": "a spike",
    "rollback": "left out after a rollback",
    "no_weight": "only pairs of weight 0",
    "unknown": "by an earlier version",
}
SHARES = {
    "changed_masters": "{} of the weights changed in float32",
    "changed_file": "{} changed in the exported file",
    "kept_share": "the file keeps {} of the update",
}


def numbers_of(report: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, number in report.items() if isinstance(number, int | float)}


def skipped_text(report: Mapping[str, Any]) -> str:
    """Return `3 of 4 steps were skipped (float16 overflow: 3)`."""
    numbers, reasons = numbers_of(report), report.get("skip_reasons")
    listed = reasons.items() if isinstance(reasons, dict) else ()
    why = ", ".join(f"{REASONS.get(name, name)}: {count}" for name, count in listed if count)
    text = f"{numbers['skipped_steps']:.0f} of {numbers['steps']:.0f} steps were skipped"
    return f"{text} ({why})" if why else text


def is_unchanged(report: Mapping[str, Any]) -> bool:
    """Return whether no weight differs from the source, or no update could change one."""
    numbers = numbers_of(report)
    return numbers.get("changed_masters") == 0 or (
        "updates" in numbers and numbers["updates"] == numbers.get("idle_updates", 0)
    )


def outcome_text(report: Mapping[str, Any]) -> str:
    """Return all that is known in one line; "" if the run was made by an earlier version."""
    numbers, sentences = numbers_of(report), list[str]()
    if {"steps", "updates", "skipped_steps"} <= numbers.keys():
        updates = numbers["updates"]
        update_text = f"updates made: {updates:.0f}" if updates else "no update was made"
        sentences = [update_text, skipped_text(report)]
    if is_unchanged(report):
        return "; ".join([*sentences, "the weights did not change"])
    shares = [
        text.format(percent(numbers[name])) for name, text in SHARES.items() if name in numbers
    ]
    return "; ".join(sentences + shares)


def result_of(report: Mapping[str, Any]) -> list[str]:
    """Return what the run achieved, line by line; empty if it has not finished."""
    lines = report.get("result")
    return [str(line) for line in lines] if isinstance(lines, list) else []


def percent(share: float) -> str:
    """Return three digits: a small share that is not 0 must not look like 0."""
    return f"{100 * share:.3g} %"
