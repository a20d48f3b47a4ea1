"""Built files under the hash of what they were built from, and remembered hashes of files."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import pyarrow as pa

from rather.data.messages import Json
from rather.data.pairs import IMAGE_SCHEMA, SCHEMA, PairFile
from rather.data.report import check_report
from rather.errors import DiskError
from rather.files import (
    file_sha,
    make_folder,
    memory_limit,
    own,
    read_json,
    read_object,
    replace_own,
    sync,
    text_sha,
)

log = logging.getLogger(__name__)

BATCH_ROWS = 8192
# What reading a damaged or crafted file may raise.
DAMAGE = (
    OSError, LookupError, ValueError, TypeError, AttributeError, MemoryError, pa.ArrowException,
)  # fmt: skip
MAPPED = 256 << 20  # bytes to map a file and to check it by parts


@contextmanager
def batch_writer(path: Path, schema: pa.Schema = SCHEMA) -> Iterator[Callable[[Any], None]]:
    """Write an Arrow file of record batches of BATCH_ROWS rows or more; yield what adds a batch.

    The file does not depend on the sizes of the batches that are added.
    """
    waiting: list[Any] = []

    def flush() -> None:
        writer.write_table(pa.Table.from_batches(waiting, schema).combine_chunks())
        waiting.clear()

    def add(batch: Any) -> None:
        waiting.append(batch)
        if sum(added.num_rows for added in waiting) >= BATCH_ROWS:
            flush()

    # A new file: what has this name, such as a link, is not written to.
    with path.open("xb") as file, pa.ipc.new_file(file, schema) as writer:
        yield add
        flush()
    sync(path)


class Cache:
    """A folder of built files: <address>.arrow and, written last, its report <address>.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        make_folder(self.folder)

    def find_or_build(self, address: str, make: Callable[[Path], Json]) -> tuple[PairFile, Json]:
        """Return file and report; if they are missing, let `make` write the file."""
        path = self.folder / f"{address[:32]}.arrow"
        built = _find(path)
        if built:
            return built
        temporary = self.folder / f".{address[:32]}.{uuid4().hex}.building"
        for leftover in self.folder.glob(".*.building"):  # by killed runs
            with suppress(OSError):  # by age, as processes of other machines may share the folder
                if time() - leftover.lstat().st_mtime > 86_400:
                    leftover.unlink()
        try:
            report = json.loads(json.dumps(make(temporary)))  # as a later start reads it
            sha = _sha(temporary, report)
            os.replace(temporary, path)
            entry = json.dumps({"sha256": sha, "report": report})
            replace_own(path.with_suffix(".json"), entry)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskError(
                    f"{self.folder}: no room for the tokenised data; free some space or set "
                    "data_args.cache_dir."
                ) from error
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return PairFile(path), report

    def sha(self, path: Path) -> str:
        """Return the hash of a file's content, remembered by size, inode and times of change."""
        memory = self.folder / "files.json"
        status = path.stat()
        # A program can set the first of the two times back after a change, but not the second.
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        shas = _remembered(memory)
        entry = shas.get(str(path))
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != stamp:
            shas[str(path)] = entry = [stamp, file_sha(path)]
            with suppress(PermissionError):  # a folder that others fill
                replace_own(memory, json.dumps(shas))
        return str(entry[1])


def _remembered(memory: Path) -> Json:
    """Return the hashes of files that were read before; none if the file of them is damaged."""
    try:
        return read_object(memory, own)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: is damaged (%s); hashing the data files again", memory, error)
        return {}


def _find(path: Path) -> tuple[PairFile, Json] | None:
    """Return what was built, or None if it must be built, because it is damaged or older."""
    try:
        entry = read_json(path.with_suffix(".json"), own)
        if entry["sha256"] == _sha(path, entry["report"]):
            file = PairFile(path)
            with memory_limit(MAPPED + path.stat().st_size):
                if file.table.schema not in (SCHEMA, IMAGE_SCHEMA):  # an older file has fewer
                    return None
                file.check()
            check_report(entry["report"], len(file))
            # An older report does not say how many tokens are unknown.
            return (file, entry["report"]) if "unknown_tokens" in entry["report"] else None
        reason = "it has another checksum"
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        reason = str(error)
    text = "%s: the tokenised pairs or their report are damaged; building them again (%s)"
    log.warning(text, path, reason.partition("\n")[0][:200])
    return None


def _sha(tokens: Path, report: Json) -> str:
    """Return the hash of both: the report says which pairs are of which file."""
    return text_sha(file_sha(tokens, own) + json.dumps(report))
