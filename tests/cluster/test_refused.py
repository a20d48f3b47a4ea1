"""Impossible configurations are reported before any process starts."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from rather.cluster.launch import launch
from rather.errors import ConfigError
from tests.tiny import make_config


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"tp_size": 3},
            r"actor_train.strategy_args.tp_size: 3 does not divide num_attention_heads: 4 of .+base",
        ),
        (
            {"pp_size": 3},
            r"actor_train.strategy_args.pp_size: 3 ranks x 1 = 3 stages, but .+base has only 2 layers",
        ),
    ],
)
def test_a_model_that_cannot_be_sharded_this_way_is_refused_first(
    tmp_path: Path, sizes: dict[str, int], said: str
) -> None:
    config = make_config(
        tmp_path, actor_train__device_mapping=[0, 1, 2], actor_train__strategy_args=sizes
    )
    with pytest.raises(ConfigError, match=said) as refused:
        launch(config, with_reference=False)
    assert "tp_size" not in said or "num_key_value_heads: 2" in str(
        refused.value
    )  # every problem at once


def connect_to(address: str, tmp_path: Path) -> None:
    launch(
        make_config(tmp_path, ray={"address": address}, timeouts={"connect": 1}),
        with_reference=False,
    )


def test_an_address_that_nobody_answers_is_reported_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # kept until the end: no other program can listen here
        port = silent.getsockname()[1]
        said = rf"ray.address: nothing answers at 127.0.0.1:{port} within 1 s .+refused"
        with pytest.raises(ConfigError, match=said):
            connect_to(f"127.0.0.1:{port}", tmp_path)
    assert time.monotonic() - began < 60


def test_an_address_without_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        connect_to("head", tmp_path)


def test_a_missing_gpu_is_reported_without_starting_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = make_config(tmp_path, platform="cuda", actor_train__device_mapping=[0, 1])
    with pytest.raises(
        ConfigError, match="platform: cuda, but this machine has no GPU that PyTorch can use"
    ):
        launch(config, with_reference=False)
