"""Read data files as chunks of raw rows, in bounded memory, whatever is inside the files.

The kind of a file is found from its first bytes, not from its name, which only says that a text is
CSV or TSV. Text is only cut into rows
here, without building objects: the child processes parse the rows (`parsed_rows`), and a row that
cannot be held or parsed becomes a counted reason, never a crash. Numbers count lines in JSONL and
rows in arrays and tables, from 1.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from rather.data.csv_rows import DELIMITERS, csv_kind, csv_rows
from rather.data.json_rows import (
    MAX_ROW_BYTES,
    DropReason,
    RawRow,
    read_blocks,
    row_too_large,
    split_lines,
    split_values,
)
from rather.errors import DataError
from rather.files import memory_limit, read_json, real_path, regular

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
TABLE_MEMORY = 1 << 30  # bytes, to read a batch of rows of a table

TAR = slice(257, 262)  # where a tar archive has its mark
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
PACKED = {
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz",
    b"PK\x03\x04": "a zip archive",
    b"ustar": "a tar archive",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class DataFile:
    """A data file that exists and whose kind is known."""

    path: Path
    kind: str  # jsonl, json (an array), objects (one after another), csv, tsv, parquet, arrow
    gzipped: bool = False

    @property
    def unit(self) -> str:
        """Return what a row of this file is called."""
        return "line" if self.kind == "jsonl" else "row"


@dataclass(frozen=True)
class Chunk:
    """Rows that follow each other: raw text, or an Arrow message whose first row has a number."""

    source: int
    rows: tuple[RawRow, ...] = ()
    table: bytes = b""
    first: int = 1
    done: float = 0.0  # the share of the file that has been read; 0 for Arrow


# ---- finding files


def find_sources(path: Path) -> list[DataFile]:
    """Return the file, or the Arrow files of a folder written by `datasets.save_to_disk`."""
    path = path.expanduser().absolute()
    try:
        files = _arrow_files(path) if path.is_dir() else [path]
        return [_detect_kind(file) for file in files]
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: no such file; only local files are read.") from error
    except OSError as error:  # such as a folder that may not be searched
        raise DataError(
            f"{error.filename or path}: cannot be read ({error.strerror or error})."
        ) from error


def _arrow_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.arrow"))
    state = folder / "state.json"
    _refuse_outside(folder, [state] if state.exists() else [])
    if state.is_file():  # the folder may also hold cached results of other work
        try:
            listed = read_json(state)["_data_files"]
            files = [folder / Path(entry["filename"]).name for entry in listed]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{state}: does not list the data files of its folder ({error!r})."
            ) from error
    _refuse_outside(folder, files)
    if not files:  # ColossalChat writes part-00000, part-00001, ...
        parts = [part_state.parent for part_state in sorted(folder.glob("part-*/state.json"))]
        _refuse_outside(folder, parts)
        for part in parts:
            files += _arrow_files(part)
    if not files:
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{folder}: a folder without .arrow files (it holds {inside}); name one of them."
        )
    return files


def _refuse_outside(folder: Path, entries: list[Path]) -> None:
    for entry in entries:
        target = real_path(entry)
        if target.parent != real_path(folder):
            raise DataError(
                f"{entry}: is a link to {target}, outside its folder; copy the file into it."
            )


def _detect_kind(path: Path) -> DataFile:
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file; copy its content to one.")
    head, gzipped = _read_head(path)
    packing = next((mark for mark in PACKED if head.startswith(mark) or head[TAR] == mark), None)
    table = next((kind for mark, kind in TABLES.items() if head.startswith(mark)), None)
    if gzipped and (packing or table):
        raise DataError(f"{path}: a gzipped table or archive; unpack it first (gzip -d).")
    if packing:
        raise DataError(
            f"{path}: {PACKED[packing]}, which is not read; unpack it first, or use gzip."
        )
    return DataFile(path, table or _kind_of_text(path, head), gzipped)


def _read_head(path: Path) -> tuple[bytes, bool]:
    """Return the first bytes of a file, unpacked, and whether it is gzipped."""
    with open(path, "rb", opener=regular) as file:
        head = file.read(4096)
        if not head.startswith(b"\x1f\x8b"):
            return head, False
        file.seek(0)
        try:
            return gzip.GzipFile(fileobj=file).read(4096), True
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return b"", True  # the reader meets the same fault and counts it


def _kind_of_text(path: Path, head: bytes) -> str:
    text = head.replace(b"\0", b"")  # UTF-16 text has one next to each letter
    for mark in (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # or of UTF-32
        text = text.removeprefix(mark)
    is_array = text.lstrip().startswith(b"[")
    is_object = text.lstrip().startswith(b"{")
    # A CSV file has no mark of its own: the name says what it is, unless JSON is inside.
    table_kind = csv_kind(path)
    if table_kind and not is_array and not is_object:
        return table_kind
    if is_array:
        return "json"
    is_indented = re.match(rb"\s*\{[ \t\r]*\n", text)
    return "objects" if is_indented else "jsonl"


# ---- cutting files into rows


def chunks(source: DataFile, index: int, encoding: str = "utf-8") -> Iterator[Chunk]:
    """Yield all rows of a file, in order, in chunks of bounded size."""
    if source.kind in TABLES.values():
        yield from _table_chunks(source, index)
        return
    total = max(1, source.path.stat().st_size)
    with open(source.path, "rb", opener=regular) as raw:
        file = gzip.GzipFile(fileobj=raw) if source.gzipped else raw
        blocks = read_blocks(file, source.path, encoding)
        level = {"json": 1, "objects": 0}.get(source.kind)
        rows: list[RawRow] = []
        size = 0
        if source.kind in DELIMITERS:
            split = csv_rows(blocks, source.path, source.kind)
        else:
            split = split_lines(blocks) if level is None else split_values(blocks, level)
        for row in split:
            rows.append(row)
            if isinstance(row[1], bytes):
                size += len(row[1])
            if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield Chunk(index, tuple(rows), done=raw.tell() / total)
                rows = []
                size = 0
        if rows:
            yield Chunk(index, tuple(rows), done=1.0)


def chunks_of(
    groups: Sequence[Sequence[DataFile]], encoding: str = "utf-8", max_rows: int | None = None
) -> Iterator[Chunk]:
    """Yield the rows of all files in order; of each group of files at most the first `max_rows`.

    `Chunk.source` counts the files through all groups.
    """
    index = 0
    for group in groups:
        rows_to_read = math.inf if max_rows is None else max_rows
        for source_index, source in enumerate(group, index):
            if rows_to_read <= 0:
                break
            for chunk in chunks(source, source_index, encoding):
                chunk, rows = _cut(chunk, rows_to_read)
                yield chunk
                rows_to_read -= rows
                if rows_to_read <= 0:
                    break
        index += len(group)


def _cut(chunk: Chunk, most: float) -> tuple[Chunk, int]:
    """Return a chunk with at most `most` rows, and how many it has."""
    if not chunk.table:
        rows = chunk.rows if len(chunk.rows) <= most else chunk.rows[: int(most)]
        return replace(chunk, rows=rows), len(rows)
    batch = pa.ipc.open_stream(chunk.table).read_next_batch()
    if batch.num_rows <= most:
        return chunk, batch.num_rows
    return replace(chunk, table=as_message(batch.slice(0, int(most)))), int(most)


def _table_chunks(source: DataFile, index: int) -> Iterator[Chunk]:
    batches = _table_parts(source)
    # Compressed pages and repeated values may become a million times larger; a map counts as well.
    room = TABLE_MEMORY + source.path.stat().st_size
    first = 1
    while True:
        try:
            with memory_limit(room):
                batch, rows = next(batches)
                message = b"" if isinstance(batch, DropReason) else as_message(batch)
        except StopIteration:
            return
        except MemoryError as error:
            raise DataError(
                f"{source.path}: the rows after {first - 1} take more than {TABLE_MEMORY >> 20} MiB "
                "of memory at a time; write the file with smaller batches or row groups, or as "
                "JSON lines."
            ) from error
        # The last of these: names of columns.
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{source.path}: damaged {source.kind} file after row {first - 1} ({error})."
            ) from error
        if isinstance(batch, DropReason):
            yield Chunk(index, ((first, batch),), done=first / rows)
            first += 1
        else:
            yield Chunk(index, table=message, first=first, done=first / rows)
            first += batch.num_rows


def _table_parts(source: DataFile) -> Iterator[tuple[pa.RecordBatch | DropReason, float]]:
    """Yield rows of a table, or why one is dropped, and how many rows the file says it has."""
    with pa.memory_map(str(source.path)) as mapped:
        rows = math.inf  # Arrow does not say it
        if source.kind == "parquet":
            import pyarrow.parquet as pq  # not in children, which start sooner without it

            table = pq.ParquetFile(mapped)
            rows = table.metadata.num_rows
            groups = range(table.metadata.num_row_groups)
            size = sum(table.metadata.row_group(i).total_byte_size for i in groups)
            fitting = MAX_ROW_BYTES * rows // max(1, size)
            batches = table.iter_batches(min(CHUNK_ROWS, max(1, fitting)))
        elif mapped.read(6) == b"ARROW1":
            table = pa.ipc.open_file(mapped)
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            mapped.seek(0)
            batches = pa.ipc.open_stream(mapped)
        for batch in batches:
            batch.validate()
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                for part in _readable(batch.slice(start, CHUNK_ROWS)):
                    yield part, rows


def _readable(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | DropReason]:
    """Yield the rows in parts that Python can hold, or why a row cannot be read.

    Offsets and texts are checked: bad offsets would be followed into any memory.
    """
    fault: DropReason | None = None
    try:
        batch.validate(full=True)
        if sum(map(_extent, batch.columns)) > MAX_ROW_BYTES:
            fault = row_too_large()
    except pa.ArrowInvalid as error:
        if batch.num_rows == 1 and "UTF8" not in str(error):
            raise
        fault = DropReason("bad_encoding", f"a text of the table is not UTF-8 ({error})")
    if fault is None:
        yield batch
    elif batch.num_rows == 1:
        yield fault
    else:
        half = batch.num_rows // 2
        yield from _readable(batch.slice(0, half))
        yield from _readable(batch.slice(half))


def _extent(array: pa.Array) -> int:
    """Return the bytes of an array and the number of its values: of nulls, there may be billions."""
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    inner: list[pa.Array] = []
    if isinstance(array, pa.StructArray):
        inner = array.flatten()
    elif hasattr(array, "flatten"):  # any kind of list
        inner = [array.flatten()]
    return int(array.nbytes if not inner else 0) + len(array) + sum(map(_extent, inner))


def as_message(batch: pa.RecordBatch) -> bytes:
    """Return a record batch as bytes that `pa.ipc.open_stream` reads."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


# ---- parsing rows (in the child processes)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> Row:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is twice in one object")
    return values


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
TOO_DEEP = ("too_deep", "too many values inside each other")
HALF_CHARACTER = ("bad_unicode", "half of a surrogate pair (\\ud800 ... \\udfff) is alone")


def _parse(raw: bytes) -> Row | DropReason:
    """Return one row of text as an object, or why it is not one."""
    try:
        row = _DECODER.decode(raw.decode("utf-8").strip())
        if _SURROGATE.search(raw):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return DropReason(
            "bad_encoding",
            f"byte {error.start} of the row (0x{raw[error.start]:02x}) is not UTF-8; "
            "set data_args.encoding if the file has another encoding",
        )
    except UnicodeEncodeError:
        return DropReason(*HALF_CHARACTER)
    except RecursionError:
        return DropReason(*TOO_DEEP)
    except ValueError as error:
        hint = (
            "; a line holds one object and nothing after it" if "Extra data" in str(error) else ""
        )
        return DropReason("bad_json", f"{error}{hint}")
    if not isinstance(row, dict):
        return DropReason("bad_type", f"a row must be an object, found {type(row).__name__}")
    return row


def parsed_rows(chunk: Chunk) -> Iterator[tuple[int, Row | DropReason]]:
    """Yield the rows of a chunk with their numbers."""
    if chunk.table:
        batch = pa.ipc.open_stream(chunk.table).read_next_batch()
        yield from enumerate(_table_rows(batch), chunk.first)
    for number, raw in chunk.rows:
        yield number, _parse(raw) if isinstance(raw, bytes) else raw


def rows_of(source: DataFile, encoding: str = "utf-8") -> Iterator[tuple[int, Row | DropReason]]:
    """Yield all rows of a file with their numbers."""
    return chain.from_iterable(map(parsed_rows, chunks(source, 0, encoding)))


def _table_rows(batch: pa.RecordBatch) -> list[Row | DropReason]:
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError, pa.ArrowException) as error:  # such as a date in year 0
        if batch.num_rows == 1:
            return [DropReason("bad_type", f"Python cannot hold a value of the row ({error})")]
        rows: list[Row | DropReason] = []
        for i in range(batch.num_rows):
            rows += _table_rows(batch.slice(i, 1))
        return rows
