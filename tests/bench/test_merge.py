"""The benchmark of merged files on a tiny model: what it scores, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.house.source import ROOT
from tests.tiny import make_model, make_pairs

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `quality`

import merge


def test_the_table_compares_files_with_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "base", dtype=torch.bfloat16)
    make_pairs(tmp_path / "pairs.jsonl", 40)
    monkeypatch.setattr(merge, "TRAININGS", (("LoRA", 1e-5), ("full", 2e-6)))
    given = f"--model {tmp_path}/base --pairs {tmp_path}/pairs.jsonl --out {tmp_path}/out"
    words = [*given.split(), "--json", str(tmp_path / "found.json"), "--held-out", "8"]
    assert merge.main([*words, "--steps", "3", "--batch", "4"]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["training"], row["rounding"]) for row in rows] == [
        (training, rounding) for training in ("LoRA", "full") for rounding in merge.ROUNDINGS
    ]
    for nearest, dithered in (rows[:2], rows[2:]):
        assert nearest["kept"] < 0.7 < dithered["kept"] < 1.3
        assert nearest["change"] == dithered["change"] > 0
        assert 0 < dithered["error"] < 10 * nearest["error"]
    table = capsys.readouterr().out
    assert table.count("\n| LoRA | 1e-05 |") == table.count("\n| full | 2e-06 |") == 2
