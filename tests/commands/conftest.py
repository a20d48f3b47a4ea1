"""Small trained runs that all tests of the commands look at: of whole weights and of an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from rather.cli import app
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config

SHORT = {"max_steps": 3, "save_steps": 2}


def rather(*args: object, input: str | None = None) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=environment, input=input)


def told(*args: object) -> Any:
    """What a command prints as JSON."""
    done = rather(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of verdicts for one test: two servers may have the same port one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rather" / "verdicts"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="session")
def trained(folder: Path) -> Callable[..., DPOConfig]:
    """Trains a run of this name in the folder that all share."""

    def train(name: str, **changes: Any) -> DPOConfig:
        torch.set_num_threads(1)
        # A GPU's own choice is bf16, which the comparisons of this folder are too exact for.
        config = make_config(
            folder, exp_name=name, actor_train__model_args__dtype="fp32", **SHORT, **changes
        )
        if not (config.run_dir / "model").exists():
            DPOPipeline(config).run()
        return config

    return train


@pytest.fixture(scope="session")
def run(trained: Callable[..., DPOConfig]) -> DPOConfig:
    return trained("run")


@pytest.fixture(scope="session")
def lora(trained: Callable[..., DPOConfig]) -> DPOConfig:
    rates = {"actor_train__training_args__learning_rate": 0.05}
    return trained("lora", actor_train__model_args__lora_rank=4, **rates)
