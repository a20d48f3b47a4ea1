"""Built files under the hash of what they were built from, and hashes of files remembered by size and time."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Any

import pyarrow as pa

from rather.data.pairs import PairFile
from rather.data.tokenize_worker import SCHEMA
from rather.errors import DiskError

log = logging.getLogger(__name__)

BATCH_ROWS = 8192


class BatchWriter:
    """An Arrow file of record batches of at least BATCH_ROWS rows, the same for any number of children."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.writer = pa.ipc.new_file(self.file, SCHEMA)
        self.waiting: list[Any] = []

    def add(self, batch: Any) -> None:
        self.waiting.append(batch)
        if sum(part.num_rows for part in self.waiting) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        joined = pa.Table.from_batches(self.waiting, SCHEMA).combine_chunks()
        self.writer.write_table(joined)
        self.waiting = []

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class Cache:
    """A folder of built files: <address>.arrow and, written last, <address>.json with its report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.memory = folder / "files.json"

    def find(self, address: str) -> tuple[PairFile, dict[str, Any]] | None:
        """What was built, unless it is not there or of an older form. What is damaged is told, and built again."""
        path, told = self._path(address, "arrow"), self._path(address, "json")
        if not path.exists() or not told.exists():
            return None
        try:
            entry = json.loads(told.read_text("utf-8"))
            if "sha256" not in entry:
                return None
            if entry["sha256"] == _sha(path, entry["report"]):
                file = PairFile(path)
                return (
                    (file, entry["report"]) if file.reader.schema == SCHEMA else None
                )  # older: fewer columns
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            pass
        log.warning("%s: the tokenised pairs or their report are damaged, and are made anew", path)
        return None

    def _path(self, address: str, suffix: str) -> Path:
        return self.folder / f"{address[:32]}.{suffix}"

    @contextmanager
    def writing(self, address: str) -> Iterator[tuple[Path, Callable[[dict[str, Any]], None]]]:
        """A temporary file, and what to call with the report when it is complete."""
        temporary = self.folder / f".{address[:32]}.{os.getpid()}.building"
        self._remove_stale()

        def finish(report: dict[str, Any]) -> None:
            sha = _sha(temporary, report)
            os.replace(temporary, self._path(address, "arrow"))
            _write(self._path(address, "json"), {"sha256": sha, "report": report})

        try:
            yield temporary, finish
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskError(
                    f"{self.folder}: no room for the tokenised data; free some or set data_args.cache_dir."
                ) from error
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        """What killed runs left unfinished. By age, since processes of other machines may share the folder."""
        for path in self.folder.glob(".*.building"):
            with suppress(OSError):
                if time() - path.stat().st_mtime > 86_400:
                    path.unlink()

    def sha(self, path: Path) -> str:
        """The hash of a file's content, remembered by size, time of change and inode."""
        status = path.stat()
        key, stamp = str(path), [status.st_size, status.st_mtime_ns, status.st_ino]
        known = self._remembered()
        if known.get(key, [None])[0] != stamp:
            known[key] = [stamp, file_sha(path)]
            _write(self.memory, known)
        return str(known[key][1])

    def _remembered(self) -> dict[str, Any]:
        try:
            known = json.loads(self.memory.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sha(tokens: Path, report: dict[str, Any]) -> str:
    """Of both: the report says which pairs are of which file."""
    return text_sha(file_sha(tokens) + json.dumps(report))


def file_sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
