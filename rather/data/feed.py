"""Pairs out of whatever Python has them in: rows of text or tokens, Hugging Face datasets, loaders of batches."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np

from rather.config.schema import DPOConfig
from rather.data.batch import TokenPair
from rather.data.collate import pairs_of
from rather.data.formats import EXTRAS, Layout, TextPair, read_row
from rather.data.json_rows import Bad
from rather.data.prepare import recipe_of
from rather.data.report import TOO_LONG
from rather.data.sampler import Order
from rather.data.sandboxed import LimitedEncoder, encoder_of
from rather.data.tokens import Encoded, Encoder
from rather.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TOKENS = ("input_ids", "chosen_input_ids")


class Feed:
    """Micro-batches of pairs for a trainer: of `size` pairs, or as the given loader has made them.

    Rows that can be counted are shuffled by the seed and the epoch; what comes from an iterator keeps its order.
    """

    def __init__(
        self, source: Iterable[Any], config: DPOConfig, size: int, tokenizer: Any = None
    ) -> None:
        self.source, self.config, self.size, self.tokenizer = source, config, size, tokenizer
        self.dropped: Counter[str] = Counter()
        self.examples: dict[
            str, str
        ] = {}  # reason -> what was wrong with the first row dropped for it
        self._begun: Iterator[Any] | None = None

    def micro_batches(self, epoch: int | None = None) -> Iterator[list[TokenPair]]:
        """Those of an epoch; without a number in the order they are given, for an evaluation."""
        found = 0
        for part in self._parts(epoch):
            found += len(part)
            yield part
        if not found:
            raise self.nothing_left("" if epoch is None else f" in epoch {epoch + 1}")

    def count(self) -> int | None:
        """Micro-batches of an epoch, where that is known beforehand: rows of a loader may be dropped, batches not."""
        if self.rows is not None:
            return math.ceil(len(self.rows) / self.size)
        if not isinstance(self.source, Sized):
            return None
        items = self._items(0)
        first = list(islice(items, 1))
        self._begun = chain(first, items)
        return len(self.source) if any(map(_is_batch, first)) else None

    def tell_dropped(self) -> None:
        """What was dropped since it was told last."""
        if self.dropped:
            log.warning("rows dropped: %s", self._listed())
        self.dropped.clear()

    def nothing_left(self, where: str = "") -> DataError:
        return DataError(f"0 pairs are left{where}; rows dropped: {self._listed() or 'none'}.")

    def pairs(self, item: Any) -> list[TokenPair]:
        """One item: a pair, a row of tokens or of text, a padded batch, or a list of these."""
        if isinstance(item, TokenPair):
            return [item]
        if isinstance(item, Mapping):
            if any(item.get(name) is not None for name in TOKENS):
                return self._of_tokens(item)
            return self._encoded(item)
        if isinstance(item, Sequence) and not isinstance(item, str):
            return [pair for each in item for pair in self.pairs(each)]
        raise DataError(f"{type(item).__name__}: neither a pair, a row nor a batch.")

    @cached_property
    def rows(self) -> list[TokenPair] | None:
        """All pairs, of a source that has rows by number."""
        source: Any = self.source
        if not (
            isinstance(source, Sequence)
            or all(hasattr(source, name) for name in ("column_names", "__len__"))
        ):
            return None
        if len(source) and _is_batch(source[0]):
            return None
        found = [pair for row in source for pair in self._fitting(row)]
        if not found:
            raise self.nothing_left()
        self.tell_dropped()
        return found

    def _parts(self, epoch: int | None) -> Iterator[list[TokenPair]]:
        if self.rows is not None:
            chosen = np.arange(len(self.rows)) if epoch is None else self._order.epoch(epoch)
            yield from _cut((self.rows[i] for i in chosen.tolist()), self.size)
            return
        waiting: list[TokenPair] = []
        items, self._begun = self._begun or self._items(epoch), None
        for item in items:
            found = self._fitting(item)
            if _is_batch(item):
                yield from [found] if found else []
                continue
            waiting += found
            while len(waiting) >= self.size:
                yield waiting[: self.size]
                waiting = waiting[self.size :]
        if waiting:
            yield waiting

    def _items(self, epoch: int | None) -> Iterator[Any]:
        if epoch is not None:
            begin_epoch(self.source, epoch)
        return iter(self.source)

    def _drop(self, bad: Bad) -> None:
        key = "overlong" if bad.reason in TOO_LONG else "on_bad"
        if {"overlong": self.config.actor_train.data_args.overlong, "on_bad": self.config.on_bad}[
            key
        ] == "error":
            raise DataError(
                f"a row is {bad.reason} ({bad.detail}), and {key} is error; correct it, or set drop."
            )
        self.dropped[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad.detail)

    def _listed(self) -> str:
        return ", ".join(
            f"{count} {reason} ({self.examples[reason]})" for reason, count in self.dropped.items()
        )

    @cached_property
    def _order(self) -> Order:
        assert self.rows is not None
        return Order(((0, len(self.rows), 1.0),), self.size, self.config.data_seed)

    @cached_property
    def _encoder(self) -> Encoder | LimitedEncoder:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: rows of text need one; give it to the trainer.")
        return encoder_of(
            recipe_of(self.tokenizer, self.config, self.config.actor_train.data_args),
            "rows of text",
        )

    def _encoded(self, row: Mapping[str, Any]) -> list[TokenPair]:
        layout = Layout(
            self.config.actor_train.data_args.format, self._columns, self.config.ranked_pairs
        )
        read = read_row(row, layout)
        results = [(pair, self._encoder.encode(pair)) for pair in read.pairs]
        for bad in (*read.refused, *(result for _, result in results if isinstance(result, Bad))):
            self._drop(bad)
        return [
            _token_pair(pair, result) for pair, result in results if isinstance(result, Encoded)
        ]

    def _of_tokens(self, item: Mapping[str, Any]) -> list[TokenPair]:
        named = {ours: item.get(theirs) for ours, theirs in self._columns.items() if ours in EXTRAS}
        given = {name: value for name, value in {**item, **named}.items() if value is not None}
        return pairs_of(
            given if _is_batch(item) else {name: [value] for name, value in given.items()}
        )

    def _fitting(self, item: Any) -> list[TokenPair]:
        return [pair for pair in self.pairs(item) if self._fits(pair)]

    def _fits(self, pair: TokenPair) -> bool:
        longest = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        if longest <= self.config.sequence_length:
            return True
        told = f"{longest} tokens; sequence_length is {self.config.sequence_length}"
        if self.config.actor_train.data_args.overlong.startswith("truncate"):
            raise DataError(
                f"a row has {told}; what is tokens already is not cut: set overlong: drop, or cut it."
            )
        self._drop(Bad("too_long", told))
        return False

    @property
    def _columns(self) -> dict[str, str]:
        keys = {"chosen": self.config.chosen_key, "rejected": self.config.rejected_key}
        given = {name: key for name, key in keys.items() if name != key}
        return {**self.config.actor_train.data_args.columns, **given}


def begin_epoch(loader: Iterable[Any], epoch: int) -> None:
    """The order of an epoch is its sampler's."""
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def _token_pair(pair: TextPair, encoded: Encoded) -> TokenPair:
    prompt, chosen, rejected = (
        np.array(x, np.int32) for x in (encoded.prompt, encoded.chosen, encoded.rejected)
    )
    spans = (encoded.chosen_scored, encoded.rejected_scored)
    return TokenPair(
        prompt, chosen, rejected, *spans, pair.weight, pair.margin, pair.soft_label, pair.id
    )


def _is_batch(item: Any) -> bool:
    """Several rows of tokens in one mapping."""
    if not isinstance(item, Mapping):
        return False
    rows = next((item[name] for name in TOKENS if name in item), None)
    return rows is not None and len(rows) > 0 and np.ndim(rows[0]) > 0


def _cut(pairs: Iterator[TokenPair], size: int) -> Iterator[list[TokenPair]]:
    while part := list(islice(pairs, size)):
        yield part
