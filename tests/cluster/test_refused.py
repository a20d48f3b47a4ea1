"""Impossible configurations are reported before any process starts."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from rather import Cluster
from rather.cluster.launch import launch
from rather.config.schema import ActorConfig, RoleConfig
from rather.errors import ConfigError
from tests.tiny import make_config

THREE: dict[str, Any] = {"actor_train__device_mapping": [0, 1, 2]}
SPLIT = "actor_train__strategy_args"
# What the config changes -> the keys that the refusal names.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "heads that tp_size does not divide": (
        {**THREE, SPLIT: {"tp_size": 3}},
        [
            "actor_train.strategy_args.tp_size: 3",
            "num_attention_heads: 4",
            "num_key_value_heads: 2",
        ],
    ),
    "more stages than layers": (
        {**THREE, SPLIT: {"pp_size": 3}},
        ["actor_train.strategy_args.pp_size: 3"],
    ),
    "an address without a port": ({"ray": {"address": "head"}}, ["ray.address: 'head'"]),
    "a GPU that is not there": ({**THREE, "platform": "cuda"}, ["platform: cuda"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changes, keys = REFUSED[what]
    config = make_config(tmp_path, **changes)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for start in ("subprocess.Popen.__init__", "multiprocessing.process.BaseProcess.start"):
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError) as refused:
        launch(config, with_reference=False)
    assert [key for key in keys if key not in str(refused.value)] == []


def test_an_address_that_nobody_answers_is_refused(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # kept until the end: no other program can listen here
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = make_config(tmp_path, ray={"address": address}, timeouts={"connect": 1})
        with pytest.raises(ConfigError, match=rf"ray\.address: .+ {address} within 1 s"):
            launch(config, with_reference=False)


@pytest.mark.parametrize(
    ("name", "role"), [("critic", "actor_train"), ("reference", "actor_train"), ("actor_train", "")]
)
def test_what_is_not_a_cluster_is_refused(tmp_path: Path, name: str, role: str) -> None:
    own: RoleConfig = getattr(make_config(tmp_path), role) if role else ActorConfig()
    manager: Any = None  # nothing is placed
    with pytest.raises(
        ConfigError, match=re.escape(f"worker_config: must be the config of role '{name}'")
    ):
        Cluster(name, None, manager, own)
