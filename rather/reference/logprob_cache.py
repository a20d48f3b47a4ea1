"""Log-probs of responses on disk, in append-only files of checksummed blocks, and in memory, as
sorted arrays.

A block is one write: a header (magic, number of records, whether they carry token log-probs, size
and checksum of the payload, checksum of the header), then all keys, all sums, all counts and all
token log-probs. What a kill, a full disk or a flipped bit leaves of a block is skipped, and its
records count as unknown.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.data.batch import PairBatch

MAGIC = b"RATHRLP1"
HEADER = struct.Struct("<8sIIQI")  # its own checksum, four bytes more, follows
CHECKSUM = struct.Struct("<I")
RECORD = 16 + 8 + 4  # key, sum, count
KEY_BYTES = 16
RECENT = 65_536  # records that wait in a dict (12 MB) before they are sorted in
UNKNOWN, NEW = -1, -2  # rows of a key that is not known, and of one that is still in the dict

Keys = NDArray[np.uint64]  # [n, 2]


class Records(NamedTuple):
    """Log-probs of responses: the sum over scored tokens in float64, their number and, if kept,
    each one's own.
    """

    keys: Sequence[bytes]
    sums: NDArray[np.float64]
    counts: NDArray[np.uint32]
    tokens: NDArray[np.float32] | None  # of all records, one after another


class Stored(NamedTuple):
    """What the blocks of a file hold. Token log-probs stay there: `places` says where, -1 where
    there are none.
    """

    keys: Keys
    sums: NDArray[np.float64]
    places: NDArray[np.int64]
    damaged: int = 0  # bytes that belong to no whole block

    def only(self, rows: NDArray[np.bool_]) -> Stored:
        return Stored(self.keys[rows], self.sums[rows], self.places[rows])

    @staticmethod
    def unplaced(records: Records) -> Stored:
        """Records that are in no file yet."""
        return Stored(as_keys(records.keys), records.sums, _nowhere(len(records.keys)))

    @staticmethod
    def joined(parts: Sequence[Stored]) -> Stored:
        keys, sums, places, damaged = zip(*parts, strict=True)
        return Stored(
            np.concatenate(keys), np.concatenate(sums), np.concatenate(places), sum(damaged)
        )


class BlockFile:
    """An append-only file of blocks; made when the first one is written. Only one process writes to
    it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._reader: int | None = None

    def append(self, records: Records) -> Stored:
        """Writes one block; returns it as `read` will."""
        descriptor = self._opened()
        block, size = _encoded(records), os.fstat(descriptor).st_size
        done = 0
        try:
            while done < len(block):
                done += os.write(descriptor, block[done:])
        except OSError:
            os.ftruncate(descriptor, size)  # a full disk took the first half
            raise
        places = _nowhere(len(records.keys))
        if records.tokens is not None:
            places = _places(
                size + HEADER.size + CHECKSUM.size + len(records.keys) * RECORD, records.counts
            )
        return Stored(as_keys(records.keys), records.sums, places)

    def read(self) -> Stored:
        """All that is whole in the file; a file that does not exist holds nothing."""
        return _scan(self.path)

    def tokens(self, place: int, count: int) -> NDArray[np.float32]:
        if self._reader is None:
            self._reader = os.open(self.path, os.O_RDONLY)
        data = os.pread(self._reader, 4 * count, place)
        if len(data) < 4 * count:
            raise OSError(f"{self.path}: was cut while it was in use")
        return np.frombuffer(data, "<f4")

    def sync(self) -> None:
        """Down to the disk: what a checkpoint relies on."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._reader):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._reader = None

    def _opened(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        return self._descriptor


def _encoded(records: Records) -> bytes:
    parts = [
        b"".join(records.keys),
        records.sums.astype("<f8").tobytes(),
        records.counts.astype("<u4").tobytes(),
        b"" if records.tokens is None else records.tokens.astype("<f4").tobytes(),
    ]
    payload = b"".join(parts)
    has_tokens = records.tokens is not None
    header = HEADER.pack(MAGIC, len(records.keys), has_tokens, len(payload), zlib.crc32(payload))
    return header + CHECKSUM.pack(zlib.crc32(header)) + payload


def _places(start: int, counts: NDArray[np.uint32]) -> NDArray[np.int64]:
    lengths = 4 * counts.astype(np.int64)
    return start + lengths.cumsum() - lengths


def _nowhere(count: int) -> NDArray[np.int64]:
    return np.full(count, -1, np.int64)


def _scan(path: Path) -> Stored:
    found = [Stored(np.empty((0, 2), np.uint64), np.empty(0), _nowhere(0))]
    size = path.stat().st_size if path.exists() else 0
    whole = 0
    if size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(MAGIC)
            while at >= 0:
                end = _block_end(data, at)
                if end:
                    found.append(_block(data, at))
                    whole += end - at
                at = data.find(MAGIC, end or at + 1)
    return Stored.joined(found)._replace(damaged=size - whole)


def _block_end(data: mmap.mmap, at: int) -> int:
    """Where a whole block ends, 0 for anything else that begins with the magic."""
    start = at + HEADER.size + CHECKSUM.size
    if start > len(data):
        return 0
    header = data[at : at + HEADER.size]
    _, count, _, size, payload_sum = HEADER.unpack(header)
    if CHECKSUM.unpack(data[start - CHECKSUM.size : start])[0] != zlib.crc32(
        header
    ) or start + size > len(data):
        return 0
    with memoryview(data) as view, view[start : start + size] as payload:
        return start + size if count * RECORD <= size and zlib.crc32(payload) == payload_sum else 0


def _block(data: mmap.mmap, at: int) -> Stored:
    _, count, has_tokens, _, _ = HEADER.unpack(data[at : at + HEADER.size])
    start = at + HEADER.size + CHECKSUM.size
    table = data[start : start + count * RECORD]
    keys = np.frombuffer(table, "<u8", 2 * count).reshape(-1, 2)
    sums = np.frombuffer(table, "<f8", count, KEY_BYTES * count)
    counts = np.frombuffer(table, "<u4", count, (KEY_BYTES + 8) * count)
    places = _places(start + count * RECORD, counts) if has_tokens else _nowhere(count)
    return Stored(keys, sums, places)


class Found(NamedTuple):
    rows: NDArray[np.int64]  # UNKNOWN, NEW, or where in the table
    sums: NDArray[np.float64]  # not a number where unknown
    places: NDArray[np.int64]  # of token log-probs; see Table.add


class Table:
    """Key -> sum and the place of token log-probs, for millions of keys: 33 bytes each, 25 where
    places are unused.
    """

    def __init__(self, *, with_places: bool) -> None:
        self.with_places = with_places
        self._high = self._low = np.empty(0, np.uint64)
        self._sums, self._places, self._kept = np.empty(0), _nowhere(0), np.empty(0, bool)
        self._recent: dict[bytes, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._high) + len(self._recent)

    def load(self, stored: Stored, *, kept: bool) -> None:
        """Adds many; a key that is there already stays as it is. `kept`: they are in the run's own
        file.
        """
        keys, sums, places, _ = stored
        high, low = (
            np.concatenate([mine, keys[:, i]]) for i, mine in enumerate((self._high, self._low))
        )
        order = np.argsort(high, kind="stable")  # of equal keys, the one that was there first
        high, low = high[order], low[order]
        new = np.ones(len(order), bool)
        new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._high, self._low, order = high[new], low[new], order[new]
        self._sums = np.concatenate([self._sums, sums])[order]
        self._kept = np.concatenate([self._kept, np.full(len(sums), kept)])[order]
        if self.with_places:
            self._places = np.concatenate([self._places, places])[order]

    def find(self, keys: Sequence[bytes]) -> Found:
        wanted = as_keys(keys)
        rows, sums, places = (
            np.full(len(keys), UNKNOWN, np.int64),
            np.full(len(keys), np.nan),
            _nowhere(len(keys)),
        )
        if len(self._high):
            near = np.minimum(np.searchsorted(self._high, wanted[:, 0]), len(self._high) - 1)
            # Two keys with the same first half (once in 10^7 tables of millions): the second counts
            # as unknown.
            hit = (self._high[near] == wanted[:, 0]) & (self._low[near] == wanted[:, 1])
            rows[hit], sums[hit] = near[hit], self._sums[near[hit]]
            if self.with_places:
                places[hit] = self._places[near[hit]]
        for i in np.flatnonzero(rows == UNKNOWN).tolist():
            if recent := self._recent.get(keys[i]):
                rows[i], (sums[i], places[i]) = NEW, recent
        return Found(rows, sums, places)

    def add(
        self, keys: Sequence[bytes], sums: NDArray[np.float64], places: NDArray[np.int64]
    ) -> None:
        """New ones, which are in the run's own file. Rows that `find` gave before no longer hold."""
        for key, total, place in zip(keys, sums.tolist(), places.tolist(), strict=True):
            self._recent.setdefault(key, (total, place))
        if len(self._recent) >= RECENT:
            waiting = list(self._recent.values())
            totals, where = (
                np.array([total for total, _ in waiting]),
                np.array([place for _, place in waiting]),
            )
            self.load(Stored(as_keys(list(self._recent)), totals, where), kept=True)
            self._recent.clear()

    def unkept(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are known only from elsewhere, not from the run's own file."""
        known = rows >= 0
        known[known] = ~self._kept[rows[known]]
        return known

    def mark_kept(self, rows: NDArray[np.int64]) -> None:
        self._kept[rows] = True


def as_keys(keys: Sequence[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)


Places = NDArray[np.int64]


@dataclass(frozen=True)
class TokenLayout:
    """For every scored token of every computed response: where it lies in the answer, and where it
    counts.
    """

    token: Tensor
    cell: Tensor
    within: Tensor  # 1 within the scored length of the pair's shorter response, else 0

    @staticmethod
    def of(lengths: Places, bins: Sequence[Places], source: Places) -> TokenLayout:
        order = np.concatenate(bins)
        starts = np.zeros(len(lengths), np.int64)
        starts[order] = lengths[order].cumsum() - lengths[order]
        cells = np.sort(order)
        counts = lengths[cells]
        place = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(
            counts
        )  # within its response
        cell = cells.repeat(counts)
        shorter = lengths.reshape(-1, 2).min(axis=1).repeat(2)
        within = (place < shorter[cell]).astype(np.float64)
        return TokenLayout(
            *(torch.from_numpy(x) for x in (starts[source[cell]] + place, cell, within))
        )


def cells_of(batch: PairBatch) -> Places:
    """Which responses of the step a micro-batch holds, in its order: 2 x the pair, + 1 for the
    rejected one.
    """
    return (2 * batch.pair_P.numpy()[:, None] + [0, 1]).reshape(-1)


def token_by_token(batches: Sequence[PairBatch]) -> list[PairBatch]:
    """The same micro-batches with each scored token as a pair of its own, so that its sum is the
    token's log-prob.
    """
    views, start = [], 0
    for batch in batches:
        count = len(batch.cell_T)
        views.append(
            replace(
                batch,
                cell_T=torch.arange(0, 2 * count, 2),
                length_P2=torch.zeros(count, 2, dtype=torch.float64),
                pair_P=torch.arange(start, start + count),
            )
        )
        start += count
    return views


def sum_by_cell(values: Tensor, cell: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, cell, values)
