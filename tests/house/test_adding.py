"""A loss is one file: in rather/losses/, or anywhere and named by --import. Nothing but the
command line names such a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rather.config import plugins
from rather.config.load import load_config
from rather.errors import ConfigError
from tests.house.source import ROOT
from tests.tiny import make_model, make_pairs

LOSS = '''
"""A hinge with a margin of its own."""

import torch

from rather.losses import loss
from rather.losses.losses import gap, log_ratios


@loss()
def wide_hinge(x, *, beta=0.1, my_margin=1.0):
    """max(0, my_margin - beta (a - b))."""
    return torch.relu(my_margin - beta * gap(log_ratios(x)))
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, pairs, a YAML that names the new loss, and the loss's file."""
    folder = tmp_path_factory.mktemp("adding")
    make_model(folder / "base")
    make_pairs(folder / "pairs.jsonl", 16)
    values = {
        "pretrain": str(folder / "base"),
        "pref_loss": "wide_hinge",
        "loss_args": {"my_margin": 3.0},
        "sequence_length": 64,
        "track_with": None,
        "report_html": False,
        "max_steps": 2,
        "output_dir": str(folder / "output"),
        "logging_dir": str(folder / "logs"),
        "actor_train": {"data_args": {"file_name": str(folder / "pairs.jsonl")}},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (folder / "my_loss.py").write_text(LOSS, encoding="utf-8")
    return folder


def first_loss(home: Path, package: Path, *arguments: str) -> float:
    """Train in a process that imports `package`, and return the first logged loss."""
    command = [sys.executable, "-m", "rather", "train", str(home / "own.yaml"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name = next(each.partition("=")[2] for each in arguments if each.startswith("exp_name="))
    lines = (home / "output" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[0])["loss"])


def test_a_loss_by_import(home: Path) -> None:
    loss = first_loss(home, ROOT, "exp_name=imported", f"--import={home / 'my_loss.py'}")
    assert loss == 3.0  # policy and reference are equal in the first step: the margin remains


def test_a_loss_by_a_file_in_the_package(home: Path, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "rather", tmp_path / "rather", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(home / "my_loss.py", tmp_path / "rather" / "losses" / "wide.py")
    assert first_loss(home, tmp_path, "exp_name=found") == 3.0


@pytest.mark.wide
def test_a_loss_by_import_on_ray_workers(home: Path) -> None:
    pytest.importorskip("ray")
    devices = ["actor_train.device_mapping=[0,1]", "platform=cpu"]
    loss = first_loss(home, ROOT, "exp_name=ray", f"--import={home / 'my_loss.py'}", *devices)
    assert loss == 3.0


def test_a_yaml_cannot_name_a_file_to_import(home: Path) -> None:
    for key in ("import", "imports", "plugins"):
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(home / "own.yaml", [f"{key}={home / 'my_loss.py'}"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("def broken(:\n", ":1: invalid syntax"),
        ("import math\n", "it registers nothing. Decorate a function with @loss()"),
        ("x = 1\nx.missing\n", ":2: AttributeError: 'int' object has no attribute"),
        (
            "from rather.losses import loss\n\n\n@loss()\ndef ipo(x):\n    return x\n",
            "a loss named 'ipo' is already defined in rather.losses.losses; choose another name",
        ),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, source: str | None, message: str) -> None:
    file = tmp_path / "own_file.py"
    if source is not None:
        file.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError) as found:
        plugins.load([file])
    assert str(found.value).startswith(f"--import {file}")
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert not plugins.loaded()
