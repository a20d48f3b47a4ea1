"""Statistics of answers: win rates with their intervals, and what is wrong with single answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

Z = 1.959964  # of a 95 % interval
RUN = 4  # words
# Of the slope alone: a ridge on the intercept would pull every rate to one half. With less, few
# prompts give rates that are too extreme: 93 % of 10 prompts where 90 % is right.
RIDGE = np.array([0.0, 1.0])
REFUSAL = re.compile(
    r"\b(i('m| am) (sorry|afraid|unable|not able)"
    r"|i (can('|no)t|can not|won't|will not|must decline)"
    r"|as an ai( language)?( model| assistant)?,? i)\b",
    re.I,
)
REFUSAL_START = 120  # characters in which a refusal begins


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of numbers from 0 to 1, one for each prompt.

    Two wins and two losses are added (Agresti and Coull, 1998), so that it is sound with few
    prompts and if all have the same result.
    """
    values = np.array([*scores, 0.0, 0.0, 1.0, 1.0])
    middle, half = values.mean(), Z * values.std() / math.sqrt(len(values))
    mean = float(np.mean(scores))
    return max(0.0, min(mean, float(middle - half))), min(1.0, max(mean, float(middle + half)))


def length_controlled(
    scores: Sequence[float], differences: Sequence[float], weights: Sequence[float]
) -> float:
    """Return the win rate that is expected between answers of equal length.

    A logistic regression explains the scores by an intercept and by tanh of the length difference
    over its deviation, with a ridge on its slope; the result is its value at difference 0. Without
    differences, or if all scores are equal, it is the mean.
    """
    y, length, weight = (np.array(values, float) for values in (scores, differences, weights))
    mean = float(np.average(y, weights=weight))
    if not length.any() or np.ptp(y) == 0:
        return mean
    deviation = length.std()
    x = np.tanh(length / deviation) if deviation > 0 else np.sign(length)
    design = np.stack([np.ones_like(x), x], axis=1)
    effects = np.zeros(2)
    for _ in range(100):  # Newton's method; the loss is strictly convex
        p = 1 / (1 + np.exp(-design @ effects))
        gradient = design.T @ (weight * (p - y)) + RIDGE * effects
        curvature = (design.T * (weight * p * (1 - p))) @ design + np.diag(RIDGE)
        step = np.linalg.solve(curvature, gradient)
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        effects -= step
        if float(np.abs(step).max()) < 1e-10:
            break
    return float(1 / (1 + np.exp(-effects[0])))


def repetition(text: str) -> float:
    """Return the share of runs of four words that came before in the same answer.

    Longer words are cut: a broken model writes `omomomom`, and some languages have no spaces.
    """
    words = re.findall(r"\S{1,12}", text)
    runs = [tuple(words[first : first + RUN]) for first in range(len(words) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def is_refusal(text: str) -> bool:
    """Return whether an answer begins like a refusal, in English."""
    return REFUSAL.search(text[:REFUSAL_START].replace("\u2019", "'")) is not None
