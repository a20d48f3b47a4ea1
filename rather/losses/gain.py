"""The one rule of choice: a model is better only beyond the interval of the paired difference.

`rather tune` and `save_best` with a judge use it. docs/choosing.md states how often it errs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What can show a difference; with fewer, chance does too often. Scores that did not change say
# less, so as many differences as prompts must not be 0.
LEAST, LEAST_PROMPTS = 16, 8
ERROR = 0.05  # of a two-sided interval


@dataclass(frozen=True)
class Gain:
    """By how much one model is better than another on the same prompts."""

    mean: float
    error: float  # standard error
    low: float  # of the 95 % interval; infinite with too few differences or prompts
    high: float
    prompts: int

    @staticmethod
    def of(
        differences: Sequence[float] | NDArray[Any],
        prompts: NDArray[Any] | None = None,
        looks: int = 1,
    ) -> Gain:
        """Measure paired differences, which are above 0 where the model is better.

        Differences of the same prompt are not independent, so prompts are counted; without
        `prompts` each difference is one. A choice that was tried `looks` times needs an interval
        that much wider, so that repeated tries do not reward luck.
        """
        values = np.asarray(differences, float)
        mean = float(values.mean())
        apart = values - mean
        if prompts is not None:
            unique, place = np.unique(prompts, return_inverse=True)
            sums = np.zeros(len(unique))
            np.add.at(sums, place, apart)
            apart = sums * (len(unique) / len(values))
        count = len(apart)
        spread = math.sqrt(float((apart**2).sum()) / (count - 1)) if count > 1 else 0.0
        error = spread / math.sqrt(count)
        if len(values) < LEAST or min(count, int(np.count_nonzero(values))) < LEAST_PROMPTS:
            return Gain(mean, error, -math.inf, math.inf, count)
        skewness = float((apart**3).mean()) / float(apart.std()) ** 3 if spread else 0.0
        quantile = _student(1 - ERROR / 2 / looks, count - 1)
        below = _without_skewness(quantile, skewness, count)
        above = _without_skewness(-quantile, skewness, count)
        return Gain(mean, error, mean - below * error, mean - above * error, count)

    @property
    def is_certain(self) -> bool:
        return self.low > 0

    @property
    def ratio(self) -> float:
        """The mean in standard errors; 0 if nothing differs."""
        return self.mean / self.error if self.error else 0.0

    @property
    def enough(self) -> float:
        """Times as many prompts that would show a gain of this size; infinite if there is none."""
        if self.mean <= 0:
            return math.inf
        width = 2 * self.error if math.isinf(self.low) else self.mean - self.low
        return max((width / self.mean) ** 2, LEAST_PROMPTS / self.prompts)

    def __str__(self) -> str:
        return f"{self.mean:.4f} (95 %: {self.low:.4f} to {self.high:.4f})"


def _student(share: float, freedom: int) -> float:
    """Return a quantile of Student's t; within 0.1 % from 9 degrees of freedom on.

    The expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _without_skewness(quantile: float, skewness: float, count: int) -> float:
    """Return a quantile of Student's statistic of values that are skewed (Hall, 1992).

    Losses are: a few pairs become much worse while most become a little better. With few prompts
    the plain quantile would call many models better that change nothing.
    """
    if abs(skewness) < 1e-6:
        return quantile
    root = math.sqrt(count)
    cube = 1 + skewness * (quantile - skewness / (6 * root)) / root
    return 3 * root / skewness * (float(np.cbrt(cube)) - 1)
