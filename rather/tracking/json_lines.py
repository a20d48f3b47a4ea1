"""JSON files of a run folder: strict JSON for other programs, JSONL to append to and to follow.

metrics.jsonl is the record of a run. Checkpoints store its length and digest: no line is lost,
doubled or changed unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rather import files
from rather.config.values import FORGETTING
from rather.errors import DiskError
from rather.files import JsonObject, append_whole, own, parse_json

log = logging.getLogger(__name__)

Record = Mapping[str, float | int]  # one line of metrics.jsonl

# These characters end a line for str.splitlines and JavaScript, but not for JSON.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
LONGEST_LINE = 4 << 20  # bytes
MOST_PIECES = 8  # of that size without a line end
LOST_METRICS = "metrics.lost.jsonl"  # a metrics.jsonl that did not fit its checkpoint
LEDGER, LOST_LEDGER = "ledger.arrows", "ledger.lost.arrows"  # numbers of each pair and epoch
FALLS = ("loss", "drift", "error")  # how the names of metrics end that are best at their lowest
REMEMBERED = 256  # bytes before the position, to notice a file that was cut and written again


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON. Non-finite numbers become texts, lone surrogates are escaped."""
    finite = json.loads(json.dumps(value, default=_plain), parse_constant=lambda x: str(float(x)))
    text = json.dumps(finite, indent=indent, ensure_ascii=False)
    return text.translate(_LINE_ENDS).encode("utf-8", errors="backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def current_name(metric: str) -> str:
    """Return the name that a metric has today, given the name in a file of any version."""
    return metric.replace("logps/falling", "logps/chosen_below_reference")


def held_out_prefix(metric: str) -> str | None:
    """Return eval/ or eval/SET/ of the loss of held-out pairs; None for any other metric."""
    is_loss = metric.startswith("eval/") and metric.endswith("/loss")
    return metric.removesuffix("loss") if is_loss and not metric.startswith(FORGETTING) else None


def flatten(values: Mapping[Any, Any], prefix: str = "", whole: Sequence[str] = ()) -> JsonObject:
    """Return {"a.b": 1} for {"a": {"b": 1}}; keys of `whole` stay mappings."""
    flat: JsonObject = {}
    for name, entry in values.items():
        key = f"{prefix}{name}"
        is_section = isinstance(entry, dict) and entry and key not in whole
        flat |= flatten(entry, f"{key}.", whole) if is_section else {key: entry}
    return flat


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Append one record; a kill may have left half a line, after which it starts a new line."""
    line = f"{strict_json(record)}\n".encode()
    with open(file, "ab+", opener=own) as lines:
        if lines.tell():
            lines.seek(-1, 2)
            line = line if lines.read(1) == b"\n" else b"\n" + line
        lines.write(line)


def parse_object(text: bytes) -> JsonObject | None:
    with suppress(ValueError):
        parsed = parse_json(text)
        return parsed if isinstance(parsed, dict) else None
    return None


def read_object(file: Path) -> JsonObject:
    """Return the object in a JSON file; {} if there is none."""
    with suppress(OSError, ValueError):
        return files.read_object(file, own)
    return {}


class JsonLines:
    """A JSONL file that another process may append to, or cut back to a checkpoint.

    `new` reads only new bytes; a torn last line waits, damaged lines are counted and skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.damaged, self._before = path, 0, 0, b""

    def was_cut(self) -> bool:
        """Return whether the bytes before the position are no longer those that were read."""
        try:
            with open(self.path, "rb", opener=own) as file:
                file.seek(self.position - len(self._before))
                return file.read(len(self._before)) != self._before
        except OSError:
            return self.position > 0

    def new(self) -> Iterator[JsonObject]:
        """Yield the records of all complete lines since the last call."""
        with open(self.path, "rb", opener=own) as file:
            file.seek(self.position)
            pieces = 0
            # A longer line is read in pieces: otherwise each call would read it again.
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n") or len(
                line
            ) == LONGEST_LINE:
                self.position += len(line)
                self._before = (self._before + line)[-REMEMBERED:]
                pieces = 0 if line.endswith(b"\n") else pieces + 1
                if pieces > MOST_PIECES:  # such as a sparse file: nothing in it is a record
                    self.position, self._before = file.seek(0, os.SEEK_END), b""
                if (record := parse_object(line)) is None:
                    self.damaged += 1
                else:
                    yield record


def read_lines(path: Path) -> tuple[list[JsonObject], int]:
    """Return all records of a small file and its damaged lines; a missing file has none."""
    lines = JsonLines(path)
    try:
        return list(lines.new()), lines.damaged
    except OSError as error:
        return [], int(not isinstance(error, FileNotFoundError))


class MetricsPosition(NamedTuple):
    """The length of metrics.jsonl at a checkpoint, and the SHA-256 of that many bytes.

    Then the same of ledger.arrows; 0 and None if the run writes none.
    """

    metrics_bytes: int = 0
    metrics_sha256: str | None = None  # None in checkpoints of earlier versions
    ledger_bytes: int = 0
    ledger_sha256: str | None = None


class AppendedFile:
    """Appends parts to a file, whole or not at all, and returns to its length at a checkpoint.

    A part that a full disk does not take is kept and written with a later one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._unwritten = path, b""
        self._open()

    @property
    def is_empty(self) -> bool:
        return not (self._size or self._unwritten)

    def _open(self) -> None:
        self._descriptor = own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._descriptor).st_size
        self._digest = self._hash(self._size)

    def _hash(self, size: int) -> Any:
        digest, position = hashlib.sha256(), 0
        while block := os.pread(self._descriptor, min(LONGEST_LINE, size - position), position):
            digest.update(block)
            position += len(block)
        return digest

    def write(self, part: bytes) -> None:
        already_failing = bool(self._unwritten)
        self._unwritten += part
        try:
            self._write()
        except OSError as error:
            if not already_failing:
                text = "%s: cannot be written (%s); new lines are kept in memory."
                log.warning(text, self.path, error.strerror)

    def position(self) -> tuple[int, str]:
        """Return length and digest of the file, with every part on the disk."""
        try:
            self._write()
            os.fsync(self._descriptor)
        except OSError as error:
            raise DiskError(
                f"{self.path}: cannot be written ({error.strerror}); {len(self._unwritten):,} "
                "bytes wait for room on the disk."
            ) from error
        return self._size, self._digest.hexdigest()

    def truncate(self, size: int, saved: str | None) -> None:
        """Cut the file to its length at a checkpoint; the run writes what follows again.

        A file that is not the one of the checkpoint is set aside: it costs the log, not the run.
        """
        digest = self._hash(size)
        self._unwritten = b""
        # Without a digest, from an earlier version, at least a whole line of text must end there.
        expected = saved or (b"\n" if size else None)
        last = os.pread(self._descriptor, 1, size - 1) if size else None
        if self._size < size or expected not in (digest.hexdigest(), last):
            lost = self.path.with_name(f"{self.path.stem}.lost{self.path.suffix}")
            text = "%s: is not the file that the checkpoint was saved with: it was cut, changed or "
            text += "removed. It is now %s, and a new file begins with the next step."
            log.warning(text, self.path, lost.name)
            os.close(self._descriptor)
            os.replace(self.path, lost)
            return self._open()
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        self._size, self._digest = size, digest

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s: the last lines were lost (%s).", self.path, error.strerror)
        os.close(self._descriptor)

    def _write(self) -> None:
        append_whole(self._descriptor, self._unwritten)
        self._digest.update(self._unwritten)
        self._size += len(self._unwritten)
        self._unwritten = b""


class MetricsFile(AppendedFile):
    """metrics.jsonl: one JSON object per line."""

    def append(self, record: Record) -> None:
        self.write(json_line(record).encode())


def read_records(path: Path) -> Iterator[JsonObject]:
    """Yield the records of a file that MetricsFile has written, with their non-finite values."""
    for fields in JsonLines(path).new():
        nonfinite = fields.pop("nonfinite", {})
        yield fields | {name: float(text) for name, text in nonfinite.items()}


def json_line(record: Record) -> str:
    """Return one line of strict JSON with the fields in the given order.

    JSON has no NaN: such a value is null, and the last field says what it was, as in
    {"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}.
    """
    nonfinite = {key: str(number) for key, number in record.items() if not math.isfinite(number)}
    fields: JsonObject = dict(record) | dict.fromkeys(nonfinite)
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, allow_nan=False) + "\n"
