"""Blocks on disk: complete ones are found despite damage around them, others never used.

Also the table in memory.
"""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from rather.reference import logprob_cache as store
from rather.reference.logprob_cache import (
    MAGIC,
    BlockFile,
    Entries,
    Flags,
    Floats,
    Keys,
    Table,
    block_of,
    entries_of,
    keys_of,
)


def key(number: int) -> bytes:
    return np.random.default_rng(number).bytes(16)


def records(first: int, count: int) -> dict[bytes, float]:
    sums = np.random.default_rng(first).normal(size=count)
    return {key(first + i): float(total) for i, total in enumerate(sums)}


def arrays(sums: dict[bytes, float]) -> tuple[Keys, Floats]:
    return keys_of(b"".join(sums)), np.array(list(sums.values()))


def found(table: Table, keys: Iterable[bytes]) -> tuple[Floats, Flags]:
    return table.get(table.slots(keys_of(b"".join(keys))))


def add(table: Table, sums: dict[bytes, float]) -> None:
    keys, values = arrays(sums)
    table.set(table.slots(keys), values)


def contents(path: Path) -> dict[bytes, float]:
    stored, _ = BlockFile(path).read()
    keys = [row.tobytes() for row in stored["key"]]
    return dict(zip(keys, stored["sum"].tolist(), strict=True))


def write(path: Path, *blocks: dict[bytes, float]) -> BlockFile:
    file = BlockFile(path)
    for block in blocks:
        file.append(block_of(*arrays(block)))
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first, second = records(0, 5), records(100, 7)
    file = write(tmp_path / "a", first, second)
    assert contents(tmp_path / "a") == first | second
    assert file.read()[1] == 0


def test_blocks_of_earlier_versions_with_token_log_probs(tmp_path: Path) -> None:
    """Their sums are read; the token log-probs behind them are skipped."""
    counts = np.array([3, 2], np.uint32)
    tokens = np.ones(5, np.float32)
    payload = key(1) + key(2) + np.array([-1.5, -2.5]).tobytes() + counts.tobytes()
    payload += tokens.tobytes()
    header = struct.pack("<8sIIQI", MAGIC, 2, 1, len(payload), zlib.crc32(payload))
    block = header + struct.pack("<I", zlib.crc32(header)) + payload
    (tmp_path / "a").write_bytes(block)
    write(tmp_path / "a", records(5, 1))
    assert contents(tmp_path / "a") == {key(1): -1.5, key(2): -2.5, **records(5, 1)}
    assert BlockFile(tmp_path / "a").read()[1] == 0


def test_a_file_that_is_not_there_or_is_something_else(tmp_path: Path) -> None:
    assert contents(tmp_path / "missing") == {}
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04" + MAGIC + bytes(range(256)) * 9 + MAGIC)
    assert contents(tmp_path / "foreign") == {}
    assert BlockFile(tmp_path / "foreign").read()[1] == (tmp_path / "foreign").stat().st_size
    (tmp_path / "empty").touch()
    assert contents(tmp_path / "empty") == {}


def test_cut_at_any_byte_the_blocks_before_remain(tmp_path: Path) -> None:
    first, second, later = records(0, 2), records(10, 3), records(20, 1)
    write(tmp_path / "a", first)
    start = (tmp_path / "a").stat().st_size
    write(tmp_path / "a", second)
    data = (tmp_path / "a").read_bytes()
    for end in range(start, len(data)):
        (tmp_path / "b").write_bytes(data[:end])
        assert contents(tmp_path / "b") == first
        write(tmp_path / "b", later)  # a torn tail does not hide what is written after it
        assert contents(tmp_path / "b") == first | later


def test_any_flipped_bit_costs_its_own_block_and_is_never_used(tmp_path: Path) -> None:
    blocks = [records(10 * i, 2) for i in range(3)]
    write(tmp_path / "a", *blocks)
    data = (tmp_path / "a").read_bytes()
    sums = blocks[0] | blocks[1] | blocks[2]
    for at in range(len(data)):
        (tmp_path / "b").write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        stored = contents(tmp_path / "b")
        assert len(stored) == 4
        assert all(sums[k] == total for k, total in stored.items())


def test_a_key_that_looks_like_a_beginning(tmp_path: Path) -> None:
    write(tmp_path / "a", {MAGIC + MAGIC: 1.0, key(1): 1.0}, records(5, 1))
    data = (tmp_path / "a").read_bytes()
    assert len(contents(tmp_path / "a")) == 3
    (tmp_path / "b").write_bytes(b"x" + data[1:])
    assert contents(tmp_path / "b") == records(5, 1)


def test_a_full_disk_leaves_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a", records(0, 3))
    size = (tmp_path / "a").stat().st_size
    really, calls = os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return really(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append(block_of(*arrays(records(9, 3))))
    assert (tmp_path / "a").stat().st_size == size


# --- the table ---


def entries(sums: dict[int, float], kept: bool = False) -> Entries:
    keys = b"".join(key(number) for number in sums)
    return entries_of(keys_of(keys), np.array(list(sums.values()), float), kept)


def loaded(count: int) -> Table:
    table = Table()
    table.load(entries({i: float(i) for i in range(count)}))
    return table


def test_a_table_finds_what_it_holds_and_nothing_else() -> None:
    table = loaded(500)
    sums, _ = found(table, [key(i) for i in (499, 3, 777, 0)])
    assert sums.tolist()[:2] + sums.tolist()[3:] == [499, 3, 0]
    assert np.isnan(sums[2])
    halves = np.frombuffer(key(3), "<u8").copy()
    halves[1] += 1
    assert np.isnan(found(table, [halves.tobytes()])[0]).all()
    assert np.isnan(found(Table(), [key(1)])[0]).all()


def test_the_first_value_of_a_key_stays() -> None:
    table = loaded(5)
    table.load(np.concatenate([entries({4: -1.0, 9: -2.0}), entries({9: -3.0})]))
    add(table, {key(8): -4.0})
    add(table, {key(8): -5.0})
    assert found(table, [key(i) for i in (4, 9, 8)])[0].tolist() == [4, -2, -4]
    assert table._used == 7


def test_new_ones_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RECENT", 8)
    table, keys = Table(), [key(i) for i in range(50)]
    for i in range(0, 50, 3):
        add(table, {keys[j]: float(j) for j in range(i, min(i + 3, 50))})
        sums, _ = found(table, keys[: i + 3])
        assert sums.tolist() == list(range(len(sums)))
    assert len(table._recent.high) < 8


def test_equal_keys_share_a_slot_and_half_equal_ones_do_not() -> None:
    one, other = np.frombuffer(key(3), "<u8"), np.frombuffer(key(3), "<u8").copy()
    other[1] += 1
    table = Table()
    slots = table.slots(np.stack([one, other, one, other]))
    assert slots[0] == slots[2]
    assert len({*slots.tolist()[:2], slots[3]}) > 1
    table.set(slots[:2], np.array([1.0, 2.0]))
    sums = found(table, [one.tobytes(), other.tobytes()])[0]
    assert sums[0] == 1
    assert np.isnan(sums[1])
    assert table.keys(slots).tolist() == [one.tolist(), other.tolist()] * 2


@pytest.mark.parametrize("recent", [2, 8])
def test_it_knows_which_entries_the_run_stored(
    monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(store, "RECENT", recent)
    table = loaded(3)
    table.load(entries({5: 5.0}, kept=True))
    add(table, {key(7): 7.0, key(1): 1.0})
    sums, kept = found(table, [key(i) for i in (0, 1, 5, 7, 9)])
    assert sums.tolist()[:4] == [0, 1, 5, 7]
    assert kept.tolist() == [False, True, True, True, False]


def test_a_million_pairs_fit_into_75_megabytes() -> None:
    random, count = np.random.default_rng(0), 100_000
    stored = entries_of(keys_of(random.bytes(16 * count)), random.normal(size=count), False)
    table = Table()
    tracemalloc.start()
    try:
        table.load(stored)
        assert tracemalloc.get_traced_memory()[0] * 2_000_000 / count <= 75e6
    finally:
        tracemalloc.stop()
    assert table._used == count
