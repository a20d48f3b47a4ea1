"""Health findings: what the metrics of a run say about it, with advice, in health.jsonl.

`state` keeps what is needed of the metrics, `rules` find problems in it, `watch` writes the file.
"""

from rather.tracking.health.rules import RULES, Health, HealthFinding
from rather.tracking.health.state import LINES, PAIRS, RecentLines
from rather.tracking.health.watch import (
    AT_END,
    HEALTH,
    SEVERITIES,
    HealthWatch,
    counts,
    data_findings,
    read_findings,
    record_end,
    urgency,
)

__all__ = [
    "AT_END",
    "HEALTH",
    "LINES",
    "PAIRS",
    "RULES",
    "SEVERITIES",
    "Health",
    "HealthFinding",
    "HealthWatch",
    "RecentLines",
    "counts",
    "data_findings",
    "read_findings",
    "record_end",
    "urgency",
]
