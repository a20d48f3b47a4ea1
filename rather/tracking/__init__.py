"""Everything a run reports: metrics.jsonl, trackers, the console, health findings and log files.

metrics.jsonl is the record of the run. The rest may fail (a full disk, a closed pipe, a server out
of reach): the failure is logged once, that part is switched off, and training continues.
"""
