"""Real weights, real outcome: a story model becomes happy, and held-out pairs agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_training_makes_stories_happy(team_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("vaderSentiment")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # all cores: this is about minutes, not about bits
    arguments = ["--data", str(team_data), "--out", str(tmp_path), "--timed-steps", "0"]
    subprocess.run(
        [sys.executable, "bench/stories.py", *arguments], check=True, cwd=ROOT, env=environment
    )
    figures = json.loads((tmp_path / "stories.json").read_text())
    assert figures["held-out accuracy"] >= 0.88
    assert figures["sentiment before"] < 0.6
    assert figures["sentiment after"] > 0.95
