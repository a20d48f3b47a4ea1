"""`rather tune` on a model that speaks a small language: what it chooses, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rather.config.load import load
from rather.tools import tune
from tests.commands.conftest import json_of, refusal, succeed, told
from tests.health.tiny_runs import RATE, Case, TinyRuns, asked_as_trained, kind

CASE = Case(kind, kind, count=64, steps=8, rate=RATE / 3)


def test_a_setting_is_chosen_and_a_broken_one_refused(
    tiny_runs: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "RANGE", (1.0, 100.0))
    monkeypatch.setattr(tune, "AROUND", (1.0,))
    monkeypatch.setattr(tune, "MOST_FINALISTS", 2)
    texts = asked_as_trained(tmp_path)
    config = tiny_runs.config("tuned", CASE, output_dir=str(tmp_path), forgetting=str(texts))
    file, out = tmp_path / "dpo.yaml", tmp_path / "best.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    options = ("tune", file, "--budget", "600s", "--out", out)
    found = told(*options)
    broken = found["runs"][f"range-learning_rate-{100 * RATE / 3:.3g}"]
    assert "drift_limit" in broken["problem"]
    best = found["runs"][found["best"]]
    assert found["best"].startswith("final-")
    assert best["steps"] == 8
    assert best["drift"] < 1.0
    assert best["forgetting_loss"] > 0  # measured, though the run is short
    finals = found["finalists"]
    assert set(finals) == {"nothing", *(name for name in found["runs"] if "final-" in name)}
    assert (
        finals[found["best"]]["loss"] < finals["nothing"]["loss"] == pytest.approx(0.6931, abs=1e-4)
    )
    assert 20 < finals["nothing"]["pairs"] < 104
    written = load(out)
    assert written.actor_train.training_args.learning_rate == float(best["values"][tune.RATE])
    assert written.actor_train.training_args.lr_scheduler_type != "constant"
    trained = load(tmp_path / "tuned-tune" / found["best"] / "config.yaml")
    for name in ("lr_scheduler_type", "num_train_epochs", "warmup_ratio"):
        wanted = getattr(written.actor_train.training_args, name)
        assert getattr(trained.actor_train.training_args, name) == wanted
    # Nothing is left to do, and no second is spent; the answer of the winner is on screen.
    again = succeed(*options)
    assert json_of(tmp_path / "tuned-tune" / "tune.json")["seconds"] == found["seconds"]
    assert "before: w" in again.output
    assert "after: w" in again.output
    assert f"Best: {found['best']}" in again.output
    assert "held-out pairs decide; with fewer than" in again.output
    assert "was tuned with other settings" in refusal(2, *options, "beta=0.5")
