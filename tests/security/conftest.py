"""A folder with a real tiny model and pairs, the command as a user runs it, and a bait that must never be taken."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rather.cli import app
from tests.tiny import make_model, make_pairs

MARKER = "code-ran-here"


class Bait:
    """Unpickled, it makes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What hostile things try to make. The test ends with a look for it."""
    monkeypatch.chdir(tmp_path)  # for a bait that takes no path
    yield tmp_path / MARKER
    assert not list(tmp_path.rglob(MARKER)), "something hostile ran code"


@pytest.fixture
def pickled(marker: Path) -> bytes:
    return pickle.dumps({"model.weight": Bait(marker)})


@pytest.fixture
def python(marker: Path) -> str:
    """A module that makes the marker when it is imported."""
    return f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_model(folder / "base")
    make_pairs(folder / "pairs.jsonl", 24)
    return folder


@pytest.fixture(scope="session")
def finished(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run of one step."""
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "dpo.yaml"
    file.write_text(
        f"pretrain: {good}/base\nactor_train: {{data_args: {{file_name: {good}/pairs.jsonl}}}}\n"
    )
    settings = [
        "exp_name=run",
        f"output_dir={folder}",
        f"logging_dir={folder}/logs",
        "track_with=null",
    ]
    sizes = [
        "max_steps=1",
        "sequence_length=64",
        "actor_train.training_args.per_device_train_batch_size=8",
    ]
    done = rather("train", file, *settings, *sizes)
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be spoilt."""
    return Path(shutil.copytree(good / "base", tmp_path / "base"))


@pytest.fixture
def config(good: Path, tmp_path: Path) -> Callable[..., Path]:
    """The YAML of a run of two steps in the test's own folder; dotted keys change it."""

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "exp_name": "run",
            "output_dir": str(tmp_path / "out"),
            "logging_dir": str(tmp_path / "logs"),
            "pretrain": str(tmp_path / "base" if (tmp_path / "base").exists() else good / "base"),
            "sequence_length": 64,
            "max_steps": 2,
            "actor_train": {
                "data_args": {
                    "file_name": str(good / "pairs.jsonl"),
                    "cache_dir": str(good / "cache"),
                },
                "training_args": {"per_device_train_batch_size": 8},
            },
        }
        for key, value in changes.items():
            *parents, last = key.split("__")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        file = tmp_path / "dpo.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write


def rather(*args: object) -> Result:
    """The command, in this process."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(
        app, [str(arg) for arg in args], env=environment, catch_exceptions=True
    )
