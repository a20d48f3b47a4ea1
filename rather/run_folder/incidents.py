"""incidents.jsonl: what went wrong in a run and was survived, one line each. Nothing reads it back."""

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
    """Appends to the file of a run. A disk that takes no line costs the line, never the run."""

    def __init__(self, run_dir: Path, *, silent: bool = False) -> None:
        """`silent` for a driver beside the leading one, which tells the same."""
        self.file, self.silent = run_dir / INCIDENTS, silent
        self._told = False

    def add(self, kind: str, step: int, **facts: Any) -> None:
        """`kind`: nonfinite, spike, out_of_memory, missed_save, worker_lost, reference_lost, hang, rollback or
        damaged_checkpoint; `step` is the one that it happened in."""
        if self.silent:
            return
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "step": step,
        }
        record |= {
            name: redact(fact) if isinstance(fact, str) else fact for name, fact in facts.items()
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.file, record)
        except OSError as error:
            if not self._told:
                log.warning(
                    "%s: %s; incidents are told here only", self.file, error.strerror or error
                )
            self._told = True
            log.warning("incident: %s", strict_json(record))
