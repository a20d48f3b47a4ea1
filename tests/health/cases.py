"""Runs that were made unhealthy, each with the expected finding, and ten healthy ones."""

from __future__ import annotations

from typing import Any

from tests.health.tiny_runs import (
    RATE,
    Case,
    Row,
    alike,
    by_lot,
    grumpy,
    kind,
    longer,
    noisy,
    swapped,
)


def messy(rows: list[Row]) -> list[Row]:
    """Some pairs twice, some the other way round as well, some too long."""
    long = [{**row, "chosen": row["chosen"] + row["rejected"] * 6} for row in rows[-40:]]
    return [*rows[:-40], *rows[:40], *map(swapped, rows[40:80]), *long]


ILL = {
    "steps of a hundred times the rate": Case(
        noisy, noisy, rate=100 * RATE, changes={"save_steps": 8, "max_ckpt_to_keep": 0}
    ),
    "no steps at all": Case(kind, kind, steps=17, rate=0.0),
    "labels by lot": Case(by_lot, by_lot),
    "few pairs many times": Case(by_lot, kind, count=24, steps=48),
    "the longer answer": Case(longer, longer, count=600, steps=32),
    "answers that are alike": Case(alike, alike, rate=10 * RATE),
    "long after it is learnt": Case(kind, kind, count=700, steps=40, rate=7 * RATE),
    "a messy file": Case(
        kind,
        kind,
        steps=2,
        changes={"sequence_length": 32, "actor_train__data_args__overlong": "truncate_response"},
        spoil=messy,
    ),
}
FOUND_IN = {
    "model_wrecked": "steps of a hundred times the rate",
    "learning_rate_too_high": "steps of a hundred times the rate",
    "answers_repeat": "steps of a hundred times the rate",
    "answers_do_not_end": "steps of a hundred times the rate",
    "nothing_learned": "no steps at all",
    "accuracy_stuck": "labels by lot",
    "overfitting": "few pairs many times",
    "length_exploitation": "the longer answer",
    "answers_longer": "the longer answer",
    "data/length_bias": "the longer answer",
    "chosen_falling": "answers that are alike",
    "margin_saturated": "long after it is learnt",
    "data/duplicate_pairs": "a messy file",
    "data/contradictory_pairs": "a messy file",
    "data/truncation": "a messy file",
}
# name -> its pairs, the held-out ones, by what the rate is divided, and other settings
SETTINGS: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "sigmoid": (kind, kind, 4, {}),
    "grumpy sigmoid": (grumpy, grumpy, 4, {}),
    "noisy labels": (noisy, kind, 4, {}),
    "sigmoid with likelihood": (kind, kind, 1, {"rpo_alpha": 0.5}),
    "ipo": (kind, kind, 3, {"pref_loss": "ipo"}),
    "apo_zero": (grumpy, grumpy, 2, {"pref_loss": "apo_zero"}),
    "sigmoid_norm": (kind, kind, 6, {"pref_loss": "sigmoid_norm", "beta": 1.0}),
    "simpo": (kind, kind, 3, {"pref_loss": "simpo"}),
    "orpo": (grumpy, grumpy, 2, {"pref_loss": "orpo"}),
    "cpo": (kind, kind, 2, {"pref_loss": "cpo", "logging_steps": 2}),
}
HEALTHY = {
    name: Case(pairs, held_out, seed=seed, steps=20, rate=RATE / divisor, changes=changes)
    for seed, (name, (pairs, held_out, divisor, changes)) in enumerate(SETTINGS.items(), 10)
}
