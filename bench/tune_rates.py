"""How often does `rather tune` write a setting that changes nothing, and one that helps?

    python bench/tune_rates.py [--cases 1000]

Simulated margins go through the rule of `tune` (rather.tools.tune.decide). Finalists that change
nothing have normal margins whose mean loss is that of no training and which agree to 0.9. Finalists
that help are one model at several rates: margins of rate x (normal + quality).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from rather.tools.tune import NOTHING, Rewards, decide

ROOT = Path(__file__).parents[1]
STRENGTHS = (9.0, 3.0, 1.0, 1 / 3, 1 / 9)  # of the best rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    for spread in (0.3, 1.0, 2.0):
        for finalists in (2, 8):
            for pairs in (20, 60, 100, 300):
                rate = share_without_effect(pairs, finalists, spread, cases)
                print(
                    f"no effect, spread {spread}, {finalists} finalists, {pairs} pairs: {rate:.1%}"
                )
    for quality in (0.2, 0.3, 0.5):
        for pairs in (70, 205, 308, 500, 1000):
            rate, lost, gain = share_with_effect(pairs, quality, cases // 2)
            print(f"gain {gain:.3f}, {pairs} pairs: written {rate:.0%}, {lost:.4f} from the best")


def share_without_effect(pairs: int, finalists: int, spread: float, cases: int) -> float:
    sys.path.insert(0, str(ROOT))
    from tests.pairs.test_tune import equal_loss

    draw = np.random.default_rng([pairs, finalists, round(10 * spread)])
    center = equal_loss(spread)
    written = 0
    for _ in range(cases):
        noise = math.sqrt(0.1) * draw.normal(size=(finalists, pairs))
        noise += math.sqrt(0.9) * draw.normal(size=pairs)
        written += best_of(center + spread * noise) != NOTHING
    return written / cases


def share_with_effect(pairs: int, quality: float, cases: int) -> tuple[float, float, float]:
    """Return the share of cases, what the written setting is worse than the best, and its gain."""
    draw = np.random.default_rng([pairs, round(100 * quality)])
    rates = 2 * quality / (quality**2 + 1) * np.array(STRENGTHS)
    many = quality + draw.normal(size=200_000)
    gains = [math.log(2) - np.logaddexp(0, -rate * many).mean() for rate in rates]
    lost = []
    for _ in range(cases):
        best = best_of(rates[:, None] * (quality + draw.normal(size=pairs)))
        if best != NOTHING:
            lost.append(max(gains) - gains[int(best)])
    return len(lost) / cases, float(np.mean(lost)), float(max(gains))


def best_of(margins: np.ndarray) -> str:
    """Return what is written: the first finalists move the model most."""
    prompts = np.arange(margins.shape[1], dtype=np.uint64)
    finalists = {str(place): Rewards(row, prompts) for place, row in enumerate(margins)}
    harm = {name: (0.0, -float(name)) for name in finalists}
    return decide(finalists, Rewards(np.zeros(len(prompts)), prompts), harm)[2]


if __name__ == "__main__":
    main()
