"""`rather compare`: equal runs to the bit, and of others what differs, by how much and from which step on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rather.config.run_config import DPOConfig
from rather.tools.compare import best, compare_curves
from tests.commands.conftest import rather, told
from tests.tiny import metrics


@pytest.fixture(scope="module")
def other(trained: Callable[..., DPOConfig]) -> DPOConfig:
    return trained("other", actor_train__training_args__learning_rate=2e-3)


def test_the_same_run_twice_is_equal_to_the_bit(
    trained: Callable[..., DPOConfig], run: DPOConfig
) -> None:
    twin = trained("twin")
    found = told("compare", run.run_dir, twin.run_dir)
    assert found["equal"]
    assert found["weights"]["equal"]
    assert found["config"] == {}
    assert found["first_difference"] is None
    assert "The runs are bit-identical." in rather("compare", run.run_dir, twin.run_dir).stdout


def test_another_learning_rate(run: DPOConfig, other: DPOConfig) -> None:
    """The first step has the same loss, and its learning rate tells them apart; then everything does."""
    found = told("compare", run.run_dir, other.run_dir)
    assert found["config"] == {"actor_train.training_args.learning_rate": [1e-3, 2e-3]}
    assert not found["equal"]
    assert found["first_difference"]["step"] == 1
    assert found["first_difference"]["metric"] == "lr"
    assert found["weights"]["differing"] == found["weights"]["tensors"] > 0
    assert found["weights"]["largest"] > 0
    losses = [
        {line["step"]: line["loss"] for line in metrics(config) if "loss" in line}
        for config in (run, other)
    ]
    gaps = {step: abs(losses[0][step] - losses[1][step]) for step in losses[0]}
    assert found["metrics"]["loss"]["largest"] == max(gaps.values())
    assert gaps[found["metrics"]["loss"]["at"]] == max(gaps.values())
    assert found["metrics"]["loss"]["final"] == [losses[0][3], losses[1][3]]
    assert not any(name.startswith("time/") or "per_second" in name for name in found["metrics"])
    accuracies = {
        line["step"]: line["eval/rewards/accuracies"]
        for line in metrics(run)
        if "eval/loss" in line
    }
    top = max(accuracies.values())
    first = min(step for step, value in accuracies.items() if value == top)
    assert found["metrics"]["eval/rewards/accuracies"]["best"][0] == [top, first]
    table = rather("compare", run.run_dir, other.run_dir).stdout
    assert "They differ from step 1: lr is" in table
    assert "learning_rate" in table


def test_one_bit_of_one_weight(run: DPOConfig, tmp_path: Path) -> None:
    shutil.copytree(run.run_dir, tmp_path / "copy")
    file = tmp_path / "copy" / "model" / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    tensors[name].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    found = told("compare", run.run_dir, tmp_path / "copy")
    assert (found["weights"]["differing"], found["weights"]["in"]) == (1, name)
    assert found["first_difference"] is None
    assert not found["equal"]


def test_a_run_that_ended_earlier(run: DPOConfig, tmp_path: Path) -> None:
    shutil.copytree(run.run_dir, tmp_path / "short")
    shutil.rmtree(tmp_path / "short" / "model")
    file = tmp_path / "short" / "metrics.jsonl"
    file.write_text(
        "".join(
            f"{line}\n" for line in file.read_text().splitlines() if json.loads(line)["step"] < 3
        )
    )
    found = told("compare", run.run_dir, tmp_path / "short")
    assert found["steps"] == [3, 2]
    assert found["first_difference"] is None
    assert found["weights"] is None
    assert not found["equal"]
    assert "Weights were not compared" in rather("compare", run.run_dir, tmp_path / "short").stdout


def test_no_run(folder: Path, run: DPOConfig) -> None:
    done = rather("compare", run.run_dir, folder)
    assert done.exit_code == 2
    assert "not a run folder" in done.output


def test_nonfinite_metrics_are_compared() -> None:
    nan = math.nan
    same = compare_curves("loss", {1: nan, 2: 1.0}, {1: nan, 2: 1.0})
    assert (same["from"], same["largest"]) == (None, 0.0)
    found = compare_curves("loss", {1: 1.0, 2: 1.0}, {1: nan, 2: 2.0})
    assert (found["from"], found["largest"], found["at"]) == (1, math.inf, 1)
    apart = compare_curves("lr", {1: 1.0, 2: 3.0, 3: 1.0}, {1: 1.0, 2: 7.0, 4: 1.0})
    assert apart == {"final": [1.0, 1.0], "from": 2, "largest": 4.0, "at": 2}
    assert best("eval/loss", {1: nan, 2: 0.5, 3: 0.5}) == (0.5, 2)
