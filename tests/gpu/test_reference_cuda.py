"""The reference cache on a CUDA device: what a second run reads, and that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.batch import Columns, PairBatch
from rather.data.pack import pack
from rather.objective import from_config
from rather.pipeline import DPOPipeline
from rather.reference import ReferenceLogps
from tests.padded import random_pairs
from tests.tiny import make_config, metrics

pytestmark = pytest.mark.gpu

TOKENS = {"pref_loss": "sigmoid", "ld_alpha": 0.4}


@pytest.mark.parametrize("changes", [{}, TOKENS], ids=["sums", "tokens"])
def test_a_second_run_reads_what_the_first_one_computed(tmp_path: Path, changes: dict[str, Any]) -> None:
    losses = []
    for name in ("first", "second"):
        pipeline = DPOPipeline(make_config(tmp_path, exp_name=name, **changes))
        assert pipeline.run() == 0
        assert pipeline.reference_logps is not None
        losses.append([line["loss"] for line in metrics(pipeline.config) if "loss" in line])
    assert pipeline.reference_logps.counts.forwards == 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("changes", [{}, TOKENS], ids=["sums", "tokens"])
def test_fresh_and_known_values_come_without_waiting(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(tmp_path, **changes)

    def compute(batches: Sequence[PairBatch]) -> Columns:
        return {"sum": torch.full((sum(len(batch.pair_P) for batch in batches), 2), -2.0, device="cuda").double()}

    logps = ReferenceLogps(config, from_config(config), compute)
    logps.open()
    pairs = random_pairs(6, 50)
    bins = [batch.pinned() for batch in pack(pairs, 60)]
    first = logps.columns(pairs[:3], [batch.pinned() for batch in pack(pairs[:3], 60)])
    assert all(column.is_cuda for column in first.values())
    logps.keep()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed = logps.columns(pairs, bins)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    logps.keep()
    for name, known in logps.columns(pairs, bins).items():
        assert torch.equal(known, mixed[name])
