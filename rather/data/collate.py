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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from rather.data.batch import Span, TokenPair
from rather.data.formats import extras_of
from rather.data.json_rows import DropReason
from rather.errors import DataError

IGNORED = -100  # label of a token that is not scored
MISSING = {"weight": 1.0, "margin": math.nan, "soft_label": math.nan}  # in tensors, for None
Array = NDArray[Any]


class _Row(NamedTuple):
    """One sequence without padding, and which of its tokens are scored."""

    ids: Array
    scored: Array


def pairs_of(batch: Mapping[str, Any]) -> list[TokenPair]:
    """Return the pairs of a batch in either form, in their order."""
    if "chosen_input_ids" in batch:
        side = next((x for x in ("rejected", "reject") if f"{x}_input_ids" in batch), None)
        if side is None:
            raise DataError(f"a batch needs rejected_input_ids; it has {', '.join(batch)}.")
        chosen, rejected = _rows(batch, "chosen_"), _rows(batch, f"{side}_")
    elif "input_ids" in batch:
        rows = _rows(batch, "")
        chosen, rejected = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    else:
        needed = "input_ids, or chosen_input_ids and rejected_input_ids"
        raise DataError(f"a batch needs {needed}; it has {', '.join(batch)}.")
    if len(chosen) != len(rejected):
        raise DataError(
            f"{len(chosen)} chosen and {len(rejected)} rejected rows are not pairs; give as many "
            "rejected rows as chosen ones, after them."
        )
    extras = _extras(batch, len(chosen))
    return [_pair(*each) for each in zip(chosen, rejected, extras, strict=True)]


def _extras(batch: Mapping[str, Any], pairs: int) -> list[dict[str, Any]]:
    """Return weight, margin, soft_label and id of each pair, checked like the rows of a file."""
    rows: list[dict[str, Any]] = [{} for _ in range(pairs)]
    for name in (*MISSING, "id"):
        if (given := batch.get(name)) is None:
            continue
        values = _array(given).tolist()
        if not isinstance(values, list) or len(values) != pairs:
            raise DataError(f"{name}: a batch of {pairs} pairs needs a list of {pairs} values.")
        for row, value in zip(rows, values, strict=True):
            # Tensors cannot hold None: NaN means that a pair has no margin or soft label.
            row[name] = None if name in ("margin", "soft_label") and value != value else value
    try:
        return [extras_of(row) for row in rows]
    except DropReason as reason:
        raise DataError(f"{reason.detail}.") from None


def _array(value: Any) -> Array:
    return np.asarray(value.cpu() if isinstance(value, Tensor) else value)


def _rows(batch: Mapping[str, Any], prefix: str) -> list[_Row]:
    ids = list(map(_array, batch[f"{prefix}input_ids"]))
    shown = batch.get(f"{prefix}attention_mask", [np.ones_like(row) for row in ids])
    real = [_array(row).astype(bool) for row in shown]
    tokens = [row[own] for row, own in zip(ids, real, strict=True)]
    masks = batch.get(f"{prefix}loss_mask")
    given = batch.get(f"{prefix}labels") if masks is None else masks
    if given is None:
        raise DataError(f"a batch needs {prefix}loss_mask or {prefix}labels: the scored tokens.")
    marks = [row[own] for row, own in zip(map(_array, given), real, strict=True)]
    if masks is None:
        return _labelled(tokens, marks)
    return [_row(row, mask.astype(bool)) for row, mask in zip(tokens, marks, strict=True)]


def _row(ids: Array, scored: Array) -> _Row:
    return _Row(ids.astype(np.int32), scored)


def _labelled(tokens: list[Array], labels: list[Array]) -> list[_Row]:
    """Labels repeat the tokens in place, or one place earlier, where the token is predicted."""
    rows = list(zip(tokens, labels, strict=True))
    if all(_agree(row, label) for row, label in rows):
        return [_row(row, label != IGNORED) for row, label in rows]
    if not all(_agree(row[1:], label[:-1]) for row, label in rows):
        raise DataError(
            "labels are neither the tokens in place nor the next tokens; which tokens are scored?"
        )
    shifted = []
    for row, label in rows:
        last = label[-1:][label[-1:] != IGNORED]  # a token that the ids do not have
        scored = np.concatenate([[False], label != IGNORED])[: len(row) + len(last)]
        shifted.append(_row(np.concatenate([row, last]), scored))
    return shifted


def _agree(ids: Array, labels: Array) -> bool:
    scored = labels != IGNORED
    return bool((ids[scored] == labels[scored]).all())


def _pair(chosen: _Row, rejected: _Row, extras: Mapping[str, Any]) -> TokenPair:
    """Return a pair whose prompt is the common beginning; each answer keeps at least one token."""
    for row, name in ((chosen, "chosen"), (rejected, "rejected")):
        if not row.scored[1:].any():
            raise DataError(f"a {name} row has no scored token after its first token.")
    shorter = min(len(chosen.ids), len(rejected.ids))
    differ = np.flatnonzero(chosen.ids[:shorter] != rejected.ids[:shorter])
    common = min(int(differ[0]) if len(differ) else shorter, shorter - 1)
    return TokenPair(
        prompt=chosen.ids[:common],
        chosen=chosen.ids[common:],
        rejected=rejected.ids[common:],
        chosen_scored=_spans(chosen.scored),
        rejected_scored=_spans(rejected.scored),
        **extras,
    )


def _spans(scored: Array) -> tuple[Span, ...]:
    """Return half-open spans; nothing predicts the first token of a sequence."""
    flags = np.concatenate([[False], scored[1:], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


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
            values = [row.get(name) for row in instances]
            if any(value is not None for value in values):
                numbers = [missing if value is None else value for value in values]
                batch[name] = torch.tensor(numbers, dtype=torch.float64)
        return batch


class StatefulDistributedSampler(Sampler[int]):
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
        grouped = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if grouped else 1
        if rank is None:
            rank = dist.get_rank() if grouped else 0
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be from 0 to {num_replicas - 1} (got {rank})")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.start_index = 0
        self._yielded = 0  # samples since start_index

    @property
    def num_samples(self) -> int:
        """The samples of this rank in a whole epoch."""
        whole, rest = divmod(len(self.dataset), self.num_replicas)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.set_start_index(0)
        self.epoch = epoch

    def set_start_index(self, start_index: int) -> None:
        if not 0 <= start_index <= self.num_samples:
            raise ValueError(
                f"start_index must be from 0 to {self.num_samples} (got {start_index})"
            )
        self.start_index, self._yielded = start_index, 0

    def state_dict(self) -> dict[str, int]:
        position = self.start_index + self._yielded
        return {"epoch": self.epoch, "start_index": position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.set_start_index(state["start_index"])

    def __len__(self) -> int:
        return self.num_samples - self.start_index

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        # The first samples come again if ranks would have different numbers of them.
        order = np.resize(order, self.num_samples * self.num_replicas)
        self._yielded = 0
        for index in order[self.rank :: self.num_replicas][self.start_index :].tolist():
            self._yielded += 1
            yield index
        # The position stays at the end of the epoch, and the next pass begins at its start.
        self.start_index, self._yielded = 0, self.num_samples
