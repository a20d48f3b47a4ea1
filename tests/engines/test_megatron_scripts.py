"""megatron-core's pipeline schedule and its checkpoints in both directions: make test-engines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rather.model.megatron import MegatronFiles, checkpoint_folder
from rather.tools.megatron_file import write_megatron
from tests.engines.pipeline import load_checkpoint, run_pipeline, write_checkpoint
from tests.same.canonical import Setup, alone, make_policy
from tests.same.pool import pool

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron"), reason="megatron-core is not installed: make test-engines"
    ),
    pytest.mark.slow,
]

TWO_LAYERS = Setup(family="qwen2", tied=False, layers=2)


def test_two_stages_with_megatrons_schedule() -> None:
    setup = Setup(steps=3, tied=False)
    expected = alone(setup)
    for outcome in pool(2).run(run_pipeline, setup):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_a_checkpoint_of_four_ranks_is_read_bit_for_bit(tmp_path: Path) -> None:
    pool(4).run(write_checkpoint, TWO_LAYERS, str(tmp_path / "ck"))
    model = make_policy(TWO_LAYERS).causal_lm
    place = checkpoint_folder(tmp_path / "ck")
    assert place is not None
    read = MegatronFiles(place, model.config)
    weights = dict(model.named_parameters())
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], weight) for name, weight in weights.items())


def test_an_export_loads_into_megatron_core(tmp_path: Path) -> None:
    model = make_policy(TWO_LAYERS).causal_lm
    model.save_pretrained(tmp_path / "hf")
    write_megatron(tmp_path / "hf", tmp_path / "out", "")
    folder = str(tmp_path / "out" / "release")
    assert pool(4).run(load_checkpoint, TWO_LAYERS, folder) == [[], [], [], []]
