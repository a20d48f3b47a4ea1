"""What the trackers were told of a run before it was resumed: their own ids of it, and its records.

The ids lie in the run folder, not in the checkpoint: a run that is tracked elsewhere from now on is still the same run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from rather.tracking.metrics_file import Record

log = logging.getLogger(__name__)

IDS = "trackers.json"


class Past:
    """With no step done there is none: a run that begins is a new one to its trackers."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self.start_step = start_step  # done when the trackers begin; what they were told of later ones comes again
        self._metrics, self._file = run_dir / "metrics.jsonl", run_dir / IDS
        self._ids: dict[str, str] = {}
        if start_step == 0:
            self._file.unlink(missing_ok=True)
        elif self._file.exists():
            self._ids = self._read()

    def _read(self) -> dict[str, str]:
        """A file that a kill or a full disk has torn costs the trackers their run, never ours."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): str(run_id) for name, run_id in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            log.warning("%s: cannot be read (%s); trackers begin a new run", self._file, error)
            return {}

    def run_id(self, tracker: str) -> str | None:
        """Under which id the tracker knows the run, if it does."""
        return self._ids.get(tracker)

    def keep_run_id(self, tracker: str, run_id: str) -> None:
        self._ids[tracker] = run_id
        self._file.write_text(json.dumps(self._ids, indent=1) + "\n", encoding="utf-8")

    def records(self, first: int) -> Iterator[Record]:
        """From step `first` to the checkpoint: what a tracker that writes behind may have lost in a kill."""
        if self.start_step == 0:
            return
        for line in self._metrics.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            lost = {name: float(value) for name, value in fields.pop("nonfinite", {}).items()}
            if fields["step"] >= first:
                yield fields | lost
