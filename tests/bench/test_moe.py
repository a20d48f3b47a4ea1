"""The benchmark of a mixture of experts: its shape is the model's, and its steps run, here on a CPU."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest
import torch

from tests.house.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

import gpu_moe
import gpu_vs_trl
from common import SHAPES, Cell, ExpertShape, make_steps, ours


def test_weights_of_the_shape_are_those_of_the_model() -> None:
    shape = SHAPES[gpu_moe.NAME]
    matrices = [p.numel() for p in shape.model(torch.bfloat16, "meta", "eager").parameters()
                if p.ndim > 1]  # fmt: skip
    assert shape.weights == sum(matrices)
    assert shape.weights / 1e9 == pytest.approx(3.0, abs=0.1)
    assert (shape.block_weights + shape.head_weights) / 1e9 == pytest.approx(0.55, abs=0.01)


def test_the_report_shows_the_goals(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("ours", "ultrafeedback", kind, 64, [1.0]) for kind in ("online", "cached")]
    gpu_vs_trl.report(Namespace(model=gpu_moe.NAME, lora=None), cells, {"ultrafeedback": 9.0})
    shown = capsys.readouterr().out
    assert (shown.count("8.0x, 30%"), shown.count("2.0x, 30%")) == (1, 1)


def test_a_step_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ExpertShape("qwen3_moe", 32, 2, 4, 2, 16, 200, False, 8, 2, 8)
    steps = make_steps("ultrafeedback", tiny.vocabulary, steps=2, pairs=4)
    engine = ours(tiny, "cpu")
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor)
    engine.plan(steps, tokens=2048, recompute="full")
    assert len(list(engine.run(steps))) == 2
    assert engine.policy.balance.metrics()["router_loss"] > 1
