"""incidents.jsonl: problems that a run has survived, one line each. No run reads it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rather.config.redaction import redact
from rather.tracking.json_lines import append_line, strict_json

log = logging.getLogger(__name__)

INCIDENTS = "incidents.jsonl"


class Incidents:
    """Append to the file of a run; a full disk loses the line, never the run."""

    def __init__(self, run_dir: Path, *, silent: bool = False) -> None:
        """`silent` is for drivers other than the main one, which reports the same."""
        self.file, self.silent = run_dir / INCIDENTS, silent

    def add(self, kind: str, step: int, **facts: Any) -> None:
        """Append one incident that happened in `step`.

        `kind` is nonfinite, spike, out_of_memory, missed_save, missed_upload, worker_lost,
        reference_lost, hang, rollback or damaged_checkpoint.
        """
        if self.silent:
            return
        facts = {name: redact(f) if isinstance(f, str) else f for name, f in facts.items()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"time": now, "kind": kind, "step": step, **facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.file, record)
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s: %s; incident: %s", self.file, reason, strict_json(record))
