"""Pairs out of whatever Python has them in: rows of text or tokens, Hugging Face datasets, loaders of batches."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from rather.batch import TokenPair
from rather.config.schema import DPOConfig
from rather.data.collate import pairs_of
from rather.data.cut import Bad
from rather.data.formats import Layout, TextPair, read_row
from rather.data.limited import LimitedEncoder, encoder_of
from rather.data.prepare import recipe_of
from rather.data.sampler import Order
from rather.data.tokens import Encoded, Encoder
from rather.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TOKENS = ("input_ids", "chosen_input_ids")


class Feed:
    """Micro-batches of pairs for a trainer: of `size` pairs, or as the given loader has made them.

    Rows that can be counted are shuffled by the seed and the epoch; what comes from an iterator keeps its order.
    """

    def __init__(self, source: Iterable[Any], config: DPOConfig, size: int, tokenizer: Any = None) -> None:
        self.source, self.config, self.size, self.tokenizer = source, config, size, tokenizer
        self.dropped: Counter[str] = Counter()

    def micro_batches(self, epoch: int | None = None) -> Iterator[list[TokenPair]]:
        """Those of an epoch; without a number in the order they are given, for an evaluation."""
        if self._rows is not None:
            chosen = np.arange(len(self._rows)) if epoch is None else self._order.epoch(epoch)
            yield from _cut((self._rows[i] for i in chosen.tolist()), self.size)
            return
        waiting: list[TokenPair] = []
        for item in self.source:
            if _is_batch(item):
                yield pairs_of(item)
                continue
            waiting += self.pairs(item)
            while len(waiting) >= self.size:
                yield waiting[: self.size]
                waiting = waiting[self.size :]
        if waiting:
            yield waiting

    def count(self) -> int | None:
        """Micro-batches of an epoch, where that is known beforehand."""
        if self._rows is not None:
            return math.ceil(len(self._rows) / self.size)
        return len(self.source) if isinstance(self.source, Sized) else None

    def pairs(self, item: Any) -> list[TokenPair]:
        """One item: a pair, a row of tokens or of text, a padded batch, or a list of these."""
        if isinstance(item, TokenPair):
            return [item]
        if isinstance(item, Mapping):
            if _is_batch(item):
                return pairs_of(item)
            if any(name in item for name in TOKENS):
                return pairs_of({name: [value] for name, value in item.items() if name.endswith(("_ids", "_mask"))})
            return self._encoded(item)
        if isinstance(item, Sequence) and not isinstance(item, str):
            return [pair for each in item for pair in self.pairs(each)]
        raise DataError(f"{type(item).__name__}: neither a pair, a row nor a batch.")

    @cached_property
    def _rows(self) -> list[TokenPair] | None:
        """All pairs, of a source that has rows by number."""
        source: Any = self.source
        if not (isinstance(source, Sequence) or hasattr(source, "column_names")):
            return None
        if len(source) and _is_batch(source[0]):
            return None
        found = [pair for row in source for pair in self.pairs(row)]
        if self.dropped:
            log.warning("rows dropped: %s", ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()))
        if not found:
            raise DataError(f"0 pairs to train on; dropped: {dict(self.dropped) or 'none'}.")
        return found

    @cached_property
    def _order(self) -> Order:
        assert self._rows is not None
        return Order(((0, len(self._rows), 1.0),), self.size, self.config.data_seed)

    @cached_property
    def _encoder(self) -> Encoder | LimitedEncoder:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: rows of text need one; give it to the trainer.")
        return encoder_of(recipe_of(self.tokenizer, self.config, self.config.actor_train.data_args), "rows of text")

    def _encoded(self, row: Mapping[str, Any]) -> list[TokenPair]:
        layout = Layout(self.config.actor_train.data_args.format, self._columns, self.config.ranked_pairs)
        read = read_row(row, layout)
        self.dropped.update(bad.reason for bad in read.refused)
        results = [(pair, self._encoder.encode(pair)) for pair in read.pairs]
        self.dropped.update(result.reason for _, result in results if isinstance(result, Bad))
        return [_token_pair(pair, result) for pair, result in results if isinstance(result, Encoded)]

    @property
    def _columns(self) -> dict[str, str]:
        keys = {"chosen": self.config.chosen_key, "rejected": self.config.rejected_key}
        given = {name: key for name, key in keys.items() if name != key}
        return {**self.config.actor_train.data_args.columns, **given}


def _token_pair(pair: TextPair, encoded: Encoded) -> TokenPair:
    prompt, chosen, rejected = (np.array(x, np.int32) for x in (encoded.prompt, encoded.chosen, encoded.rejected))
    spans = (encoded.chosen_scored, encoded.rejected_scored)
    return TokenPair(prompt, chosen, rejected, *spans, pair.weight, pair.margin, pair.soft_label, pair.id)


def _is_batch(item: Any) -> bool:
    """Several rows of tokens in one mapping."""
    if not isinstance(item, Mapping):
        return False
    rows = next((item[name] for name in TOKENS if name in item), None)
    return rows is not None and len(rows) > 0 and np.ndim(rows[0]) > 0


def _cut(pairs: Iterator[TokenPair], size: int) -> Iterator[list[TokenPair]]:
    while part := list(islice(pairs, size)):
        yield part
