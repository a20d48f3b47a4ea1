"""Log-probs of responses on disk, in append-only files of checksummed blocks, and in memory.

A block is one write: a header, then all keys and all sums. A block that a kill, a full disk or a
flipped bit has damaged is skipped; its records count as unknown.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import threading
import zlib
from dataclasses import dataclass
from functools import cached_property
from grp import getgrgid
from pathlib import Path
from pwd import getpwuid
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rather.errors import ConfigError
from rather.files import append_whole, own

MAGIC = b"RATHRLP1"
# Magic, number of records, 0, size and checksum of the payload; then the checksum of these.
HEADER = struct.Struct("<8sIIQI")
CHECKSUM = struct.Struct("<I")
RECORD = 16 + 8 + 4  # bytes of key and sum, and 4 that are unused
RECENT = 65_536  # keys that wait in an index of their own before they are sorted in


Keys = NDArray[np.uint64]  # [entries, 2]: both halves
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Slots = NDArray[np.int64]
Entries = NDArray[Any]  # of ENTRY
# Both halves of a key, the sum, and whether the run's own file has it.
ENTRY = np.dtype([("key", "<u8", 2), ("sum", "<f8"), ("kept", "?")])
NO_ENTRIES = np.empty(0, ENTRY)


def refuse_foreign(path: Path, key: str = "reference.cache.path") -> None:
    """Refuse a folder or a file of a cache that another user can write, or has written.

    Whoever writes log-probs of the reference decides what is trained, and whoever writes verdicts
    which model is better. Root is trusted, and so is
    a group that has the user's name and no other member: many systems let it write by default.
    """
    if not os.path.lexists(path):  # it will be made
        return
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a link to what may be changed by other users"
    elif status.st_uid not in (0, os.geteuid()):
        problem = f"belongs to another user ({status.st_uid})"
    elif mode & 0o002 or (mode & 0o020 and not _is_private(status.st_gid)):
        problem = f"can be written by other users (mode {mode:03o})"
    else:
        return
    raise ConfigError(
        f"{key}: {path} {problem}, who would decide the result; remove their access (chmod -R "
        "go-w), or copy it to a folder of your own. Share a cache that root owns and only root can "
        "write."
    )


def _is_private(group: int) -> bool:
    """Return whether a group is the user's own and has no other member."""
    try:
        name = getpwuid(os.geteuid()).pw_name
        entry = getgrgid(group)
    except KeyError:  # a container may have no names
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}


class Index(NamedTuple):
    """The first halves of keys, sorted, and their slots."""

    high: NDArray[np.uint64]
    slot: NDArray[np.int32]

    def merged(self, other: Index) -> Index:
        high = np.concatenate([self.high, other.high])
        order = np.argsort(high, kind="stable")
        return Index(high[order], np.concatenate([self.slot, other.slot])[order])


def keys_of(data: bytes) -> Keys:
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def entries_of(keys: Keys, sums: Floats, kept: bool) -> Entries:
    entries = np.empty(len(sums), ENTRY)
    entries["key"] = keys
    entries["sum"] = sums
    entries["kept"] = kept
    return entries


NO_INDEX = Index(np.empty(0, "<u8"), np.empty(0, np.int32))


@dataclass(eq=False)
class BlockFile:
    """An append-only file of blocks, to which only one process writes."""

    path: Path

    @cached_property
    def _descriptor(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def append(self, block: bytes) -> None:
        """Write one block, or several."""
        append_whole(self._descriptor, block)

    def read(self, *, kept: bool = False) -> tuple[Entries, int]:
        """Return all records, and the number of bytes that belong to no whole block."""
        blocks = [NO_ENTRIES]
        damaged = self.path.stat().st_size if self.path.exists() else 0
        if not damaged:
            return NO_ENTRIES, 0
        with open(self.path, "rb", opener=own) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with content:
            at = content.find(MAGIC)
            while at >= 0:
                end = at + 1
                if block := _block_at(content, at):
                    count, payload, end = block
                    keys = payload[: 16 * count]
                    sums = payload[16 * count : 24 * count]
                    blocks.append(entries_of(keys_of(keys), np.frombuffer(sums, "<f8"), kept))
                    damaged -= end - at
                at = content.find(MAGIC, end)
        return np.concatenate(blocks), damaged

    def sync(self) -> None:
        """Wait until all blocks are on the disk: a checkpoint relies on them."""
        if "_descriptor" in vars(self):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if (descriptor := vars(self).pop("_descriptor", None)) is not None:
            os.close(descriptor)


def block_of(keys: Keys, sums: Floats) -> bytes:
    unused = bytes(len(sums) * (RECORD - 16 - 8))
    payload = b"".join([keys.astype("<u8").data, sums.astype("<f8").data, unused])
    header = HEADER.pack(MAGIC, len(sums), 0, len(payload), zlib.crc32(payload))
    return b"".join([header, CHECKSUM.pack(zlib.crc32(header)), payload])


def _block_at(data: mmap.mmap, at: int) -> tuple[int, bytes, int] | None:
    """Return number of records, payload and end of a whole block."""
    start = at + HEADER.size + CHECKSUM.size
    header = data[at : at + HEADER.size]
    checksum = data[at + HEADER.size : start]
    if checksum != CHECKSUM.pack(zlib.crc32(header)):
        return None
    # Earlier versions wrote token log-probs behind the records, which are skipped.
    _, count, _, size, payload_sum = HEADER.unpack(header)
    payload = data[start : start + size]
    is_whole = len(payload) == size and zlib.crc32(payload) == payload_sum
    return (count, payload, start + size) if is_whole and count * RECORD <= size else None


class Table:
    """Key -> sum, for millions of keys: 37 bytes each. Threads may share it.

    A key has a slot: whoever asks for it often finds it once, and then takes values by its number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0
        self._entries = NO_ENTRIES  # by slot, with room for more
        self._sorted = self._recent = NO_INDEX

    def load(self, entries: Entries) -> None:
        """Add many entries; a key that has a value keeps it, the first of several."""
        slots = self.slots(entries["key"])
        is_new = np.isnan(self._entries["sum"][slots])
        # Of what is assigned twice, the last one stays.
        self._entries[slots[is_new][::-1]] = entries[is_new][::-1]

    def slots(self, keys: Keys) -> Slots:
        """Return the slot of each key. That of a new key has no value yet."""
        with self._lock:
            slots = np.full(len(keys), -1)
            for index in (self._sorted, self._recent):
                if size := len(index.high):
                    nearest = np.minimum(np.searchsorted(index.high, keys[:, 0]), size - 1)
                    near = index.slot[nearest]
                    # Of two keys with the same first half (once in 10^7 tables), the second is new.
                    hit = (self._entries["key"][near] == keys).all(axis=1)
                    slots[hit] = near[hit]
            if (new := slots < 0).any():
                slots[new] = self._add(keys[new])
            return slots

    def _add(self, keys: Keys) -> Slots:
        """Give each new key a slot, and equal keys the same one; return the slots."""
        unique_keys, index_of_key = _unique(keys)
        begin, self._used = self._used, self._used + len(unique_keys)
        if self._used > len(self._entries):
            empty = np.zeros(max(self._used, RECENT), ENTRY)  # at least as much again
            empty["sum"] = np.nan
            self._entries = np.concatenate([self._entries, empty])
        self._entries["key"][begin : self._used] = unique_keys
        slots = np.arange(begin, self._used, dtype=np.int32)
        self._recent = self._recent.merged(Index(unique_keys[:, 0], slots))
        if len(self._recent.high) >= RECENT:
            self._sorted, self._recent = self._sorted.merged(self._recent), NO_INDEX
        return begin + index_of_key

    def get(self, slots: Slots) -> tuple[Floats, Flags]:
        """Return the sums (NaN if unknown), and whether the run's own file has them."""
        with self._lock:
            return self._entries["sum"][slots], self._entries["kept"][slots]

    def keys(self, slots: Slots) -> Keys:
        with self._lock:
            return np.asarray(self._entries["key"][slots])

    def set(self, slots: Slots, sums: Floats) -> None:
        """Set values of the run's own file, which replace those of other files."""
        with self._lock:
            is_free = ~self._entries["kept"][slots]
            self._entries["sum"][slots[is_free]] = sums[is_free]
            self._entries["kept"][slots] = True


def _unique(keys: Keys) -> tuple[Keys, Slots]:
    """Return the different keys in the order of their first occurrence, and the index of each key.

    Only the first halves are sorted. A key whose first half occurred before in another key counts
    as new, even if it occurs twice.
    """
    _, first, group = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    same_half = first[group]  # the first key that begins with the same half
    is_repeat = (keys[same_half] == keys).all(axis=1)
    first_equal = np.where(is_repeat, same_half, np.arange(len(keys)))
    unique, index_of_key = np.unique(first_equal, return_inverse=True)
    return keys[unique], index_of_key


def first_places(slots: Slots) -> Slots | None:
    """Return for each slot the place where it occurs first; None if no slot occurs twice."""
    ordered = np.sort(slots)
    if (ordered[1:] != ordered[:-1]).all():
        return None
    _, first, source = np.unique(slots, return_index=True, return_inverse=True)
    return np.asarray(first[source])
