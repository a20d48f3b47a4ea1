"""The reference cache on a CUDA device: a second run reads it, without device syncs."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.data.batch import Columns
from rather.data.pack import pack
from rather.data.shares import Batches
from rather.losses.objective import configure, from_config
from rather.model.budget import choose_budget
from rather.model.layers import arrange_layers
from rather.pipeline.pipeline import DPOPipeline
from rather.reference.logps import ReferenceLogps
from rather.train.rank_trainer import RankTrainer
from tests.gpu.test_speed_cuda import small_model
from tests.gpu.test_speed_cuda import trainer as training
from tests.padded import random_pairs
from tests.tiny import make_config, metrics

pytestmark = pytest.mark.gpu

TOKENS = {"pref_loss": "sigmoid", "ld_alpha": 0.4}


@pytest.mark.parametrize("changes", [{}, TOKENS], ids=["sums", "tokens"])
def test_a_second_run_reads_what_the_first_one_computed(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    losses = []
    for name in ("first", "second"):
        pipeline = DPOPipeline(make_config(tmp_path, exp_name=name, **changes))
        assert pipeline.run() == 0
        assert pipeline.reference_stream.logps is not None
        losses.append([line["loss"] for line in metrics(pipeline.config) if "loss" in line])
    assert pipeline.reference_stream.logps.counts.forwards == 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("changes", [{}, TOKENS], ids=["sums", "tokens"])
def test_fresh_and_known_values_come_without_waiting(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = make_config(tmp_path, **changes)

    def compute(batches: Batches) -> Columns:
        count = sum(len(batch.pair_P) for batch in batches)
        found = torch.full((count, 2), -2.0, device="cuda", dtype=torch.float64)
        return batches.share(0, 1).spread({"sum": found})

    logps = ReferenceLogps(config, from_config(config), lambda b: partial(compute, b), "cuda")
    logps.open()
    pairs = random_pairs(6, 50)
    bins = Batches(pairs, 60)
    first = logps.columns(Batches(pairs[:3], 60))
    assert all(column.is_cuda for column in first.values())
    logps.keep()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed = logps.columns(bins)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    logps.keep()
    for name, known in logps.columns(bins).items():
        assert torch.equal(known, mixed[name])


def frozen(compiled: bool) -> RankTrainer:
    policy = small_model(hidden_size=512, num_hidden_layers=6, vocab_size=9970)
    arrange_layers(policy.requires_grad_(False), compiled=compiled)
    return RankTrainer(policy, configure(["sigmoid"], {}))


@pytest.mark.defect("G1")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_parked_model_leaves_its_memory_and_answers_the_same(compiled: bool) -> None:
    bins = [batch.pin_memory() for batch in pack(random_pairs(24, 990), 512, ladder=64)]
    # What the first pass of a process leaves behind is not the model's: workspaces of libraries, and
    # arguments of kernels that were compiled, until Python collects them.
    frozen(compiled).log_probs(bins)
    gc.collect()
    resting = torch.cuda.memory_allocated()
    trainer = frozen(compiled)
    weights = sum(parameter.nbytes for parameter in trainer.policy.parameters())
    expected = trainer.log_probs(bins)["sum"]
    assert trainer.park()
    assert not trainer.park()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = [trainer.log_probs(bins)["sum"] for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(answer, expected) for answer in answers)
    assert torch.cuda.memory_allocated() - resting < 0.1 * weights


def test_the_reference_is_parked_before_activations_are_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = training(small_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=8))
    rooms = iter([64 << 20, 64 << 30])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(rooms), 0))
    parked: list[bool] = []

    def park() -> bool:
        parked.append(True)
        return True

    options: dict[str, Any] = {
        "tokens": None,
        "recompute": None,
        "offload": False,
        "compiled": False,
    }
    chosen = choose_budget(work.policy, work, **options, largest_pair=100, make_room=park)
    assert (chosen.recompute, parked) == ("none", [True])


def test_a_run_with_a_parked_reference_has_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for offload in ("off", "on"):
        options: dict[str, Any] = {
            "reference__offload": offload,
            "reference__cache__enabled": False,
        }
        pipeline = DPOPipeline(
            make_config(tmp_path, exp_name=offload, deterministic=True, **options)
        )
        assert pipeline.run() == 0
        losses.append([line["loss"] for line in metrics(pipeline.config) if "loss" in line])
    assert losses[0] == losses[1]
