"""The shell script of the pipeline's seed, from files to the model; one CPU for eight GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.house.source import ROOT
from tests.tiny import make_model, rows_of

ROW = {"instruction": "w3 w4 .", "input": "", "chosen": "w1 w2 w3", "rejected": "w5"}


def test_seed_002_the_shell_script(tmp_path: Path) -> None:
    make_model(tmp_path / "model", max_position_embeddings=512)
    (tmp_path / "pairs.json").write_text(
        json.dumps([{**ROW, "chosen": f"w1 w{i}"} for i in range(6, 14)])
    )
    changed = {
        "pretrain": tmp_path / "model",
        "actor_train.data_args.file_name": tmp_path / "pairs.json",
        "validation.data_args.file_name": tmp_path / "pairs.json",
        "output_dir": tmp_path / "output",
        "logging_dir": tmp_path / "logs",
        "checkpoint_config.output_dir": tmp_path / "copies",
        "tracker_kwargs.log_dir": tmp_path / "board",
        "actor_train.device_mapping": "[0]",
        "reference.device_mapping": "[0]",
        "platform": "cpu",
        "report_html": "false",
    }
    script = ROOT / "examples" / "qwen2.5-3B-dpo_megatron" / "run_dpo_pipeline.sh"
    command = ["bash", str(script), *(f"{key}={value}" for key, value in changed.items())]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [run_dir] = [path.parent for path in (tmp_path / "output").glob("*/metrics.jsonl")]
    lines = rows_of(run_dir / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 10  # its epochs, of one small step each
    assert losses[0] == pytest.approx(math.log(2), rel=1e-3)
    assert list((tmp_path / "board").glob("**/events.out.tfevents*"))
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
