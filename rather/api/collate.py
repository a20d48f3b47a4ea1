"""Padded batches of other trainers -> pairs, pairs -> padded batches, and their sampler.

Two forms are read. In one, the chosen rows come first and the rejected rows follow (`input_ids`,
`attention_mask`, and `labels` or `loss_mask`); in the other, each side has its own tensors
(`chosen_input_ids`, ...). Both may have `weight`, `margin`, `soft_label` and `id` with a value for
each pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DistributedSampler

from rather.data.batch import TokenPair
from rather.data.formats import extras_of
from rather.data.json_rows import DropReason
from rather.data.pack import common_tokens
from rather.data.pairs import spans_of
from rather.errors import DataError

IGNORED = -100  # label of a token that is not scored
MISSING = {"weight": 1.0, "margin": math.nan, "soft_label": math.nan}  # in tensors, for None
Array = NDArray[Any]
Row = tuple[Array, Array]  # the ids of a sequence without padding, and which of them are scored


def pairs_of(batch: Mapping[str, Any]) -> list[TokenPair]:
    """Return the pairs of a batch in either form, in their order."""
    if "chosen_input_ids" in batch:
        chosen = _rows(batch, "chosen_")
        rejected = _rows(batch, "reject_" if "reject_input_ids" in batch else "rejected_")
    else:
        rows = _rows(batch, "")
        chosen = rows[: len(rows) // 2]
        rejected = rows[len(rows) // 2 :]
    if len(chosen) != len(rejected):
        raise DataError(
            f"{len(chosen)} chosen and {len(rejected)} rejected rows are not pairs; give as many "
            "rejected rows as chosen ones, after them."
        )
    extras: list[dict[str, Any]] = [{} for _ in chosen]
    for name in (*MISSING, "id"):
        if batch.get(name) is not None:
            values = _array(batch[name]).tolist()
            if not isinstance(values, list) or len(values) != len(chosen):
                size = len(chosen)
                raise DataError(f"{name}: a batch of {size} pairs needs a list of {size} values.")
            for row, extra in zip(extras, values, strict=True):
                # Tensors cannot hold None: NaN means that a pair has no margin or soft label.
                is_missing = name in ("margin", "soft_label") and extra != extra
                row[name] = None if is_missing else extra
    return list(map(_pair, chosen, rejected, extras))


def _array(value: Any) -> Array:
    return np.asarray(value.cpu() if isinstance(value, Tensor) else value)


def _rows(batch: Mapping[str, Any], prefix: str) -> list[Row]:
    masks, labels = (batch.get(f"{prefix}{name}") for name in ("loss_mask", "labels"))
    marks = labels if masks is None else masks
    if f"{prefix}input_ids" not in batch or marks is None:
        raise DataError(
            f"a batch needs {prefix}input_ids, and {prefix}loss_mask or {prefix}labels; it has "
            f"{', '.join(batch)}."
        )
    ids = [_array(row) for row in batch[f"{prefix}input_ids"]]
    attention = batch.get(f"{prefix}attention_mask", [np.ones_like(row) for row in ids])
    real = [_array(row).astype(bool) for row in attention]
    padded_rows = zip(ids, map(_array, marks), real, strict=True)
    rows = [(row[is_real], mark[is_real]) for row, mark, is_real in padded_rows]
    return _labelled(rows) if masks is None else [(row, mask.astype(bool)) for row, mask in rows]


def _labelled(rows: list[Row]) -> list[Row]:
    """Labels repeat the tokens in place, or one place earlier, where the token is predicted."""
    shifted = []
    for row, label in rows:
        last = label[-1:][label[-1:] != IGNORED]  # a token that the ids do not have
        ids = np.append(row, last)
        shifted.append((ids, np.append(IGNORED, label)[: len(ids)]))
    for aligned in (rows, shifted):
        if all(((label == IGNORED) | (label == row)).all() for row, label in aligned):
            return [(row, label != IGNORED) for row, label in aligned]
    raise DataError(
        "labels are neither the tokens in place nor the next tokens; which tokens are scored?"
    )


def _pair(chosen: Row, rejected: Row, extras: Mapping[str, Any]) -> TokenPair:
    """Return a pair whose prompt is the common beginning; each answer keeps at least one token."""
    spans = spans_of(chosen[1]), spans_of(rejected[1])
    for name, spans_of_answer in zip(("chosen", "rejected"), spans, strict=True):
        if not spans_of_answer:
            raise DataError(f"a {name} row has no scored token after its first token.")
    chosen_ids = chosen[0].astype(np.int32)
    rejected_ids = rejected[0].astype(np.int32)
    shortest = min(len(chosen_ids), len(rejected_ids))
    common = min(common_tokens(chosen_ids, rejected_ids), shortest - 1)
    ids = (chosen_ids[:common], chosen_ids[common:], rejected_ids[common:])
    try:
        return TokenPair(*ids, *spans, **extras_of(extras))
    except DropReason as reason:
        raise DataError(f"{reason.detail}.") from None


@dataclass
class DataCollatorForPreferenceDataset:
    """Collates tokenised rows into one batch of tensors, padded on the right to the longest row.

    Rows have `chosen_input_ids`, `chosen_loss_mask` and the same for `rejected`, and optionally
    `weight`, `margin` and `soft_label`. Tokens after `max_length` are cut off.
    """

    tokenizer: Any
    max_length: int = 4096

    def __call__(self, instances: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        batch: dict[str, Tensor] = {}
        for side in ("chosen", "rejected"):
            ids, masks = (
                [torch.as_tensor(row[f"{side}_{name}"])[: self.max_length] for row in instances]
                for name in ("input_ids", "loss_mask")
            )
            batch[f"{side}_input_ids"] = pad_sequence(ids, True, padding or 0)
            ones = [torch.ones_like(row) for row in ids]
            batch[f"{side}_attention_mask"] = pad_sequence(ones, True)
            batch[f"{side}_loss_mask"] = pad_sequence([mask.long() for mask in masks], True)
        for name, missing in MISSING.items():
            if all(row.get(name) is None for row in instances):
                continue
            numbers = []
            for row in instances:
                number = row.get(name)
                numbers.append(missing if number is None else number)
            batch[name] = torch.tensor(numbers, dtype=torch.float64)
        return batch


class StatefulDistributedSampler(DistributedSampler[int]):
    """Samples this rank's share of an epoch, in an order that depends on the seed and the epoch.

    `state_dict` holds the position within the epoch, and `load_state_dict` continues from there.
    `set_start_index` counts samples of this rank, and is valid for one epoch. Rank and number of
    replicas default to those of the process group.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            num_replicas = num_replicas or 1
            rank = rank or 0
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.start_index = 0
        self._yielded = 0  # samples since start_index

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.set_start_index(0)
        self.epoch = epoch

    def set_start_index(self, start_index: int) -> None:
        if not 0 <= start_index <= self.num_samples:
            raise ValueError(
                f"start_index must be from 0 to {self.num_samples} (got {start_index})"
            )
        self.start_index = start_index
        self._yielded = 0

    def state_dict(self) -> dict[str, int]:
        position = self.start_index + self._yielded
        return {"epoch": self.epoch, "start_index": position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch = state["epoch"]
        self.seed = state["seed"]
        self.set_start_index(state["start_index"])

    def __len__(self) -> int:
        return self.num_samples - self.start_index

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self.dataset))  # type: ignore[arg-type]
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        # The first samples come again if ranks would have different numbers of them.
        order = np.resize(order, self.total_size)
        self._yielded = 0
        for index in order[self.rank :: self.num_replicas][self.start_index :].tolist():
            self._yielded += 1
            yield index
        # The position stays at the end of the epoch, and the next pass begins at its start.
        self.start_index = 0
        self._yielded = self.num_samples
