"""The one rule of choice: a model is better only beyond the interval of the paired difference."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

from rather.losses.gain import LEAST, LEAST_PROMPTS, Gain, _student
from rather.pipeline.progress import Progress

METRIC = "eval/win_rate"


def test_the_interval_is_student_s() -> None:
    """Values of t from tables; symmetric differences have no skewness."""
    for freedom, quantile in ((9, 2.2622), (15, 2.1314), (30, 2.0423), (1000, 1.9623)):
        assert _student(0.975, freedom) == pytest.approx(quantile, abs=4e-4)
    gain = Gain.of([-1.0, 3.0] * 8)
    error = math.sqrt(4 / 15)  # the deviation is 2
    assert (gain.mean, gain.error) == pytest.approx((1.0, error))
    assert (gain.low, gain.high) == pytest.approx(
        (1 - 2.1314 * error, 1 + 2.1314 * error), abs=2e-4
    )
    assert Gain.of([-1.0, 3.0] * 8, looks=5).low < gain.low
    assert gain.enough == pytest.approx((2.1314 * error) ** 2, rel=1e-3)
    assert Gain.of([1.0] * LEAST).is_certain
    assert not Gain.of([1.0] * (LEAST - 1)).is_certain
    assert not Gain.of([1.0] * (LEAST_PROMPTS - 1) + [0.0] * LEAST).is_certain
    assert not Gain.of([1.0] * 64, np.arange(64) % (LEAST_PROMPTS - 1)).is_certain
    assert Gain.of([-1.0] * LEAST).enough == math.inf


def test_rare_large_losses_widen_the_interval_downwards() -> None:
    gain = Gain.of([0.1] * 39 + [-1.0])
    assert gain.mean - gain.low > 1.2 * (gain.high - gain.mean)


@pytest.mark.defect("E5")
@pytest.mark.parametrize("prompts", [20, 100, 300])
def test_luck_does_not_save_a_best_model(prompts: int) -> None:
    """Three evaluations, 30 % of the answers change: what is not better is saved in at most 6 %."""
    saved = {0.0: 0, -0.02: 0, 0.3: 0}
    for better in saved:
        draw = np.random.default_rng(prompts)
        for _ in range(300):
            progress = Progress()
            progress.judge({METRIC: 0.5}, METRIC, None)  # the first model
            for step in (1, 2, 3):
                progress.step = step
                outcome = draw.choice(
                    [0.0, 0.5, 1.0], prompts, p=[0.15 - better / 2, 0.7, 0.15 + better / 2]
                )
                scores = {str(i): score for i, score in enumerate(outcome.tolist())}
                progress.judge({METRIC: float(outcome.mean())}, METRIC, None, "", scores)
            saved[better] += progress.best_step > 0
    assert saved[-0.02] <= saved[0.0] <= 0.06 * 300
    assert saved[0.3] > 0.5 * 300
    assert prompts == 20 or saved[0.3] > 0.99 * 300


@pytest.mark.defect("E5")
def test_a_later_model_must_beat_the_best_one(caplog: pytest.LogCaptureFixture) -> None:
    def judged(progress: Progress, scores: dict[str, Any]) -> bool:
        mean = sum(scores.values()) / len(scores)
        return progress.judge({METRIC: mean}, METRIC, 2, "", scores)

    progress = Progress()
    assert progress.judge({METRIC: 0.5}, METRIC, 2)
    wins = {str(i): 1.0 if i < 60 else 0.5 for i in range(100)}
    assert judged(progress, wins)
    assert not judged(progress, {**wins, "99": 1.0, "98": 1.0})  # higher, but perhaps by chance
    progress = Progress(**vars(progress))
    assert judged(progress, dict.fromkeys(wins, 1.0))
    assert (progress.best, progress.stopped_early) == (1.0, False)
    few = Progress()
    few.judge({METRIC: 0.5}, METRIC, None)
    with caplog.at_level(logging.WARNING):
        assert not judged(few, {str(i): 1.0 for i in range(LEAST - 1)})
    assert f"give eval_prompts {LEAST} or more" in caplog.text
