"""A loss is one file, and so is a data format: in rather/losses/ or rather/data/formats/, or
anywhere and named by --import. Nothing but the command line names such a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rather.cli import main
from rather.config import plugins
from rather.config.load import load_config
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from tests.commands.conftest import refusal
from tests.house.source import ROOT
from tests.tiny import in_child, make_model, make_pairs

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
FORMAT = '''
"""Rows of a question with a good and a bad answer."""

from rather.data.formats import data_format


@data_format("question", "good", "bad")
def good_and_bad(row):
    return row["question"], (row["good"], row["bad"])
'''
PAIRS = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of the new format, a YAML that names both, and the two new files."""
    folder = tmp_path_factory.mktemp("adding")
    make_model(folder / "base")
    pairs = make_pairs(folder / "pairs.jsonl", PAIRS)
    text = pairs.read_text(encoding="utf-8")
    for shipped, own in (("prompt", "question"), ("chosen", "good"), ("rejected", "bad")):
        text = text.replace(f'"{shipped}":', f'"{own}":')
    pairs.write_text(text, encoding="utf-8")
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
        "actor_train": {"data_args": {"file_name": str(pairs), "format": "good_and_bad"}},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (folder / "my_loss.py").write_text(LOSS, encoding="utf-8")
    (folder / "my_format.py").write_text(FORMAT, encoding="utf-8")
    return folder


def check_training(home: Path, package: Path, name: str, *arguments: str) -> None:
    """Train in a process that imports `package`, and check the run."""
    train = ("-m", "rather", "train", str(home / "own.yaml"), f"exp_name={name}")
    done = python(package, *train, *arguments)
    assert done.returncode == 0, done.stderr
    check_run(home / "output" / name)


def python(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that imports `package`."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def check_run(run: Path) -> None:
    """Check that the run used loss and format."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # Policy and reference are equal in the first step, so that only the margin remains.
    assert float(json.loads(lines[0])["loss"]) == 3.0
    report = json.loads((run / "data_report.json").read_text(encoding="utf-8"))
    assert report["train"]["pairs"] == PAIRS


def imports(home: Path) -> list[str]:
    return [f"--import={home / name}" for name in ("my_loss.py", "my_format.py")]


def test_a_loss_and_a_format_by_import(home: Path) -> None:
    arguments = ["train", str(home / "own.yaml"), "exp_name=imported", *imports(home)]
    assert in_child(_rather, arguments) == 0
    check_run(home / "output" / "imported")


def _rather(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    main()


@pytest.fixture
def package(home: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the package that has both files."""
    shutil.copytree(ROOT / "rather", tmp_path / "rather")  # compiled already
    shutil.copy(home / "my_loss.py", tmp_path / "rather" / "losses" / "wide.py")
    shutil.copy(home / "my_format.py", tmp_path / "rather" / "data" / "formats" / "good.py")
    return tmp_path


def test_a_loss_and_a_format_by_files_in_the_package(home: Path, package: Path) -> None:
    check_training(home, package, "found")


def test_files_in_the_package_are_known(package: Path) -> None:
    probe = "from rather.losses.losses import LOSSES; from rather.data.formats import FORMATS; "
    probe += "print('wide_hinge' in LOSSES, 'good_and_bad' in FORMATS)"
    done = python(package, "-c", probe)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert "wide_hinge" not in LOSSES


@pytest.mark.wide
def test_a_loss_and_a_format_by_import_on_ray_workers(home: Path) -> None:
    pytest.importorskip("ray")
    devices = ["actor_train.device_mapping=[0,1]", "platform=cpu"]
    check_training(home, ROOT, "ray", *imports(home), *devices)


def test_an_unknown_format_is_an_error_of_the_config(home: Path, tmp_path: Path) -> None:
    values = yaml.safe_load((home / "own.yaml").read_text(encoding="utf-8"))
    del values["pref_loss"], values["loss_args"]
    values["actor_train"]["data_args"]["format"] = "instrucion"
    (tmp_path / "typo.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    output = refusal(2, "train", tmp_path / "typo.yaml")
    assert "actor_train.data_args.format (typo.yaml:" in output
    assert "unknown data format 'instrucion'; did you mean 'instruction'?" in output


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
