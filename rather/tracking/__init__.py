"""What a run tells: metrics.jsonl, trackers, the console and the log files. The only door to trackers.

metrics.jsonl is the record of the run. All the rest may fail (a full disk, a closed pipe, a server out of reach): that
is told once, the part is switched off, the run goes on.
"""

from rather.tracking.console import ProgressView, figures
from rather.tracking.logs import close_logging, setup_logging, worker_log
from rather.tracking.metrics_file import MetricsFile, Record, json_line
from rather.tracking.run import NoTracker, RunTracker
from rather.tracking.trackers import TRACKERS, TensorBoard, Tracker, check_installed

__all__ = [
    "TRACKERS", "MetricsFile", "NoTracker", "ProgressView", "Record", "RunTracker", "TensorBoard", "Tracker",
    "check_installed", "close_logging", "figures", "json_line", "setup_logging", "worker_log",
]  # fmt: skip
