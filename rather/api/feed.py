"""Pairs from Python objects: rows of text or tokens, Hugging Face datasets, loaders of batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rather.api.collate import StatefulDistributedSampler, pairs_of
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair, prompt_images
from rather.data.formats import EXTRAS, read_row
from rather.data.image_tokens import recipe_of_processor
from rather.data.json_rows import DropReason
from rather.data.pairs import stored_numbers
from rather.data.pool import LimitedEncoder, encoder_of
from rather.data.prepare import layout_of, recipe_of
from rather.data.report import TOO_LONG
from rather.data.sampler import Order
from rather.data.tokens import Encoder
from rather.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TOKENS = ("input_ids", "chosen_input_ids")


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
        self.transform = transform
        self.source = source
        self.config = config
        self.size = size
        self.tokenizer = tokenizer
        self.data = config.actor_train.data_args
        self.images = recipe_of_processor(tokenizer)  # None if only text is read
        refusal = "" if self.images else "the tokenizer is not the processor of a vision model"
        layout = layout_of(config, config.rows, self.data)
        self._layout = replace(layout, refuse_images=refusal)
        self.sampler: Any = getattr(source, "sampler", None)
        self.dropped: dict[str, tuple[int, str]] = {}  # reason -> count, details of the first row
        self._begun: Iterator[Any] | None = None

    # --- micro-batches ---

    def micro_batches(self, epoch: int | None = None) -> Iterator[list[TokenPair]]:
        """Yield those of an epoch; without an epoch in the given order."""
        waiting: list[TokenPair] = []
        is_empty = True
        for row_or_batch in self._items(epoch):
            waiting += filter(self._fits, self.pairs(row_or_batch))
            size = len(waiting) if _is_batch(row_or_batch) else self.size
            while 0 < size <= len(waiting):
                yield waiting[:size]
                waiting = waiting[size:]
                is_empty = False
        if waiting:
            yield waiting
        elif is_empty:
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
        """Return whether an epoch has the same order when it is read again."""
        indexed = self.rows is not None or isinstance(self.source, Sequence)
        return indexed or isinstance(self.sampler, StatefulDistributedSampler)

    def identity(self) -> dict[str, Any]:
        """Return what identifies the pairs and their order, for checkpoints."""
        if self.rows is None:
            names = ("num_samples", "num_replicas", "seed", "shuffle")
            return {name: getattr(self.sampler, name, None) for name in names}
        digest = sha256()
        for pair in self.rows:
            for key in (pair.prompt_key, pair.chosen.tobytes(), pair.rejected.tobytes()):
                digest.update(key)
            spans = (pair.chosen_scored, pair.rejected_scored)
            digest.update(repr((spans, *stored_numbers(pair).values())).encode())
        return {"pairs": digest.hexdigest()}

    @cached_property
    def rows(self) -> list[TokenPair] | None:
        """All pairs of a source that has rows by number; None for other sources."""
        source: Any = self.source
        is_dataset = hasattr(source, "column_names") and hasattr(source, "__len__")
        is_indexed = isinstance(source, Sequence) or is_dataset
        if not is_indexed or (len(source) and _is_batch(source[0])):
            return None
        pairs: list[TokenPair] = []
        for row in source:
            pairs += filter(self._fits, self.pairs(row))
        if not pairs:
            raise self.no_pairs()
        self.log_dropped()
        return pairs

    def _items(self, epoch: int | None) -> Iterator[Any]:
        source: Any = self.source
        if self.rows is not None:
            if epoch is None:
                return iter(self.rows)
            order = Order(((0, len(self.rows), 1.0),), self.size, self.config.data_seed)
            return map(self.rows.__getitem__, order.epoch(epoch))
        begun = self._begun
        self._begun = None
        if begun is not None and epoch == 0:
            return begun
        if epoch is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            # A DataLoader draws a seed for each pass. From the global generator it would do so
            # ahead of training, so that checkpoints would hold the state of one pass too many.
            if getattr(source, "generator", self) is None:
                source.generator = torch.Generator().manual_seed(self.config.data_seed + epoch)
        return iter(source)

    # --- one item ---

    def pairs(self, item: Any) -> list[TokenPair]:
        """Return the pairs of an item: a pair, a row, a padded batch, or a list of these."""
        if isinstance(item, TokenPair):
            return [item]
        if isinstance(item, Sequence) and not isinstance(item, str):
            return list(chain.from_iterable(map(self.pairs, item)))
        if not isinstance(item, Mapping):
            raise DataError(f"{type(item).__name__} is not a pair, a row or a batch.")
        row_or_batch = self.transform(item) if self.transform else item
        if all(row_or_batch.get(name) is None for name in TOKENS):
            return self._from_text(row_or_batch)
        return self._from_tokens(row_or_batch)

    def _from_tokens(self, row_or_batch: Mapping[str, Any]) -> list[TokenPair]:
        columns = dict(row_or_batch)
        for ours, theirs in self._layout.columns.items():
            if ours in EXTRAS:
                columns[ours] = row_or_batch.get(theirs)
        columns = {name: column for name, column in columns.items() if column is not None}
        if not _is_batch(row_or_batch):
            columns = {name: [cell] for name, cell in columns.items()}
        return pairs_of(columns)

    def _from_text(self, row: Mapping[str, Any]) -> list[TokenPair]:
        read = read_row(row, self._layout)
        pairs: list[TokenPair] = []
        for pair in read.pairs:
            if pair.images:
                folder = self.data.image_dir or "."
                pair = replace(pair, image_dir=str(Path(folder).expanduser().absolute()))
            try:
                encoded = self._encoder.encode(pair)
            except DropReason as reason:
                read.dropped.append(reason)
                continue
            tokens = TokenPair(
                np.array(encoded.prompt, np.int32),
                np.array(encoded.chosen, np.int32),
                np.array(encoded.rejected, np.int32),
                encoded.chosen_scored,
                encoded.rejected_scored,
                pair.weight,
                pair.margin,
                pair.soft_label,
                pair.id,
                images=prompt_images(pair.images, encoded.images),
                label=pair.label,
                score=pair.score,
            )
            pairs.append(tokens)
        for fault in read.dropped:
            self._drop(fault)
        return pairs

    @cached_property
    def _encoder(self) -> Encoder | LimitedEncoder:
        if self.tokenizer is None:
            raise ConfigError("tokenizer: rows of text need one; give it to the trainer.")
        length = self.config.sequence_length
        tokenizer = self.tokenizer
        if self.images:
            tokenizer = self.tokenizer.tokenizer
            tokenizer.chat_template = self.tokenizer.chat_template or tokenizer.chat_template
        recipe = recipe_of(tokenizer, self.data, length, self.images)
        return encoder_of(recipe, "rows of text")

    # --- rows that are dropped ---

    def log_dropped(self) -> None:
        """Log what was dropped since the last call."""
        if self.dropped:
            log.warning("rows dropped: %s", self._dropped_text())
        self.dropped.clear()

    def no_pairs(self, where: str = "") -> DataError:
        return DataError(f"0 pairs are left{where}; rows dropped: {self._dropped_text()}.")

    def _dropped_text(self) -> str:
        dropped = self.dropped.items()
        return ", ".join(f"{count} {why} ({detail})" for why, (count, detail) in dropped) or "none"

    def _fits(self, pair: TokenPair) -> bool:
        longest = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        if longest <= self.config.sequence_length:
            return True
        text = f"{longest} tokens; sequence_length is {self.config.sequence_length}"
        if self.data.overlong.startswith("truncate"):
            raise DataError(
                f"a row has {text}; rows of tokens are not cut: set overlong: drop, or cut it."
            )
        self._drop(DropReason("too_long", text))
        return False

    def _drop(self, bad: DropReason) -> None:
        key = "overlong" if bad.reason in TOO_LONG else "on_bad"
        if (self.data.overlong if key == "overlong" else self.config.on_bad) == "error":
            text = f"a row is {bad.reason} ({bad.detail}), and {key} is error"
            raise DataError(f"{text}; correct it, or set drop.")
        count, detail = self.dropped.get(bad.reason, (0, bad.detail))
        self.dropped[bad.reason] = count + 1, detail


def _is_batch(item: Any) -> bool:
    """Return whether a mapping holds several rows of tokens."""
    if not isinstance(item, Mapping):
        return False
    rows = next((item[name] for name in TOKENS if name in item), None)
    return rows is not None and len(rows) > 0 and np.ndim(rows[0]) > 0
