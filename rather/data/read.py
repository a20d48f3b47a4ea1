"""Files -> chunks of raw rows, in bounded memory, whatever is inside the files.

The kind of a file is read from its first bytes, never from its name. Text is only cut into rows here, without
building objects: parsing is the work of the child processes (`parse`), and a row that no one can hold or parse
becomes a counted reason, never a crash. Numbers count lines in JSONL and rows in arrays and tables, from 1.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rather.data.json_rows import HALF, Bad, Blocks, lines, objects
from rather.errors import DataError

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20

TAR = slice(257, 262)  # where a tar archive says that it is one
PACKED = {
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz",
    b"PK\x03\x04": "a zip archive",
    b"ustar": "a tar archive",
}
TEXT_KINDS = {"jsonl": 0, "json": 1, "objects": 0}  # kind of text -> brackets around its rows


@dataclass(frozen=True)
class Source:
    """A data file that exists and whose kind is known."""

    path: Path
    kind: str  # jsonl, json (an array), objects (one after another), parquet, arrow
    gzipped: bool = False

    @property
    def unit(self) -> str:
        return "line" if self.kind == "jsonl" else "row"


@dataclass(frozen=True)
class Chunk:
    """Some rows that follow each other. Text rows carry their bytes and place; table rows are one Arrow message."""

    source: int
    numbers: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    rows: tuple[bytes | Bad, ...] = ()
    table: bytes = b""
    unfinished: bool = False  # the last row has no end of line: its writer may have been stopped
    done: float = 0.0  # the share of the file that has been read


# ---- finding files


def find_sources(path: Path) -> list[Source]:
    """The file, or the Arrow files of a folder written by `datasets.save_to_disk`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise DataError(f"{path}: only local files are read; download it first and give the path.")
    path = path.expanduser().absolute()
    try:
        if not path.exists():
            raise DataError(f"{path}: no such file{_nearest(path)}.")
        files = _arrow_files(path) if path.is_dir() else [path]
    except OSError as error:  # such as a folder that may not be searched
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    return [_sniffed(file) for file in files]


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f", and no folder {parent}"
    names = sorted(entry.name for entry in parent.iterdir())
    near = difflib.get_close_matches(path.name, names, 3, 0.5) or names[:5]
    return f"; the folder holds {', '.join(near)}" if near else "; the folder is empty"


def _arrow_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.arrow"))
    state = folder / "state.json"
    if state.is_file():  # beside the data there may be cached results of other work
        try:
            listed = json.loads(state.read_text("utf-8"))["_data_files"]
            files = [folder / Path(entry["filename"]).name for entry in listed]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{state}: does not list the data files of its folder ({error!r})."
            ) from error
    if not files and (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(file.parent.name for file in folder.glob("*/state.json")))
        raise DataError(
            f"{folder}: holds several sets ({splits}); name one of them, such as {folder}/train."
        )
    for file in files:
        if file.resolve().parent != folder.resolve():
            raise DataError(
                f"{file}: is a link to {file.resolve()}, out of its folder; copy the file into it."
            )
    if not files:  # ColossalChat writes part-00000, part-00001, ...
        files = [
            file
            for part in sorted(folder.glob("part-*/state.json"))
            for file in _arrow_files(part.parent)
        ]
    if not files:
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{folder}: a folder without .arrow files (it holds {inside}); name a file in it."
        )
    return files


def _sniffed(path: Path) -> Source:
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a regular file; copy its content to one.")
        with path.open("rb") as file:
            head = file.read(TAR.stop)
        for first, name in PACKED.items():
            if head.startswith(first) or head[TAR] == first:
                raise DataError(f"{path}: {name}, which is not read; unpack it first, or use gzip.")
        if head.startswith(b"PAR1"):
            return Source(path, "parquet")
        if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            return Source(path, "arrow")
        gzipped = head.startswith(b"\x1f\x8b")
        return Source(path, _text_kind(path, gzipped), gzipped)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _text_kind(path: Path, gzipped: bool) -> str:
    with _opened(path, gzipped) as (file, _):
        try:
            head = file.read(4096)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return "jsonl"  # the reader meets the same fault and counts it
    if head.startswith((b"PAR1", b"ARROW1")) or head[TAR] == b"ustar":
        raise DataError(f"{path}: a gzipped table or archive; unpack it first (gzip -d).")
    text = (
        head.removeprefix(codecs.BOM_UTF8)
        .replace(b"\0", b"")
        .removeprefix(b"\xff\xfe")
        .removeprefix(b"\xfe\xff")
    )
    if text.lstrip().startswith(b"["):
        return "json"
    return "objects" if re.match(rb"\s*\{[ \t\r]*\n", text) else "jsonl"


@contextmanager
def _opened(
    path: Path, gzipped: bool
) -> Iterator[tuple[BufferedReader | gzip.GzipFile, Callable[[], float]]]:
    """A file as bytes, unpacked, with a way to ask how far into the packed file it is."""
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        yield (gzip.GzipFile(fileobj=raw) if gzipped else raw), lambda: raw.tell() / size


# ---- cutting files into rows


def chunks(source: Source, index: int, encoding: str = "utf-8") -> Iterator[Chunk]:
    """All rows of a file, in order, in chunks of bounded size."""
    if source.kind in TEXT_KINDS:
        yield from _text_chunks(source, index, encoding)
    else:
        yield from _table_chunks(source, index)


def _text_chunks(source: Source, index: int, encoding: str) -> Iterator[Chunk]:
    with _opened(source.path, source.gzipped) as (file, done):
        blocks = Blocks(file, source.path, encoding)
        cut = lines(blocks) if source.kind == "jsonl" else objects(blocks, TEXT_KINDS[source.kind])
        rows: list[tuple[int, int, bytes | Bad]] = []
        size = 0
        unfinished = False
        for number, offset, row, ended in cut:
            rows.append((number, offset, row))
            size += len(row)
            unfinished = not ended
            if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield _text_chunk(index, rows, unfinished, done())
                rows, size = [], 0
        if rows:
            yield _text_chunk(index, rows, unfinished, 1.0)


def _text_chunk(
    index: int, rows: list[tuple[int, int, bytes | Bad]], unfinished: bool, done: float
) -> Chunk:
    numbers, offsets, raw = zip(*rows, strict=True)
    return Chunk(index, numbers, offsets, raw, unfinished=unfinished, done=done)


def _table_chunks(source: Source, index: int) -> Iterator[Chunk]:
    first = 1
    try:
        for batch, done in _batches(source):
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                part = batch.slice(start, CHUNK_ROWS)
                numbers = tuple(range(first, first + part.num_rows))
                yield Chunk(index, numbers, table=_message(part), done=done)
                first += part.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: damaged {source.kind} file after row {first - 1} ({error})."
        ) from error


def _batches(source: Source) -> Iterator[tuple[pa.RecordBatch, float]]:
    if source.kind == "parquet":
        with pq.ParquetFile(source.path, memory_map=True) as file:
            total = max(1, file.metadata.num_rows)
            read = 0
            for batch in file.iter_batches(CHUNK_ROWS):
                read += batch.num_rows
                yield batch, read / total
        return
    with pa.memory_map(str(source.path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            opened = pa.ipc.open_file(mapped)
            for i in range(opened.num_record_batches):
                yield opened.get_batch(i), (i + 1) / opened.num_record_batches
        else:
            mapped.seek(0)
            for batch in pa.ipc.open_stream(mapped):
                yield batch, mapped.tell() / max(1, mapped.size())


def _message(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


# ---- parsing rows (in the child processes)


class _Refused(ValueError):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a number that JSON knows")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"the key {twice!r} stands twice in one object")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(raw: bytes, offset: int = 0) -> dict[str, Any] | Bad:
    """One row of text as an object, or why it is none."""
    try:
        row = _DECODER.decode(raw.decode("utf-8").strip())
        if _SURROGATE.search(raw):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {offset + error.start} of the file (0x{raw[error.start]:02x})"
        return Bad(
            "bad_encoding",
            f"{place} is not UTF-8; set data_args.encoding if the file has another encoding",
        )
    except UnicodeEncodeError:
        return HALF
    except RecursionError:
        return Bad("too_deep", "too many values inside each other")
    except ValueError as error:
        return Bad("bad_json", str(error))
    if not isinstance(row, dict):
        return Bad("bad_type", f"a row must be an object, found {type(row).__name__}")
    return row


def parsed_rows(chunk: Chunk) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
    """The rows of a chunk with their numbers."""
    if chunk.table:
        yield from zip(chunk.numbers, _table_rows(chunk.table), strict=True)
        return
    last = chunk.numbers[-1] if chunk.unfinished else None
    for number, offset, raw in zip(chunk.numbers, chunk.offsets, chunk.rows, strict=True):
        row = raw if isinstance(raw, Bad) else parse(raw, offset)
        if (
            number == last
            and isinstance(raw, bytes)
            and isinstance(row, Bad)
            and not raw.rstrip().endswith(b"}")
        ):
            row = Bad(
                "truncated",
                f"the last line is not complete; its writer was probably stopped ({row.detail})",
            )
        yield number, row


def _table_rows(message: bytes) -> list[dict[str, Any] | Bad]:
    batch = pa.ipc.open_stream(message).read_next_batch()
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # strings of a table are not checked when it is written
        return [_table_row(batch, i) for i in range(batch.num_rows)]


def _table_row(batch: pa.RecordBatch, i: int) -> dict[str, Any] | Bad:
    try:
        row: dict[str, Any] = batch.slice(i, 1).to_pylist()[0]
        return row
    except UnicodeDecodeError as error:
        return Bad("bad_encoding", f"a text of the table is not UTF-8 ({error})")
