"""What ranks share: the micro-batches of a step, and a folder for what they write together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rather.data.batch import PairBatch


def shares(batches: Sequence[PairBatch], ranks: int) -> list[list[PairBatch]]:
    """As many for each rank, or one would wait for another in a collective. What is missing are copies without pairs.

    Packing gives each rank its share; only micro-batches whose log-probs are partly known come in other numbers.
    """
    missing = -len(batches) % ranks
    smallest = min(batches, key=lambda batch: len(batch.ids_N))
    padded = [*batches, *[_without_pairs(smallest)] * missing]
    return [padded[rank::ranks] for rank in range(ranks)]


def places(batches: Sequence[PairBatch]) -> Tensor:
    """The pairs of some micro-batches by their place in the step, ascending."""
    return torch.cat([batch.pair_P for batch in batches]).sort().values


def _without_pairs(batch: PairBatch) -> PairBatch:
    names = ["rows_U", "targets_U", "token_T", "cell_T", "shared_T"]
    names += ["length_P2", "weight_P", "margin_P", "soft_label_P", "pair_P"]
    return replace(batch, real_tokens=0, **{name: getattr(batch, name)[:0] for name in names})


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """An empty folder on the same disk, gone afterwards."""
    made = folder.with_name(f".pieces-{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
