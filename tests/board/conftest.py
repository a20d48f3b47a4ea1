"""Two tiny trained runs that differ in beta, with findings, incidents and answers, and a board
over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.board.inspector import Inspector
from rather.tools.board.serve import Board
from tests.tiny import make_config

STATS = {"tokens": 4, "repetition": 0.25, "ended": True}
FINDING = {"step": 3, "name": "chosen_falling", "severity": "warning", "text": "Chosen answers become less likely.",
           "number": 0.5, "advice": "Lower the learning rate."}  # fmt: skip
INCIDENT = {"time": "2030-01-01T00:00:00+00:00", "kind": "spike", "step": 4, "grad_norm": 9.5}
ANSWER = {"step": 5, "prompt": "w1 w2", "reference": "w3", "policy": "w4 w5", "reference_stats": STATS,
          "policy_stats": STATS}  # fmt: skip


def add_line(file: Path, record: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DPOConfig]:
    folder = tmp_path_factory.mktemp("board")
    common: dict[str, Any] = {"max_steps": 5, "eval_steps": 3, "save_steps": 3}
    common |= {"logging_steps": 1, "report_html": True}
    changes: dict[str, dict[str, Any]] = {"first": {}, "second": {"beta": 0.3}}
    configs = {
        name: make_config(folder, exp_name=name, **common, **each) for name, each in changes.items()
    }
    for config in configs.values():
        assert DPOPipeline(config).run() == 0
    run_dir = configs["first"].run_dir
    for name, line in (("health", FINDING), ("incidents", INCIDENT), ("answers", ANSWER)):
        add_line(run_dir / f"{name}.jsonl", line)
    return configs


@pytest.fixture(scope="session")
def inspector() -> Inspector:
    return Inspector()


@pytest.fixture
def serve(inspector: Inspector) -> Iterator[Callable[[Path], Board]]:
    boards: list[Board] = []

    def started(folder: Path) -> Board:
        board = Board(folder, inspector=inspector)
        boards.append(board)
        Thread(target=board.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return board

    yield started
    for board in boards:
        board.shutdown()
        board.server_close()


@pytest.fixture
def board(trained: dict[str, DPOConfig], serve: Callable[[Path], Board]) -> Board:
    return serve(Path(trained["first"].output_dir))


def get(
    board: Board, path: str, *, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    """With the token in a header, unless other headers are given."""
    connection = HTTPConnection("127.0.0.1", board.server_port, timeout=60)
    connection.request(method, path, headers=headers or {"Authorization": f"Bearer {board.token}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def asked(board: Board, path: str) -> Any:
    answer, body = get(board, path)
    assert answer.status == 200, body
    return json.loads(body)


def rows(board: Board) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in asked(board, "/api/runs")["runs"]}
