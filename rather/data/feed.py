"""Pairs from Python objects: rows of text or tokens, Hugging Face datasets, loaders of batches."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from hashlib import sha256
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from rather.config.schema import DPOConfig
from rather.data.batch import TokenPair
from rather.data.collate import StatefulDistributedSampler, pairs_of
from rather.data.formats import EXTRAS, RowLayout, TextPair, read_row
from rather.data.json_rows import DropReason
from rather.data.pool import LimitedEncoder, encoder_of
from rather.data.prepare import recipe_of
from rather.data.report import TOO_LONG
from rather.data.sampler import Order
from rather.data.tokens import Encoded, Encoder
from rather.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TOKENS = ("input_ids", "chosen_input_ids")


class MicroBatch(NamedTuple):
    """Some pairs, and where the next ones begin: a sample of the epoch, and pairs of it to skip."""

    pairs: list[TokenPair]
    start: int
    skip: int


class Feed:
    """Yields micro-batches: of `size` pairs, or as the given loader has made them.

    Rows that can be counted are shuffled by the seed and the epoch; an iterator keeps its order.
    `transform` is applied to each row or batch.
    """

    def __init__(
        self,
        source: Iterable[Any],
        config: DPOConfig,
        size: int,
        tokenizer: Any = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source, self.config, self.size, self.tokenizer = source, config, size, tokenizer
        self.transform = transform
        self.sampler: Any = getattr(source, "sampler", None)
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}  # reason -> details of the first row dropped for it
        self._begun: Iterator[Any] | None = None

    # --- micro-batches ---

    def micro_batches(
        self, epoch: int | None = None, start: int | None = None, skip: int = 0
    ) -> Iterator[MicroBatch]:
        """Yield those of an epoch from sample `start` on; without an epoch in the given order."""
        items = self._items(epoch, start)
        place = getattr(self.sampler, "start_index", 0) if start is None else start
        each = getattr(self.source, "batch_size", None) or 1  # samples of an item
        waiting: list[TokenPair] = []
        counts: deque[int] = deque()  # pairs of the items since `place`
        used = found = 0
        for item in items:
            pairs = [pair for pair in self.pairs(item) if self._fits(pair)]
            counts.append(len(pairs))
            waiting += pairs[skip:]
            used, found, skip = used + min(skip, len(pairs)), found + len(pairs), 0
            size = len(waiting) if _is_batch(item) else self.size
            while 0 < size <= len(waiting):
                part, waiting = waiting[:size], waiting[size:]
                used += size
                while counts and used >= counts[0]:
                    used, place = used - counts.popleft(), place + each
                yield MicroBatch(part, place, used)
        if waiting:
            yield MicroBatch(waiting, place + each * len(counts), 0)
        if not found:
            raise self.no_pairs("" if epoch is None else f" in epoch {epoch + 1}")

    def count(self) -> int | None:
        """Return the micro-batches of an epoch, or None: rows of a loader may be dropped later."""
        if self.rows is not None:
            return math.ceil(len(self.rows) / self.size)
        if not isinstance(self.source, Sized):
            return None
        items = self._items(0)
        first = list(islice(items, 1))
        self._begun = chain(first, items)
        return len(self.source) if any(map(_is_batch, first)) else None

    @property
    def is_resumable(self) -> bool:
        """Return whether an epoch can be entered at any sample."""
        indexed = self.rows is not None or isinstance(self.source, Sequence)
        return indexed or isinstance(self.sampler, StatefulDistributedSampler)

    def identity(self) -> dict[str, Any]:
        """Return what identifies the pairs and their order, for checkpoints."""
        if self.rows is None:
            names = ("num_samples", "num_replicas", "seed", "shuffle")
            return {name: getattr(self.sampler, name, None) for name in names}
        digest = sha256()
        for pair in self.rows:
            for ids in (pair.prompt, pair.chosen, pair.rejected):
                digest.update(ids.tobytes())
            spans = (pair.chosen_scored, pair.rejected_scored)
            digest.update(repr((spans, pair.weight, pair.margin, pair.soft_label)).encode())
        return {"pairs": digest.hexdigest()}

    @cached_property
    def rows(self) -> list[TokenPair] | None:
        """All pairs of a source that has rows by number; None for other sources."""
        source: Any = self.source
        is_dataset = all(hasattr(source, name) for name in ("column_names", "__len__"))
        if not (isinstance(source, Sequence) or is_dataset):
            return None
        if len(source) and _is_batch(source[0]):
            return None
        found = [pair for row in source for pair in self.pairs(row) if self._fits(pair)]
        if not found:
            raise self.no_pairs()
        self.log_dropped()
        return found

    def _items(self, epoch: int | None, start: int | None = None) -> Iterator[Any]:
        source: Any = self.source
        if self.rows is not None:
            rows = self.rows
            order = np.arange(len(rows)) if epoch is None else self._order.epoch(epoch)
            return (rows[i] for i in order[start or 0 :].tolist())
        if isinstance(source, Sequence):
            return islice(source, start or 0, None)
        begun, self._begun = self._begun, None
        if begun is not None and epoch == 0 and start is None:
            return begun
        if epoch is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            # A DataLoader draws a seed for each pass. From the global generator it would do so
            # ahead of training, so that checkpoints would hold the state of one pass too many.
            if getattr(source, "generator", self) is None:
                source.generator = torch.Generator().manual_seed(self.config.data_seed + epoch)
        if start is not None:
            assert isinstance(self.sampler, StatefulDistributedSampler), "see is_resumable"
            self.sampler.set_start_index(start)
        return iter(source)

    @cached_property
    def _order(self) -> Order:
        assert self.rows is not None
        return Order(((0, len(self.rows), 1.0),), self.size, self.config.data_seed)

    # --- one item ---

    def pairs(self, item: Any) -> list[TokenPair]:
        """Return the pairs of an item: a pair, a row, a padded batch, or a list of these."""
        if isinstance(item, TokenPair):
            return [item]
        if isinstance(item, Mapping):
            item = self.transform(item) if self.transform else item
            is_tokens = any(item.get(name) is not None for name in TOKENS)
            return self._from_tokens(item) if is_tokens else self._from_text(item)
        if isinstance(item, Sequence) and not isinstance(item, str):
            return [pair for each in item for pair in self.pairs(each)]
        raise DataError(f"{type(item).__name__} is not a pair, a row or a batch.")

    def _from_text(self, row: Mapping[str, Any]) -> list[TokenPair]:
        data, columns = self.config.actor_train.data_args, self._columns
        read = read_row(row, RowLayout(data.format, columns, self.config.ranked_pairs))
        pairs: list[TokenPair] = []
        for pair in read.pairs:
            try:
                pairs.append(_token_pair(pair, self._encoder.encode(pair)))
            except DropReason as reason:
                read.dropped.append(reason)
        for each in read.dropped:
            self._drop(each)
        return pairs

    def _from_tokens(self, item: Mapping[str, Any]) -> list[TokenPair]:
        named = {ours: item.get(theirs) for ours, theirs in self._columns.items() if ours in EXTRAS}
        given = {name: value for name, value in {**item, **named}.items() if value is not None}
        one = not _is_batch(item)
        return pairs_of({name: [value] for name, value in given.items()} if one else given)

    @cached_property
    def _encoder(self) -> Encoder | LimitedEncoder:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: rows of text need one; give it to the trainer.")
        recipe = recipe_of(self.tokenizer, self.config, self.config.actor_train.data_args)
        return encoder_of(recipe, "rows of text")

    @property
    def _columns(self) -> dict[str, str]:
        keys = {"chosen": self.config.chosen_key, "rejected": self.config.rejected_key}
        given = {name: key for name, key in keys.items() if name != key}
        return {**self.config.actor_train.data_args.columns, **given}

    # --- rows that are dropped ---

    def log_dropped(self) -> None:
        """Log what was dropped since the last call."""
        if self.dropped:
            log.warning("rows dropped: %s", self._dropped_text())
        self.dropped.clear()

    def no_pairs(self, where: str = "") -> DataError:
        return DataError(
            f"0 pairs are left{where}; rows dropped: {self._dropped_text() or 'none'}."
        )

    def _dropped_text(self) -> str:
        dropped = self.dropped.items()
        return ", ".join(f"{count} {why} ({self.examples[why]})" for why, count in dropped)

    def _fits(self, pair: TokenPair) -> bool:
        longest = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        if longest <= self.config.sequence_length:
            return True
        text = f"{longest} tokens; sequence_length is {self.config.sequence_length}"
        if self.config.actor_train.data_args.overlong.startswith("truncate"):
            raise DataError(
                f"a row has {text}; rows of tokens are not cut: set overlong: drop, or cut it."
            )
        self._drop(DropReason("too_long", text))
        return False

    def _drop(self, bad: DropReason) -> None:
        overlong, on_bad = self.config.actor_train.data_args.overlong, self.config.on_bad
        key, action = ("overlong", overlong) if bad.reason in TOO_LONG else ("on_bad", on_bad)
        if action == "error":
            text = f"a row is {bad.reason} ({bad.detail}), and {key} is error"
            raise DataError(f"{text}; correct it, or set drop.")
        self.dropped[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad.detail)


def _token_pair(pair: TextPair, encoded: Encoded) -> TokenPair:
    parts = (encoded.prompt, encoded.chosen, encoded.rejected)
    prompt, chosen, rejected = (np.array(ids, np.int32) for ids in parts)
    spans = (encoded.chosen_scored, encoded.rejected_scored)
    numbers = (pair.weight, pair.margin, pair.soft_label)
    return TokenPair(prompt, chosen, rejected, *spans, *numbers, pair.id)


def _is_batch(item: Any) -> bool:
    """Return whether a mapping holds several rows of tokens."""
    if not isinstance(item, Mapping):
        return False
    rows = next((item[name] for name in TOKENS if name in item), None)
    return rows is not None and len(rows) > 0 and np.ndim(rows[0]) > 0
