"""Everything a run reports: metrics.jsonl, trackers, the console, health findings and log files.

metrics.jsonl is the record of the run. The rest may fail (a full disk, a closed pipe, a server out
of reach): the failure is logged once, that part is switched off, and training continues.
"""

from rather.tracking.json_lines import MetricsFile, Record, json_line
from rather.tracking.logs import close_logging, setup_logging, worker_log
from rather.tracking.run import NoTracker, ProgressView, RunTracker
from rather.tracking.trackers import TRACKERS, TensorBoard, check_installed

__all__ = [
    "TRACKERS", "MetricsFile", "NoTracker", "ProgressView", "Record", "RunTracker", "TensorBoard",
    "check_installed", "close_logging", "json_line", "setup_logging", "worker_log",
]  # fmt: skip
