"""A journal of finished work next to an output file: after a kill, the same command continues.

The first line says what the work is; every other line is a finished piece of it. A line that a kill
cut off is removed when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from rather.errors import ConfigError
from rather.files import JsonObject, own, parse_json, read_bytes
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)
MOST_BYTES = 64 << 30


class Journal:
    """Lines that are appended as work is done, by one command at a time.

    `entries` are those of earlier commands.
    """

    def __init__(self, path: Path, work: JsonObject) -> None:
        self.path = path
        self.entries: list[JsonObject] = []
        self._lock = Lock()
        self._file = open(path, "a+b", opener=own)  # noqa: SIM115 - open as long as the work
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until close, or a kill
            if os.fstat(self._file.fileno()).st_nlink == 0:  # removed since it was opened
                raise BlockingIOError
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"{path}: another command is writing it; wait for it, or name another --out."
            ) from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s); start no second command.", path, error.strerror)
        complete_bytes = self._read()
        self._file.truncate(complete_bytes)
        if complete_bytes == 0:
            self.append(work)
        elif names := different_keys(self.entries.pop(0), work):
            self.close()
            raise ConfigError(
                f"{path}: belongs to another command, which differs in {', '.join(names)}; "
                "repeat that command, delete the file, or name another --out."
            )

    def _read(self) -> int:
        """Read the complete lines and return their bytes."""
        complete_bytes = 0
        for line in read_bytes(self.path, MOST_BYTES, own).splitlines(keepends=True):
            try:
                entry = parse_json(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(entry, dict):
                break
            self.entries.append(entry)
            complete_bytes += len(line)
        return complete_bytes

    def append(self, entry: JsonObject) -> None:
        """Add a line; it survives a kill of this process as soon as this returns."""
        with self._lock:
            self._file.write(strict_json(entry).encode() + b"\n")
            self._file.flush()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn what is wrong with an entry into one sentence."""
        try:
            yield
        except (LookupError, TypeError, ValueError):
            raise ConfigError(
                f"{self.path}: has a line that Rather did not write; delete the file."
            ) from None

    def close(self) -> None:
        self._file.close()


def first_entry(path: Path) -> JsonObject | None:
    """Return what the work of a journal is; None if there is none."""
    try:
        with open(path, "rb", opener=own) as file:
            entry = parse_json(file.readline())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def different_keys(one: JsonObject, other: JsonObject) -> list[str]:
    """Return the names whose values differ, in objects inside as `decoding.seed`."""
    names = []
    for name in dict.fromkeys([*one, *other]):
        left, right = one.get(name), other.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            names += [f"{name}.{inner}" for inner in different_keys(left, right)]
        elif json.dumps(left) != json.dumps(right):
            names.append(name)
    return names


def refuse_inputs(output: Path, inputs: Iterable[str | bytes | Path]) -> None:
    """Refuse an output file that is one of the files that are read, also by a link."""
    for file in inputs:
        with suppress(OSError, ValueError):  # one does not exist, or is the content of an image
            if os.path.samefile(output, file):
                raise ConfigError(f"--out {output}: is the file that is read; name another one.")


def write_atomic(path: Path, lines: Any) -> None:
    """Write an output file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8", opener=own) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
