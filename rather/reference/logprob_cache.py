"""Log-probs of responses on disk, in append-only files of checksummed blocks, and in memory.

A block is one write: a header, then all keys and all sums. A block that a kill, a full disk or a
flipped bit has damaged is skipped; its records count as unknown.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rather.files import Opener, own

MAGIC = b"RATHRLP1"
# Magic, number of records, 0, size and checksum of the payload; then the checksum of these.
HEADER = struct.Struct("<8sIIQI")
CHECKSUM = struct.Struct("<I")
RECORD = 16 + 8 + 4  # bytes of key and sum, and 4 that are unused
RECENT = 65_536  # entries that wait in a table of their own before they are sorted in


Keys = NDArray[np.uint64]  # [entries, 2]: both halves
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Entries(NamedTuple):
    """Known keys as columns: both halves, the sum, and whether the run's own file has it."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    sums: Floats
    kept: Flags

    @staticmethod
    def of(keys: Keys, sums: Floats, kept: bool) -> Entries:
        return Entries(keys[:, 0], keys[:, 1], sums, np.full(len(sums), kept))

    @staticmethod
    def concat(parts: Sequence[Entries]) -> Entries:
        return Entries(*map(np.concatenate, zip(*parts, strict=True)))

    def at(self, rows: Flags | NDArray[np.int64]) -> Entries:
        return Entries(self.high[rows], self.low[rows], self.sums[rows], self.kept[rows])


    def without_repeats(self) -> Entries:
        """Return them sorted by the first half; of equal keys, the first one stays."""
        found = self.at(np.argsort(self.high, kind="stable"))
        is_new = np.ones(len(found.high), bool)
        is_new[1:] = (np.diff(found.high) != 0) | (np.diff(found.low) != 0)
        return found.at(is_new)


def keys_of(data: bytes) -> Keys:
    return np.frombuffer(data, "<u8").reshape(-1, 2)


NO_ENTRIES = Entries.of(keys_of(b""), np.empty(0), False)


class BlockFile:
    """An append-only file of blocks, to which only one process writes."""

    def __init__(self, path: Path, opener: Opener = own) -> None:
        self.path, self._opener = path, opener

    @cached_property
    def _descriptor(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def append(self, keys: Keys, sums: Floats) -> None:
        """Write one block."""
        payload = keys.astype("<u8").tobytes() + sums.astype("<f8").tobytes()
        payload += bytes(len(sums) * RECORD - len(payload))
        header = HEADER.pack(MAGIC, len(sums), 0, len(payload), zlib.crc32(payload))
        block = header + CHECKSUM.pack(zlib.crc32(header)) + payload
        size, done = os.fstat(self._descriptor).st_size, 0
        try:
            while done < len(block):
                done += os.write(self._descriptor, block[done:])
        except OSError:
            os.ftruncate(self._descriptor, size)  # a full disk took the first half
            raise

    def read(self, *, kept: bool = False) -> tuple[Entries, int]:
        """Return all records, and the number of bytes that belong to no whole block."""
        found, damaged = [NO_ENTRIES], self.path.stat().st_size if self.path.exists() else 0
        if not damaged:
            return NO_ENTRIES, 0
        with open(self.path, "rb", opener=self._opener) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with data:
            at = data.find(MAGIC)
            while at >= 0:
                end = at + 1
                if block := _block_at(data, at):
                    count, payload, end = block
                    keys, sums = payload[: 16 * count], payload[16 * count : 24 * count]
                    found.append(Entries.of(keys_of(keys), np.frombuffer(sums, "<f8"), kept))
                    damaged -= end - at
                at = data.find(MAGIC, end)
        return Entries.concat(found), damaged

    def sync(self) -> None:
        """Wait until all blocks are on the disk: a checkpoint relies on them."""
        if "_descriptor" in vars(self):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if (descriptor := vars(self).pop("_descriptor", None)) is not None:
            os.close(descriptor)


def _block_at(data: mmap.mmap, at: int) -> tuple[int, bytes, int] | None:
    """Return number of records, payload and end of a whole block."""
    start = at + HEADER.size + CHECKSUM.size
    header, checksum = data[at : at + HEADER.size], data[at + HEADER.size : start]
    if checksum != CHECKSUM.pack(zlib.crc32(header)):
        return None
    # Earlier versions wrote token log-probs behind the records, which are skipped.
    _, count, _, size, payload_sum = HEADER.unpack(header)
    payload = data[start : start + size]
    is_whole = len(payload) == size and zlib.crc32(payload) == payload_sum
    return (count, payload, start + size) if is_whole and count * RECORD <= size else None


class Table:
    """Key -> sum, for millions of keys: 25 bytes each, sorted by the first half of the key."""

    def __init__(self) -> None:
        self._sorted = self._recent = NO_ENTRIES

    def __len__(self) -> int:
        return len(self._sorted.high) + len(self._recent.high)

    def load(self, entries: Entries) -> None:
        """Add many entries; a key that exists keeps its value."""
        self._sorted = Entries.concat([self._sorted, entries]).without_repeats()

    def find(self, keys: Keys) -> tuple[Floats, Flags]:
        """Return the sums of keys (NaN if unknown), and whether the run's own file has them."""
        high, low, sums, kept = Entries.of(keys, np.full(len(keys), np.nan), False)
        for table in (self._sorted, self._recent):
            if known := len(table.high):
                near = np.minimum(np.searchsorted(table.high, high), known - 1)
                # Of two keys with the same first half (once in 10^7 tables), the second is unknown.
                hit = (table.high[near] == high) & (table.low[near] == low)
                sums[hit], kept[hit] = table.sums[near[hit]], table.kept[near[hit]]
        return sums, kept

    def add(self, keys: Keys, sums: Floats) -> None:
        """Add values of the run's own file, which take precedence over those of other files."""
        new = Entries.of(keys, sums, True)
        self._recent = Entries.concat([self._recent, new]).without_repeats()
        if len(self._recent.high) >= RECENT:
            self._sorted = Entries.concat([self._recent, self._sorted]).without_repeats()
            self._recent = NO_ENTRIES
