"""incidents.jsonl: what went wrong in a run and was survived, one line each. Nothing reads it back."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rather.redaction import redact

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
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": kind, "step": step}
        record |= {name: redact(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        line = json.dumps(_strict(record), ensure_ascii=False, default=str, allow_nan=False) + "\n"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._told:
                log.warning("%s: %s; incidents are told here only", self.file, error.strerror or error)
            self._told = True
            log.warning("incident: %s", line.rstrip())


def _strict(value: Any) -> Any:
    """JSON has no NaN: such a number is told as a text."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
