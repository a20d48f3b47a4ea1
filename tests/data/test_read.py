"""Files of every kind and every fault -> rows or counted reasons, in bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rather.data import json_rows as cut
from rather.data.json_rows import split_lines
from rather.data.read import chunks, find_sources
from rather.errors import DataError
from tests.counting import lines_of
from tests.data.files import reasons, rows_of, save_to_disk, write_arrow

ROWS = [
    {"prompt": f"q{i}", "chosen": 'a "quote" \\ and } ] é 🎈', "rejected": "b"} for i in range(5)
]


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


TEXTS = {
    "lines": ("jsonl", lines(ROWS)),
    "crlf": ("jsonl", lines(ROWS, "\r\n")),
    "bom": ("jsonl", "\ufeff" + lines(ROWS)),
    "blank lines": ("jsonl", "\n\n" + lines(ROWS, "\n\n")),
    "no last line end": ("jsonl", lines(ROWS).rstrip("\n")),
    "array": ("json", json.dumps(ROWS)),
    "indented array": ("json", " \n" + json.dumps(ROWS, indent=2, ensure_ascii=False)),
    "array bom": ("json", "\ufeff" + json.dumps(ROWS)),
    "indented": ("objects", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
def test_text_is_known_by_its_content(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / "whatever.name"
    kind, text = TEXTS[name]
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert [source.kind for source in find_sources(path)] == [kind]
    numbers = range(3, 12, 2) if name == "blank lines" else range(1, 6)
    assert rows_of(path) == list(zip(numbers, ROWS, strict=True))


@pytest.mark.parametrize("suffix", ["parquet", "arrow file", "arrow stream", "save_to_disk"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "x.json"  # the name says nothing
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "save_to_disk":
        save_to_disk(path, ROWS)
    else:
        write_arrow(path, table, pa.ipc.new_file if suffix == "arrow file" else pa.ipc.new_stream)
    assert rows_of(path) == list(enumerate(ROWS, 1))
    assert find_sources(path)[0].unit == "row"


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_arrays_are_cut_the_same_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(cut, "BLOCK_BYTES", block)
    draw = random.Random(block)
    text = ['\\"', "\\\\", "}", "]", "{", "[", ",", "é", "\n", "x", '"', "\\"]
    rows = [{"a": "".join(draw.choices(text, k=9)), "b": [1, {"c": ["]", {}]}]} for _ in range(40)]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(rows, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
    )
    assert rows_of(path) == list(enumerate(rows, 1))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"a": NaN}', "bad_json"),
        ('{"a": -Infinity}', "bad_json"),
        ('{"a": 1, "a": 2}', "bad_json"),
        ('{"b": {"a": 1, "a": 2}}', "bad_json"),
        ("{oops}", "bad_json"),
        ("[1, 2]", "bad_type"),
        ('{"a": "\\ud800"}', "bad_unicode"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "too_deep"),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_one_bad_row_does_not_hide_the_others(
    tmp_path: Path, row: str, reason: str, array: bool
) -> None:
    good = '{"a": "\\ud83c\\udf88"}'
    path = tmp_path / "x"
    path.write_text(f"[{good}, {row}, {good}]" if array else f"{good}\n{row}\n{good}\n")
    found = rows_of(path)
    assert reasons(path) == [(2, reason)]
    assert [found[0], found[2]] == [(1, {"a": "🎈"}), (3, {"a": "🎈"})]


def test_a_scalar_between_rows_of_an_array_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('[{"a": 1}, 5, "x", {"a": 2}] trailing')
    assert reasons(path) == [(2, "bad_json"), (4, "bad_json")]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}\n{"a": "cut o',
        '[{"a": 1}, {"a": 2}, {"a": "cut o',
        '[{"a": 1}, {"a": 2},',
    ],
)
def test_a_stopped_writer_costs_one_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert reasons(path) == [(3, "truncated")]
    assert len(rows_of(path)) == 3


def test_a_broken_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(lines([{"a": os.urandom(20).hex()} for _ in range(5000)]).encode())
    path.write_bytes(packed[: len(packed) // 2])
    found = rows_of(path)
    assert len(found) > 100
    assert found[-1][1].reason == "damaged_gzip"


@pytest.mark.parametrize("array", [False, True])
def test_a_gigantic_row_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: bool
) -> None:
    monkeypatch.setattr(cut, "MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(cut, "BLOCK_BYTES", 1 << 16)
    before, between, after = ("[", ",", "]") if array else ("", "\n", "\n")
    path = tmp_path / "x"
    with path.open("w") as file:
        file.write(before + '{"a": 1}' + between + '{"a": "')
        file.writelines("x" * (1 << 20) for _ in range(50))
        file.write('"}' + between + '{"a": 2}' + after)
    tracemalloc.start()
    (_, first), (number, bad), (_, last) = rows_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (number, bad.reason) == (2, "row_too_large")
    assert [first, last] == [{"a": 1}, {"a": 2}]
    assert peak < 4e6  # the row has 52 MB, its limit is 1 MB


def test_memory_of_a_large_array_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("w") as file:
        file.write("[" + ",\n".join(json.dumps({"a": "x" * 1000}) for _ in range(10_000)) + "]")
    tracemalloc.start()
    count = sum(len(chunk.rows) for chunk in chunks(find_sources(path)[0], 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000
    assert peak < 6e6  # the file has 10 MB


def test_wrong_encoding_is_named_by_byte_and_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "x"
    latin = b'{"a": "ok"}\n' + '{"a": "café"}\n'.encode("latin-1")
    for content in (latin, b"\xef\xbb\xbf" + latin):
        path.write_bytes(content)
        _, (number, bad) = rows_of(path)
        assert (number, bad.reason) == (2, "bad_encoding")
        assert "byte 10 " in bad.detail
        assert "data_args.encoding" in bad.detail
    path.write_bytes(latin)
    assert rows_of(path, "latin-1") == [(1, {"a": "ok"}), (2, {"a": "café"})]
    path.write_bytes('{"a": "café"}\n'.encode("utf-16"))
    assert rows_of(path, "utf-16") == [(1, {"a": "café"})]
    path.write_bytes(b'{"a": "x\xff"}\n')
    with pytest.raises(DataError, match="byte 8"):
        rows_of(path, "shift_jis")


def test_unreadable_files_are_refused_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}")
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd1234")
    (tmp_path / "tables").mkdir()
    for pipe in ("pipe", "tables/x.arrow"):
        os.mkfifo(tmp_path / pipe)
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "cut.parquet")
    os.truncate(tmp_path / "cut.parquet", (tmp_path / "cut.parquet").stat().st_size - 9)
    for path, place in {
        tmp_path / "pair.jsonl": r"pair\.jsonl: no such file",
        tmp_path: r"without \.arrow files",
        Path("https://example.org/pairs.jsonl"): "example.org/pairs.jsonl: no such file",
        tmp_path / "x.zst": "zstd",
        tmp_path / "pipe": "not a regular file",
        tmp_path / "tables": r"x\.arrow: not a regular file",
        tmp_path / "cut.parquet": "damaged parquet",
    }.items():
        with pytest.raises(DataError, match=place):
            rows_of(path)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "closed", ["pairs.jsonl", "folder", "folder/pairs.jsonl", "tables/x.arrow"]
)
def test_files_and_folders_without_permission_are_refused(closed: str) -> None:
    with TemporaryDirectory() as base:
        Path(base).chmod(0o755)  # pytest's own folder is closed to others
        path = Path(base, closed)
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if closed == "folder" else path.write_text("{}")
        ask = {"folder": path / "pairs.jsonl", "tables/x.arrow": path.parent}.get(closed, path)
        path.chmod(0)
        with (
            as_nobody(),
            pytest.raises(DataError, match=rf"{path.name}.*: cannot be read \(Permission denied\)"),
        ):
            find_sources(ask)
        path.chmod(0o755)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for text in ("", "[]", " \n", "[ ]\n"):
        (tmp_path / "x").write_text(text)
        assert rows_of(tmp_path / "x") == []


def test_text_of_a_table_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    bad = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    path = write_arrow(tmp_path / "x", pa.record_batch([bad], names=["a"]))
    assert reasons(path) == [(2, "bad_encoding")]


@pytest.mark.defect("X12")
@pytest.mark.parametrize("encoding", ["rot13", "base64", "zlib", "hex", "bz2", "no-such", "a\0b"])
def test_only_text_encodings_are_taken(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "x").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"data_args.encoding: "):
        rows_of(tmp_path / "x", encoding)


@pytest.mark.defect("X12", "X26")
@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("text", ['{"a": "caf\u00e9"}\n', '[{"a": "caf\u00e9"}]'])
def test_wide_text_is_named(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "x").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=rf"data_args\.encoding: {encoding}\."):
        rows_of(tmp_path / "x")
    assert rows_of(tmp_path / "x", encoding) == [(1, {"a": "caf\u00e9"})]


@pytest.mark.defect("X12")
def test_blank_lines_and_spaces_cost_no_time(tmp_path: Path) -> None:
    """A million of them in each of 16 blocks, over which no loop of Python runs."""
    blank = b"\n" * (1 << 20)
    found, numbers = list[Any](), list[int]()
    blocks = [b"{}\n", *[blank] * 16, b" {}\n \n", b" " * 100, b"\n{}\n"]
    assert lines_of(lambda: found.extend(split_lines(blocks))) < 2000
    last = 1 + 16 * (1 << 20) + 1
    assert found == [(1, b"{}"), (last, b" {}"), (last + 3, b"{}")]
    blocks = [b"{}\n", *[b" " * (1 << 20)] * 80, b"\n{}\n"]
    assert lines_of(lambda: numbers.extend(number for number, _ in split_lines(blocks))) < 2000
    assert numbers == [1, 2, 3]


@pytest.mark.defect("X12", "X23")
def test_a_table_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    # 256 texts of 8 MB, stored once: 600 bytes of file for every MB.
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 256), pa.array(["a" * (8 << 20)]))
    pq.write_table(pa.table({"prompt": long}), tmp_path / "x", compression="zstd")
    assert (tmp_path / "x").stat().st_size < 100_000
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match="after 0 take more than 1024 MiB of memory at a time"):
        rows_of(tmp_path / "x")
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


@pytest.mark.defect("X12")
def test_a_gigantic_row_of_a_table_is_dropped(tmp_path: Path) -> None:
    """A hundred million nulls take no bytes in Arrow, but eight each in Python."""
    offsets = pa.array([0, 1, 10**8, 10**8 + 1], pa.int32())
    table = pa.table({"prompt": pa.ListArray.from_arrays(offsets, pa.nulls(10**8 + 1))})
    first, second, third = rows_of(write_arrow(tmp_path / "x", table))
    assert first == (1, {"prompt": [None]})
    assert third == (3, {"prompt": [None]})
    assert (second[0], second[1].reason) == (2, "row_too_large")
