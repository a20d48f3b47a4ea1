"""The benchmarks of long pairs and large models: one command must not lose what another measured."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

import large_gpu
import long_gpu
from common import RESULTS, SHAPES, pairs_of


def test_lengths_of_another_command_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, steps_seen = tmp_path / "long.json", []

    def measure(_args: Namespace, engine: Any, steps: list[Any], row: dict[str, Any]) -> Any:
        steps_seen.append([pairs_of(step)[0].tokens for step in steps])
        row |= {"peak_gib": 1.0, "step_seconds": 1.0, "tokens_per_second": 1.0, "settings": ""}
        return engine

    def run(*lengths: str) -> list[int]:
        words = ["long_gpu", "--model", "15M", "--json", str(path), "--steps", "1"]
        monkeypatch.setattr(sys, "argv", [*words, "--lengths", *lengths])
        long_gpu.main()
        return [cell["tokens"] for cell in json.loads(path.read_text("utf-8"))["cells"]]

    monkeypatch.setattr(long_gpu, "run_ours", measure)
    assert run("4096", "16384") == [4096, 16384]
    assert run("8192", "4096") == [4096, 8192, 16384]
    assert steps_seen[1] == [2048, 16384]  # a short pair warms up


def test_models_of_another_command_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json"

    def measure(_args: Namespace, model: str, row: dict[str, Any]) -> None:
        if model == "70B":
            raise ValueError("no room")
        row |= {"forecast_gib": 1.0, "peak_gib": 1.0, "pairs_per_second": 1.0}
        row |= {"step_seconds": 1.0, "settings": ""}

    def run(*models: str) -> dict[str, Any]:
        words = ["large_gpu", "4bit", "--json", str(path), "--models", *models]
        monkeypatch.setattr(sys, "argv", words)
        large_gpu.main()
        cells = json.loads(path.read_text("utf-8"))["cells"]
        return {cell["what"]: cell.get("failed") for cell in cells}

    monkeypatch.setattr(large_gpu, "in_4_bits", measure)
    assert run("32B") == {"32B, 4bit": None}
    assert run("70B") == {"32B, 4bit": None, "70B, 4bit": "ValueError: no room"}


@pytest.mark.parametrize("number", [0, 1], ids=["32B", "70B"])
def test_the_forecast_is_what_an_h200_measured(number: int) -> None:
    cell = json.loads((RESULTS / "large_gpu_4bit.json").read_text("utf-8"))["cells"][number]
    model = cell["what"].partition(",")[0]
    args = Namespace(pairs=cell["pairs"], lora=16, device="cuda")
    steps = large_gpu.steps_of(args, SHAPES[model])
    plan = large_gpu.forecast(args, model, steps, large_gpu.adapter_settings(args), 139.8)
    assert cell["settings"].endswith(f"recompute {plan['forecast_recompute']}")
    assert plan["forecast_gib"] == pytest.approx(cell["peak_gib"], rel=0.02)
