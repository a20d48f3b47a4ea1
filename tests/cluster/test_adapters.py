"""Adapters on Ray: policy and reference are one model there too, the run is that of one process,
kills cost no bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.compare import MODEL, assert_close
from tests.tiny import make_config

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

ON_RAY: dict[str, Any] = {"actor_train__device_mapping": [0, 1], "ray": {"address": "auto"}}


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    options: dict[str, Any] = {
        "max_steps": 5,
        "save_steps": 2,
        "train_batch_size": 8,
        "actor_train__model_args__lora_rank": 4,
        "actor_train__training_args": {"learning_rate": 3e-3, "adam_epsilon": 1e-6},
    }
    return make_config(folder, exp_name=name, **options, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    config = config_of(tmp_path_factory.mktemp("adapters"), "alone")
    assert DPOPipeline(config).run() == 0
    return config


def folder_of(config: DPOConfig) -> Path:
    return config.run_dir.parents[1]


def test_ray_trains_as_one_process_does(alone: DPOConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rather")
    config = config_of(folder_of(alone), "dp2", reference__cache__enabled=False, **ON_RAY)
    assert DPOPipeline(config).run() == 0
    assert "the policy with its adapters off; there is no second model" in caplog.text
    files = ("adapter/adapter_model.safetensors", MODEL)
    assert_close(alone, config, "grad_norm", "eval/loss", files=files, within=1e-5)
