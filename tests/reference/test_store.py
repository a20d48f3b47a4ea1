"""Blocks on disk: whole ones are found whatever happened around them, others are never used. The table in memory."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rather.reference import logprob_cache as store
from rather.reference.logprob_cache import (
    MAGIC,
    NEW,
    UNKNOWN,
    BlockFile,
    Records,
    Stored,
    Table,
    as_keys,
)


def key(number: int) -> bytes:
    return np.random.default_rng(number).bytes(16)


def records(first: int, count: int, *, tokens: bool) -> Records:
    random = np.random.default_rng(first)
    counts = random.integers(0, 9, count).astype(np.uint32)
    values = random.normal(size=int(counts.sum())).astype(np.float32) if tokens else None
    return Records(
        [key(first + i) for i in range(count)], random.normal(size=count), counts, values
    )


def contents(path: Path) -> dict[bytes, float]:
    stored = BlockFile(path).read()
    return dict(zip([row.tobytes() for row in stored.keys], stored.sums.tolist(), strict=True))


def expected(*blocks: Records) -> dict[bytes, float]:
    return {
        k: total
        for block in blocks
        for k, total in zip(block.keys, block.sums.tolist(), strict=True)
    }


def written(path: Path, *blocks: Records) -> BlockFile:
    file = BlockFile(path)
    for block in blocks:
        file.append(block)
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plain, with_tokens = records(0, 5, tokens=False), records(100, 7, tokens=True)
    file = written(tmp_path / "a", plain, with_tokens)
    assert contents(tmp_path / "a") == expected(plain, with_tokens)
    stored = file.read()
    assert stored.damaged == 0
    assert (stored.places[:5] == -1).all()
    assert with_tokens.tokens is not None
    start = 0
    for place, count in zip(stored.places[5:].tolist(), with_tokens.counts.tolist(), strict=True):
        assert np.array_equal(file.tokens(place, count), with_tokens.tokens[start : start + count])
        start += count


def test_a_file_that_is_not_there_or_is_something_else(tmp_path: Path) -> None:
    assert contents(tmp_path / "missing") == {}
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04" + MAGIC + bytes(range(256)) * 9 + MAGIC)
    assert contents(tmp_path / "foreign") == {}
    assert BlockFile(tmp_path / "foreign").read().damaged == (tmp_path / "foreign").stat().st_size
    (tmp_path / "empty").touch()
    assert contents(tmp_path / "empty") == {}


def test_cut_at_any_byte_the_blocks_before_remain(tmp_path: Path) -> None:
    first, second = records(0, 2, tokens=True), records(10, 3, tokens=True)
    written(tmp_path / "a", first)
    start = (tmp_path / "a").stat().st_size
    written(tmp_path / "a", second)
    data = (tmp_path / "a").read_bytes()
    for end in range(start, len(data)):
        (tmp_path / "b").write_bytes(data[:end])
        assert contents(tmp_path / "b") == expected(first)
        later = records(20, 1, tokens=False)
        written(tmp_path / "b", later)  # a torn tail does not hide what is written after it
        assert contents(tmp_path / "b") == expected(first, later)


def test_any_flipped_bit_costs_its_own_block_and_is_never_used(tmp_path: Path) -> None:
    blocks = [records(10 * i, 2, tokens=i == 1) for i in range(3)]
    written(tmp_path / "a", *blocks)
    data = (tmp_path / "a").read_bytes()
    sums = expected(*blocks)
    for at in range(len(data)):
        (tmp_path / "b").write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        found = contents(tmp_path / "b")
        assert len(found) == 4
        assert all(sums[k] == total for k, total in found.items())


def test_a_key_that_looks_like_a_beginning(tmp_path: Path) -> None:
    block = Records([MAGIC + MAGIC, key(1)], np.ones(2), np.zeros(2, np.uint32), None)
    written(tmp_path / "a", block, records(5, 1, tokens=False))
    data = (tmp_path / "a").read_bytes()
    assert len(contents(tmp_path / "a")) == 3
    (tmp_path / "b").write_bytes(b"x" + data[1:])
    assert contents(tmp_path / "b") == expected(records(5, 1, tokens=False))


def test_a_full_disk_leaves_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = records(0, 3, tokens=False)
    file = written(tmp_path / "a", block)
    size = (tmp_path / "a").stat().st_size
    really, calls = os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return really(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append(records(9, 3, tokens=False))
    assert (tmp_path / "a").stat().st_size == size


# --- the table ---


def loaded(count: int, first: int = 0, *, kept: bool = False) -> Table:
    table = Table(with_places=True)
    keys = as_keys([key(first + i) for i in range(count)])
    table.load(Stored(keys, np.arange(count, dtype=float), 10 * np.arange(count)), kept=kept)
    return table


def test_a_table_finds_what_it_holds_and_nothing_else() -> None:
    table = loaded(500)
    found = table.find([key(i) for i in (499, 3, 777, 0)])
    assert found.sums.tolist()[:2] + found.sums.tolist()[3:] == [499, 3, 0]
    assert found.places.tolist() == [4990, 30, -1, 0]
    assert found.rows[2] == UNKNOWN
    assert np.isnan(found.sums[2])
    halves = np.frombuffer(key(3), "<u8").copy()
    halves[1] += 1
    assert table.find([halves.tobytes()]).rows.tolist() == [UNKNOWN]
    assert Table(with_places=False).find([key(1)]).rows.tolist() == [UNKNOWN]


def test_the_first_value_of_a_key_stays() -> None:
    table = loaded(5)
    table.load(
        Stored(
            as_keys([key(4), key(9), key(9)]), np.array([-1.0, -2.0, -3.0]), np.zeros(3, np.int64)
        ),
        kept=True,
    )
    table.add([key(8), key(8)], np.array([-4.0, -5.0]), np.zeros(2, np.int64))
    assert table.find([key(i) for i in (4, 9, 8)]).sums.tolist() == [4, -2, -4]
    assert len(table) == 7


def test_new_ones_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RECENT", 8)
    table, keys = Table(with_places=True), [key(i) for i in range(50)]
    for i in range(0, 50, 3):
        part = np.arange(i, min(i + 3, 50))
        table.add(keys[i : i + 3], part.astype(float), part)
        known = table.find(keys[: i + 3])
        assert known.sums.tolist() == list(range(len(known.sums)))
        assert known.places.tolist() == list(range(len(known.sums)))
    assert set(table.find(keys).rows.tolist()) > {NEW}


def test_it_knows_what_the_run_has_kept() -> None:
    table = loaded(3, kept=False)
    table.add([key(7)], np.ones(1), np.zeros(1, np.int64))
    rows = table.find([key(i) for i in (0, 1, 7, 9)]).rows
    assert table.unkept(rows).tolist() == [True, True, False, False]
    table.mark_kept(rows[:1])
    assert table.unkept(rows).tolist() == [False, True, False, False]


def test_a_million_pairs_fit_into_sixty_megabytes() -> None:
    random, count = np.random.default_rng(0), 100_000
    stored = Stored(
        random.integers(0, 2**63, (count, 2)).astype(np.uint64),
        random.normal(size=count),
        np.zeros(0),
    )
    table = Table(with_places=False)
    tracemalloc.start()
    try:
        table.load(stored, kept=False)
        assert tracemalloc.get_traced_memory()[0] * 2_000_000 / count <= 60e6
    finally:
        tracemalloc.stop()
    assert len(table) == count
