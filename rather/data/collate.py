"""Batches as other trainers make them: padded tensors -> pairs, pairs -> padded tensors, and their sampler.

Two forms are read. In one, rows of chosen answers come first and those of rejected ones after them (`input_ids`,
`attention_mask`, and `labels` or `loss_mask`); in the other each side has tensors of its own (`chosen_input_ids`, ...).
Either may have `weight`, `margin`, `soft_label` and `id`, a value for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from rather.data.batch import Span, TokenPair
from rather.data.formats import extras_of
from rather.data.messages import Refused
from rather.errors import DataError

IGNORED = -100  # a label that is not scored
REJECTED = ("rejected", "reject")  # the names of a side that are in use
NUMBERS = {
    "weight": 1.0,
    "margin": math.nan,
    "soft_label": math.nan,
}  # of a pair, and what stands for none
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class _Row:
    """One sequence without its padding, and which of its tokens are scored."""

    ids: Ids
    scored: NDArray[np.bool_]


def pairs_of(batch: Mapping[str, Any]) -> list[TokenPair]:
    """The pairs of a batch in either form, in their order."""
    if "chosen_input_ids" in batch:
        side = next((name for name in REJECTED if f"{name}_input_ids" in batch), None)
        if side is None:
            raise DataError(
                f"a batch with chosen_input_ids needs rejected_input_ids; it has {', '.join(batch)}."
            )
        chosen, rejected = (_rows(batch, f"{name}_") for name in ("chosen", side))
    elif "input_ids" in batch:
        rows = _rows(batch, "")
        if len(rows) % 2:
            raise DataError(
                f"{len(rows)} rows are no pairs: chosen rows come first, as many rejected ones after them."
            )
        chosen, rejected = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    else:
        wanted = "input_ids, or chosen_input_ids and rejected_input_ids"
        raise DataError(f"a batch has {wanted}; this one has {', '.join(batch)}.")
    if len(chosen) != len(rejected):
        raise DataError(
            f"{len(chosen)} chosen rows and {len(rejected)} rejected ones are no pairs."
        )
    return [
        _pair(*each) for each in zip(chosen, rejected, _extras(batch, len(chosen)), strict=True)
    ]


def _extras(batch: Mapping[str, Any], pairs: int) -> list[dict[str, Any]]:
    """Weight and the like of each pair, as a file's rows have them."""
    given = {name: batch[name] for name in (*NUMBERS, "id") if batch.get(name) is not None}
    columns = {
        name: np.asarray(x.cpu() if isinstance(x, Tensor) else x).tolist()
        for name, x in given.items()
    }
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != pairs:
            raise DataError(f"{name}: a batch of {pairs} pairs needs a list of as many values.")
    rows = [
        {name: _given(values[i], name) for name, values in columns.items()} for i in range(pairs)
    ]
    try:
        return [extras_of(row) for row in rows]
    except Refused as refused:
        raise DataError(f"{refused.bad.detail}.") from None


def _given(value: Any, name: str) -> Any:
    """Tensors cannot hold None: a margin or soft label that is no number stands for it."""
    return None if name in NUMBERS and name != "weight" and value != value else value


def _rows(batch: Mapping[str, Any], prefix: str) -> list[_Row]:
    ids = _listed(batch[f"{prefix}input_ids"])
    shown = _listed(batch.get(f"{prefix}attention_mask", [np.ones_like(row) for row in ids]))
    if (masks := batch.get(f"{prefix}loss_mask")) is not None:
        return [_masked(*each) for each in zip(ids, shown, _listed(masks), strict=True)]
    if (labels := batch.get(f"{prefix}labels")) is None:
        raise DataError(
            f"a batch needs {prefix}loss_mask or {prefix}labels: which tokens are scored."
        )
    return _labelled(ids, shown, _listed(labels))


def _listed(rows: Any) -> list[NDArray[Any]]:
    return [np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in rows]


def _masked(ids: NDArray[Any], shown: NDArray[Any], mask: NDArray[Any]) -> _Row:
    real = shown.astype(bool)
    return _Row(ids[real].astype(np.int32), mask[real].astype(bool))


def _labelled(
    ids: list[NDArray[Any]], shown: list[NDArray[Any]], labels: list[NDArray[Any]]
) -> list[_Row]:
    """Labels repeat the tokens at their own places, or one place earlier, where the token is predicted."""
    every = list(zip(ids, shown, labels, strict=True))
    if all(_agree(row, label) for row, _, label in every):
        return [_masked(row, seen, label != IGNORED) for row, seen, label in every]
    if all(_agree(row[1:], label[:-1], seen[1:]) for row, seen, label in every):
        return [_shifted(*each) for each in every]
    raise DataError(
        "labels are neither the tokens at their own places nor the next ones; which tokens are scored?"
    )


def _agree(ids: NDArray[Any], labels: NDArray[Any], shown: NDArray[Any] | None = None) -> bool:
    scored = labels != IGNORED
    scored = scored if shown is None else scored & shown.astype(bool)
    return bool((ids[scored] == labels[scored]).all())


def _shifted(ids: NDArray[Any], shown: NDArray[Any], labels: NDArray[Any]) -> _Row:
    """The last label is a token that the ids do not have."""
    real = shown.astype(bool)
    row, own = ids[real], labels[real]
    last = own[-1:][own[-1:] != IGNORED]
    scored = np.concatenate([[False], own != IGNORED])[: len(row) + len(last)]
    return _Row(np.concatenate([row, last]).astype(np.int32), scored)


def _pair(chosen: _Row, rejected: _Row, extras: Mapping[str, Any]) -> TokenPair:
    """What both begin with is the prompt; each keeps a token of its own at least."""
    for row, name in ((chosen, "chosen"), (rejected, "rejected")):
        if not row.scored[1:].any():
            raise DataError(f"a {name} row has no scored token that another one comes before.")
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


def _spans(scored: NDArray[np.bool_]) -> tuple[Span, ...]:
    """Half-open; the first token of a sequence is predicted by none."""
    flags = np.concatenate([[False], scored[1:], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


@dataclass
class DataCollatorForPreferenceDataset:
    """Tokenised rows -> one batch of tensors, padded on the right to the longest row.

    Rows hold `chosen_input_ids`, `chosen_loss_mask` and the same of `rejected`; what lies past `max_length` is cut off.
    They may have `weight`, `margin` and `soft_label`.
    """

    tokenizer: Any
    max_length: int = 4096

    def __call__(self, instances: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        batch: dict[str, Tensor] = {}
        for side in ("chosen", "rejected"):
            ids = [
                torch.as_tensor(row[f"{side}_input_ids"])[: self.max_length] for row in instances
            ]
            masks = [
                torch.as_tensor(row[f"{side}_loss_mask"])[: self.max_length] for row in instances
            ]
            batch[f"{side}_input_ids"] = _padded(ids, padding or 0)
            batch[f"{side}_attention_mask"] = _padded([torch.ones_like(row) for row in ids], 0)
            batch[f"{side}_loss_mask"] = _padded([mask.long() for mask in masks], 0)
        for name in (
            name for name in NUMBERS if any(row.get(name) is not None for row in instances)
        ):
            values = [NUMBERS[name] if row.get(name) is None else row[name] for row in instances]
            batch[name] = torch.tensor(values, dtype=torch.float64)
        return batch


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


class StatefulDistributedSampler(Sampler[int]):
    """Each rank's share of an epoch in an order that the seed and the epoch decide; it can begin inside an epoch.

    `set_start_index` counts samples of this rank, and holds for one epoch: the next one begins at its start.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is none of {num_replicas} replicas")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch, self.start_index = 0, 0

    @property
    def num_samples(self) -> int:
        """Of this rank in a whole epoch."""
        whole, rest = divmod(len(self.dataset), self.num_replicas)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.start_index = 0
        self.epoch = epoch

    def set_start_index(self, start_index: int) -> None:
        if not 0 <= start_index <= self.num_samples:
            raise ValueError(
                f"start_index {start_index} lies outside the {self.num_samples} samples of this rank"
            )
        self.start_index = start_index

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "start_index": self.start_index, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.set_start_index(state["start_index"])

    def __len__(self) -> int:
        return self.num_samples - self.start_index

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        order = np.resize(
            order, self.num_samples * self.num_replicas
        )  # the first ones again, where ranks need as many
        yield from order[self.rank :: self.num_replicas][self.start_index :].tolist()
        self.start_index = 0
