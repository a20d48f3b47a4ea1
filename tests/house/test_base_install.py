"""The base install trains on one device without ray and tensorboard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rather.config.load import dump_yaml
from tests.house.source import ROOT
from tests.tiny import make_config

# Hides packages from every Python process that has this folder on its path.
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def without_extras(name, path=None, target=None):
    hidden = ("ray", "tensorboard", "wandb", "trackio", "mlflow", "swanlab")
    return None if name.partition(".")[0] in hidden else find(name, path, target)

PathFinder.find_spec = staticmethod(without_extras)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained without the extras, as the demo does."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "sitecustomize.py").write_text(HIDE)
    (folder / "dpo.yaml").write_text(dump_yaml(make_config(folder, max_steps=2, report_html=True)))
    done = rather(folder, "train", "dpo.yaml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def rather(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "rather", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.wide
def test_a_run_needs_no_extra(trained: Path) -> None:
    assert (trained / "output" / "run" / "model" / "model.safetensors").is_file()
    assert (trained / "output" / "run" / "report.html").is_file()
    probe = "from importlib.util import find_spec; print(find_spec('ray'))"
    hidden = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(trained)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert hidden.stdout.strip() == "None", "the packages are really hidden"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("train", "dpo.yaml", "exp_name=two", "actor_train.device_mapping=[0,1]"), "ray"),
        (("train", "dpo.yaml", "exp_name=tb", "track_with=tensorboard"), "tensorboard"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(
    trained: Path, words: tuple[str, ...], extra: str
) -> None:
    done = rather(trained, *words)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'rather[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    if extra == "ray":
        assert "torchrun, which needs no extra" in done.stderr
