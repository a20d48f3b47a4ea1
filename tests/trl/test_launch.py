"""`accelerate launch` of a script that imports rather.trl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import json_of
from tests.golden.trl_run import make_model
from tests.house.source import ROOT
from tests.trl.launched import train

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1",
          "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip


def launch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.wide
def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    """On CPUs its launcher of torchrun is --multi_gpu; with --cpu it starts one process."""
    model = make_model(tmp_path / "model")
    alone = train(str(model), 4, tmp_path / "one")
    done = launch("--multi_gpu", "--num_processes", 2, "-m", "tests.trl.launched", model, 2,
                  tmp_path / "two")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    divided = json_of(tmp_path / "two.json")
    assert divided["processes"] == 2
    for one, two in zip(alone[:2], divided["history"][:2], strict=True):
        for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "num_tokens"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name


@pytest.mark.wide
def test_its_fsdp_is_refused_by_name(tmp_path: Path) -> None:
    """test_arguments.py has the variables that its files set; this is a start by the launcher."""
    done = launch("--use_fsdp", "--num_processes", 1, "-m", "tests.trl.launched", "model", 2,
                  tmp_path)  # fmt: skip
    assert done.returncode != 0
    assert "accelerate's config file: fsdp_config" in done.stderr, done.stderr[-3000:]
