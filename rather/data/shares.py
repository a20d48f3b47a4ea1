"""Micro-batches that are named by numbers: each rank reads and packs its own share of a step.

What a step consists of follows from its number, the data files and the sizes of a micro-batch. So
the ranks of a reference apart are sent a few numbers, however many pairs and tokens there are.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.arithmetic import ceil_div
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.pack import empty_batch, plan_bins
from rather.data.pairs import PairDataset
from rather.data.sampler import Order, PicklesFields
from rather.errors import ConfigError

Flags = NDArray[np.bool_]
TRAIN = "train"  # the set that steps are made of; evaluation sets have the prefix "eval/"


@dataclass(frozen=True)
class RunPairs:
    """All pairs of a run, by set. Pickled, it names their files."""

    sets: Mapping[str, PairDataset]
    order: Order

    def check_files(self) -> None:
        """Raise ConfigError if this machine cannot read the files."""
        for dataset in self.sets.values():
            try:
                len(dataset.file)
            except OSError as error:
                raise ConfigError(
                    f"data_args.cache_dir: {socket.gethostname()} cannot read {dataset.file.path} "
                    f"({error.strerror or error}), and every rank reads its own pairs. Name a "
                    "folder of a network file system that is mounted on all machines."
                ) from error


@dataclass(frozen=True, eq=False)
class PairRows(PicklesFields, Sequence[TokenPair]):
    """Pairs of a set, read when they are needed: some rows, or those of a step (from 1)."""

    name: str
    which: int | NDArray[Any]
    source: RunPairs | None = None  # None in a process that has just received it

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"source": None}

    @property
    def dataset(self) -> PairDataset:
        assert self.source is not None
        return self.source.sets[self.name]

    @cached_property
    def rows(self) -> NDArray[Any]:
        assert self.source is not None
        which = self.which
        return self.source.order.step(which - 1) if isinstance(which, int) else which

    @cached_property
    def taken(self) -> list[TokenPair]:
        return self.dataset.take(self.rows)

    @cached_property
    def tokens(self) -> int:
        return int(self.dataset.tokens[self.rows].sum())

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        return np.asarray(self.dataset.digests[self.rows])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of scored tokens of chosen and rejected, [pairs, 2]."""
        return np.asarray(self.dataset.scored[self.rows])

    def read_numbers(self) -> None:
        """Read what a step needs besides tokens, before it is needed; may run in another thread."""
        for name in ("tokens", "digests", "lengths"):
            getattr(self, name)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.taken[index]


@dataclass(frozen=True)
class Share:
    """The micro-batches of one rank, and what is known of the pairs of all ranks."""

    batches: Sequence[PairBatch]
    facts: PairFacts  # of all pairs of the step
    count: int  # of log-probs per column: pairs, or twice as many with shared tokens
    places: Tensor | None = None  # the pairs that any rank computes; None: all
    number: int | None = None  # of the training step

    def spread(self, columns: Columns) -> Columns:
        """Return columns of all pairs of the step: NaN for those that no rank has computed."""
        if self.places is None:
            return columns
        all_pairs = {}
        for name, column in columns.items():
            computed = self.places.to(column.device, non_blocking=True)
            all_pairs[name] = column.new_full((self.count, 2), torch.nan)
            is_short = len(column) == len(computed)
            all_pairs[name][computed] = column if is_short else column[computed]
        return all_pairs


@dataclass(frozen=True, eq=False)
class Batches(PicklesFields, Sequence[PairBatch]):
    """The micro-batches of a step, packed when they are needed, whole or one rank's share.

    `budget` and the three fields after it, and `at_end`, are those of `pack`. With a `side`, each
    pair has only that answer. If `wanted` is given, micro-batches without a wanted pair are dropped.
    With `shared`, each pair is there twice, the second time with its shared tokens.
    """

    pairs: Sequence[TokenPair]
    budget: int
    most_pairs: int | None = None
    ladder: int = 0
    ranks: int = 1
    side: str | None = None
    at_end: bool = False
    wanted: Flags | None = None
    shared: bool = False

    def only(self, wanted: Flags, *, shared: bool = False) -> Batches:
        """Return the micro-batches that have at least one of these pairs."""
        if wanted.all() and not shared:
            return self
        return replace(self, wanted=None if wanted.all() else wanted, shared=shared)

    def of(self, source: RunPairs) -> Batches:
        """Return the same with its pairs, which another process has named."""
        if not isinstance(self.pairs, PairRows):
            return self
        return replace(self, pairs=replace(self.pairs, source=source))

    @property
    def number(self) -> int | None:
        """The number of the training step; None for other pairs."""
        which = self.pairs.which if isinstance(self.pairs, PairRows) else None
        return which if isinstance(which, int) else None

    def own_pairs(self) -> list[TokenPair]:
        if self.side is None:
            return list(self.pairs)
        return [pair.only(self.side) for pair in self.pairs]

    @cached_property
    def _shares(self) -> dict[tuple[int, int], Share]:
        """What is packed already, by rank and number of ranks."""
        return {}

    def share(self, rank: int, ranks: int) -> Share:
        """Return the micro-batches of one rank. All ranks have equally many, or they would hang."""
        if (rank, ranks) not in self._shares:
            self._shares[rank, ranks] = self._pack(rank, ranks)
        return self._shares[rank, ranks]

    def _pack(self, rank: int, ranks: int) -> Share:
        pairs = self.own_pairs()
        count = len(self.pairs)
        computed: Tensor | None = None  # None: all pairs
        bins = plan_bins(pairs, self.budget, self.most_pairs, ladder=self.ladder, ranks=self.ranks)
        if self.wanted is not None:
            bins = [planned for planned in bins if self.wanted[planned.places].any()]
            pairs_in_bins = np.concatenate([planned.places for planned in bins])
            computed = torch.from_numpy(np.sort(pairs_in_bins))
        batches = [planned.pack(pairs, at_end=self.at_end) for planned in bins[rank::ranks]]
        if len(batches) < ceil_div(len(bins), ranks):
            batches.append(empty_batch(min(planned.tokens for planned in bins)))
        if self.shared:
            batches = list(map(with_shared, batches))
            count *= 2
            computed = None if computed is None else twice(computed)
        if torch.cuda.is_available():
            batches = [batch.pin_memory() for batch in batches]
            computed = None if computed is None else computed.pin_memory()
        return Share(batches, PairFacts.of_pairs(pairs), count, computed, self.number)

    def __len__(self) -> int:
        return len(self.share(0, 1).batches)

    def __getitem__(self, index: Any) -> Any:
        return self.share(0, 1).batches[index]


def share_of(batches: Sequence[PairBatch], rank: int, ranks: int) -> Share:
    """Return one rank's share of all micro-batches of a step, named or given."""
    if isinstance(batches, Batches):
        return batches.share(rank, ranks)
    facts = PairFacts.of_step(batches)
    own_batches = list(batches[rank::ranks])
    if len(own_batches) < ceil_div(len(batches), ranks):
        own_batches.append(empty_batch(min(len(batch.ids_N) for batch in batches)))
    return Share(own_batches, facts, len(facts.weight))


def with_shared(batch: PairBatch) -> PairBatch:
    """Return a batch with each pair twice: with all its tokens, then with the shared ones."""
    is_shared = batch.shared_T > 0
    cell = batch.cell_T + batch.cell_T // 2 * 2
    return replace(
        batch,
        token_T=torch.cat([batch.token_T, batch.token_T[is_shared]]),
        cell_T=torch.cat([cell, cell[is_shared] + 2]),
        shared_T=torch.cat([batch.shared_T, batch.shared_T[is_shared]]),
        length_P2=batch.length_P2.repeat_interleave(2, 0),
        pair_P=twice(batch.pair_P),
    )


def twice(places: Tensor) -> Tensor:
    return (2 * places[:, None] + torch.arange(2)).reshape(-1)
