"""Metrics that users define: one decorated function of held-out pairs.

    from rather.losses import metric

    @metric
    def far_apart(x):
        per_token = x.policy / x.length
        return (per_token[:, 0] - per_token[:, 1] > 1).double()

It returns one value per pair. Evaluations log the weighted mean as `eval/far_apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rather.config.plugins import Registry
from rather.data.batch import Columns, PairFacts, PairLogps

OwnMetric = Callable[[PairLogps], Tensor]
METRICS: Registry[OwnMetric] = Registry("metric", "rather.losses")


def metric(function: OwnMetric) -> OwnMetric:
    """Register a metric of held-out pairs under the name of its function."""
    METRICS.add(function.__name__, function, function.__module__)
    return function


def own_metrics(
    metrics: Mapping[str, OwnMetric], facts: PairFacts, policy: Columns, reference: Columns | None
) -> dict[str, float]:
    """Return the weighted mean of each metric over a whole held-out set."""
    x = facts.with_logps(policy, reference, facts.mean_chosen_length)
    share = facts.weight / facts.weight.sum()
    return {name: float(function(x).double() @ share) for name, function in metrics.items()}
