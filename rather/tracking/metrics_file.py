"""metrics.jsonl: the record of a run, and part of what a checkpoint promises: no line is lost or doubled."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rather import faults
from rather.errors import CheckpointError, DiskError

log = logging.getLogger(__name__)

Record = Mapping[str, float | int]


class MetricsFile:
    """One JSON object per line, appended; after each line the file holds whole lines only.

    A line that a full disk does not take is kept and written with a later one, so that none is lost.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._unwritten = b""

    def append(self, record: Record) -> None:
        already_failing = bool(self._unwritten)
        self._unwritten += json_line(record).encode()
        try:
            faults.point("metrics")
            self._write()
            faults.point("metrics.done")
        except OSError as error:
            if not already_failing:
                log.warning(
                    "%s: cannot be written (%s); its lines wait.", self.path, error.strerror
                )

    def position(self) -> int:
        try:
            self._write()
            faults.point("metrics.sync")
            os.fsync(self._descriptor)
        except OSError as error:
            waiting = f"{len(self._unwritten):,} bytes of metrics wait for room on the disk"
            raise DiskError(
                f"{self.path}: cannot be written ({error.strerror}); {waiting}."
            ) from error
        return self._size

    def truncate(self, position: int) -> None:
        """Back to the length it had at a checkpoint: what came after will be written again."""
        if self._size < position or (
            position and os.pread(self._descriptor, 1, position - 1) != b"\n"
        ):
            raise CheckpointError(
                f"{self.path}: has {self._size:,} bytes, the checkpoint was saved when a line ended at "
                f"{position:,}: the file was cut or changed since. Put it back, or begin anew with "
                "--overwrite or another exp_name."
            )
        os.ftruncate(self._descriptor, position)
        os.fsync(self._descriptor)
        self._size, self._unwritten = position, b""

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s: the last lines were lost (%s).", self.path, error.strerror)
        os.close(self._descriptor)

    def _write(self) -> None:
        """All or nothing: a full disk takes the first half of a line, which is cut off again."""
        done = 0
        try:
            while done < len(self._unwritten):
                done += os.write(self._descriptor, self._unwritten[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done
        self._unwritten = b""


def json_line(record: Record) -> str:
    """Strict JSON, fields in the order given. JSON has no NaN: such a value is null, and the last field says
    what it was: {"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}."""
    nonfinite = {key: str(value) for key, value in record.items() if not math.isfinite(value)}
    fields: dict[str, Any] = {
        key: None if key in nonfinite else value for key, value in record.items()
    }
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, allow_nan=False) + "\n"
