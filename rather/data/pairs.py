"""Tokenised pairs in a memory-mapped Arrow file: any pair is a few slices away, and nothing is loaded beforehand.

pyarrow alone, without the `datasets` library: what is needed here is one file, rows by number, and memory that does
not grow with them; `datasets` adds its own cache and fingerprints, a second of import, and a copy of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rather.data.batch import Span, TokenPair

Part = tuple[int, int, float]  # first row, end row, mixing weight
LISTS = ("prompt", "chosen", "rejected", "chosen_scored", "rejected_scored")


class Lists(NamedTuple):
    """A list column of one record batch: row i is values[offsets[i]:offsets[i + 1]]."""

    offsets: NDArray[np.int32]
    values: NDArray[np.int32]

    def row(self, i: int) -> NDArray[np.int32]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def rows(self, some: NDArray[np.int64]) -> NDArray[np.int32]:
        """Several rows, one after another."""
        if len(some) == some[-1] - some[0] + 1:
            return self.values[self.offsets[some[0]] : self.offsets[some[-1] + 1]]
        sizes = (self.offsets[some + 1] - self.offsets[some]).astype(np.int64)
        starts = np.repeat(self.offsets[some] - (np.cumsum(sizes) - sizes), sizes)
        return np.asarray(self.values[starts + np.arange(sizes.sum())])


class _Batch:
    """A record batch as numpy views."""

    def __init__(self, batch: Any) -> None:
        self.lists = {name: _lists(batch.column(name)) for name in LISTS}
        self.weight: NDArray[np.float64] = batch.column("weight").to_numpy()
        self.margin: NDArray[np.float64] = batch.column("margin").to_numpy()
        self.soft_label: NDArray[np.float64] = batch.column("soft_label").to_numpy()
        self.ids = batch.column("id")


def _lists(column: Any) -> Lists:
    return Lists(column.offsets.to_numpy(), column.values.to_numpy())


class PairFile:
    """The Arrow file itself. Raises OSError or ArrowInvalid when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = pa.ipc.open_file(pa.memory_map(str(path)))
        counts = [self.reader.get_batch(i).num_rows for i in range(self.reader.num_record_batches)]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.batches: dict[int, _Batch] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def batch(self, i: int) -> _Batch:
        if i not in self.batches:
            self.batches[i] = _Batch(self.reader.get_batch(i))
        return self.batches[i]

    def column(self, name: str) -> NDArray[Any]:
        """A whole column of numbers."""
        parts = [
            self.reader.get_batch(i).column(name).to_numpy()
            for i in range(self.reader.num_record_batches)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def begins_a_row(self) -> NDArray[np.bool_]:
        """Of each pair, whether it is the first of its row in the data files."""
        parts: list[NDArray[np.bool_]] = []
        before: list[Any] = [None, None]
        for i in range(self.reader.num_record_batches):
            batch = self.reader.get_batch(i)
            begins = np.zeros(batch.num_rows, bool)
            for place, name in enumerate(("source", "number")):
                values = batch.column(name).to_numpy()
                begins[1:] |= values[1:] != values[:-1]
                begins[:1] |= values[:1] != before[place]
                before[place] = values[-1] if len(values) else before[place]
            parts.append(begins)
        return np.concatenate(parts) if parts else np.empty(0, bool)

    def lengths(self, name: str) -> NDArray[np.int32]:
        """How long each row of a list column is."""
        parts = [
            np.diff(self.batch(i).lists[name].offsets)
            for i in range(self.reader.num_record_batches)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


class PairDataset:
    """Some or all pairs of a file, in the order of the data files."""

    def __init__(
        self,
        file: PairFile,
        fingerprint: str,
        parts: Sequence[Part],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.file, self.fingerprint, self.rows = file, fingerprint, rows
        self.parts: tuple[Part, ...] = tuple(parts)

    def __len__(self) -> int:
        return len(self.file) if self.rows is None else len(self.rows)

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """What each pair costs in a micro-batch: prompt once, both answers."""
        total = sum(
            (self.file.lengths(name).astype(np.int64) for name in ("prompt", "chosen", "rejected")),
            np.int64(0),
        )
        return np.asarray(self._of_rows(np.atleast_1d(total)))

    @cached_property
    def groups(self) -> NDArray[np.int64] | None:
        """The first pair of each row of the data files that gave any; None where none gave more than one."""
        begins = self.file.begins_a_row()
        if self.rows is not None:
            begins = np.diff(np.cumsum(begins, dtype=np.int32)[self.rows], prepend=-1) != 0
        return None if begins.all() else np.flatnonzero(begins)

    def take(self, indices: Iterable[int] | NDArray[np.int64]) -> list[TokenPair]:
        wanted = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices), np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a set of {len(self)}")
        rows = wanted if self.rows is None else self.rows[wanted]
        batches = np.searchsorted(self.file.starts, rows, side="right") - 1
        return [
            _pair(self.file.batch(batch), int(row - self.file.starts[batch]))
            for batch, row in zip(batches.tolist(), rows.tolist(), strict=True)
        ]

    def column(self, name: str) -> NDArray[Any]:
        return self._of_rows(self.file.column(name))

    def tokens_of(
        self, name: str, some: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """A list column of these (ascending) pairs: all values, and where each pair's begin; one more is the end."""
        rows = some if self.rows is None else self.rows[some]
        cuts = np.searchsorted(rows, self.file.starts)
        values, sizes = [np.empty(0, np.int32)], [np.zeros(1, np.int64)]
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            local = rows[cuts[number] : cuts[number + 1]] - self.file.starts[number]
            lists = self.file.batch(number).lists[name]
            values.append(lists.rows(local))
            sizes.append((lists.offsets[local + 1] - lists.offsets[local]).astype(np.int64))
        return np.concatenate(values), np.cumsum(np.concatenate(sizes))

    def lengths(self, name: str) -> NDArray[np.int32]:
        return self._of_rows(self.file.lengths(name))

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the file."""
        batches = [self.file.batch(i) for i in range(self.file.reader.num_record_batches)]
        columns = [
            batch.lists[name].values
            for batch in batches
            for name in ("prompt", "chosen", "rejected")
        ]
        return max((int(column.max()) for column in columns if len(column)), default=0)

    def _of_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.rows is None else values[self.rows]

    def subset(self, rows: NDArray[np.int64], fingerprint: str) -> PairDataset:
        """The rows with these (ascending) numbers."""
        parts = [
            (int(np.searchsorted(rows, start)), int(np.searchsorted(rows, stop)), weight)
            for start, stop, weight in self.parts
        ]
        return PairDataset(self.file, fingerprint, parts, rows)


def _pair(batch: _Batch, i: int) -> TokenPair:
    from rather.data.batch import TokenPair  # here, because only who takes pairs needs torch

    prompt, chosen, rejected, chosen_scored, rejected_scored = (
        batch.lists[name].row(i) for name in LISTS
    )
    return TokenPair(
        prompt,
        chosen,
        rejected,
        _spans(chosen_scored),
        _spans(rejected_scored),
        float(batch.weight[i]),
        float(batch.margin[i]),
        float(batch.soft_label[i]),
        batch.ids[i].as_py(),
    )


def _spans(flat: NDArray[np.int32]) -> tuple[Span, ...]:
    places = flat.tolist()
    return tuple(zip(places[::2], places[1::2], strict=True))
