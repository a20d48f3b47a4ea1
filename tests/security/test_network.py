"""Nothing needs the network: a run connects to no address, and asks for none."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config


def test_a_run_connects_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError("this machine has no network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    config = make_config(tmp_path, max_steps=1)
    assert DPOPipeline(config).run() == 0
    assert (config.run_dir / "model").exists()
    assert asked == []
