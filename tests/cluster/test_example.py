"""The example of eight devices on eight CPU workers: nothing changes but paths and the platform."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rather.config.load import load_config
from rather.pipeline.pipeline import DPOPipeline
from tests.house.source import ROOT
from tests.runs import steps
from tests.tiny import make_model

EXAMPLE = ROOT / "examples" / "qwen2.5-3B-dpo_megatron" / "dpo_config.yaml"


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_the_example_of_eight_devices_runs_on_eight_cpu_workers(tmp_path: Path) -> None:
    make_model(tmp_path / "model", max_position_embeddings=512)  # its sequence_length
    rows = [
        {"instruction": f"w{i}", "input": "", "chosen": "w1 w2 w3", "rejected": "w4 w5"}
        for i in range(24)
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    changed = {
        "pretrain": tmp_path / "model",
        "actor_train.data_args.file_name": f"[{tmp_path / 'pairs.json'}]",
        "validation.data_args.file_name": tmp_path / "pairs.json",
        "output_dir": tmp_path / "output",
        "logging_dir": tmp_path / "logs",
        "checkpoint_config.output_dir": tmp_path / "copies",
        "tracker_kwargs.log_dir": tmp_path / "board",
        "platform": "cpu",
    }
    config = load_config(EXAMPLE, [f"{key}={value}" for key, value in changed.items()])
    pipeline = DPOPipeline(config)
    seats = pipeline.actor_train.seats
    assert len({seat.process.pid for seat in seats}) == 8
    assert seats is pipeline.reference.seats
    assert pipeline.run() == 0
    lines = steps(config)
    assert [line["pairs"] for line in lines] == [24] * 10  # epochs of one small step
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-3)
