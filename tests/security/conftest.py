"""A folder with a real tiny model and pairs, the command as a user runs it, and a bait that must never be taken."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.commands.conftest import exits
from tests.tiny import make_model, make_pairs, nest

MARKER = "code-ran-here"
Config = Callable[..., Path]
Data = Callable[..., str]


class Bait:
    """Unpickled, it makes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(autouse=True)
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
def lora(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the model."""
    folder = tmp_path_factory.mktemp("adapter")
    base: Any = AutoModelForCausalLM.from_pretrained(good / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder)
    return folder


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


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
    exits(0, "train", file, *settings, *sizes)
    return folder / "run"


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be spoilt."""
    return Path(shutil.copytree(good / "base", tmp_path / "base"))


def run_values(good: Path, folder: Path) -> dict[str, Any]:
    """A config of two steps that writes to a folder."""
    data = {"file_name": str(good / "pairs.jsonl"), "cache_dir": str(good / "cache")}
    return {
        "exp_name": "run",
        "output_dir": str(folder / "out"),
        "logging_dir": str(folder / "logs"),
        "pretrain": str(good / "base"),
        "sequence_length": 64,
        "max_steps": 2,
        "actor_train": {
            "data_args": data,
            "training_args": {"per_device_train_batch_size": 8},
        },
    }


@pytest.fixture
def config(good: Path, tmp_path: Path) -> Config:
    """The YAML of a run of two steps in the test's own folder; dotted keys change it."""

    def write(**changes: Any) -> Path:
        values = run_values(good, tmp_path)
        if (tmp_path / "base").exists():
            values["pretrain"] = str(tmp_path / "base")
        file = tmp_path / "dpo.yaml"
        file.write_text(yaml.safe_dump(nest(values, changes)))
        return file

    return write


@pytest.fixture
def data(config: Config) -> Data:
    """`rather data` of a file, with its exit code; returns what `exits` does."""
    return lambda code, file, **changes: exits(
        code, "data", config(actor_train__data_args__file_name=str(file), **changes)
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The arguments and options of every process that is started."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    start = subprocess.Popen.__init__

    def record(self: Any, command: Any, *rest: Any, **options: Any) -> None:
        calls.append((command, options))
        start(self, command, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    return calls
