"""Killed on a GPU, the same command ends with the same bits where `deterministic` is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from tests.faults import inject
from tests.faults.points import kill
from tests.faults.runs import Run
from tests.house.source import ROOT
from tests.tiny import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_CUDA: dict[str, Any] = {
    "platform": "cuda",
    "deterministic": True,
    "actor_train__model_args__dtype": "bf16",
}
POINTS = [
    kill("forward", step=1, role="reference"),
    kill("backward", step=2),
    kill("optimizer.done", step=3),
    kill("save.write.sync", step=4, visit=2),
    kill("save.rename.done", step=4),
    kill("evaluate.reference", step=6),
]


class Commands(Run):
    """Every start is the command itself: a process that has seen a GPU cannot fork."""

    def start(self, fault: str = "") -> list[int]:
        self.starts += 1
        file, log = self.folder / "dpo.yaml", self.folder / "starts" / str(self.starts) / "0.log"
        log.parent.mkdir(parents=True)
        file.write_text(dump_yaml(self.config), encoding="utf-8")
        command = [sys.executable, "-m", "rather", "train", str(file)]
        if fault:
            command.append(f"--import={inject.plugin(fault, self.config.run_dir)}")
        with log.open("wb") as out:
            done = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=out, timeout=120, check=False
            )
        return [done.returncode]


def test_six_kills_and_the_same_bits(tmp_path: Path) -> None:
    """One after another in one run: every start imports torch and finds the GPU."""
    make_config(tmp_path)
    whole, broken = (Commands(tmp_path / name, changes=ON_CUDA) for name in ("whole", "broken"))
    whole.until_it_ends("")
    broken.until_it_ends(";".join(POINTS))
    assert broken.starts == len(POINTS) + 1
    assert broken.outcome() == whole.outcome()
