"""kill -9 at random moments over all stages: the same command ends in the same files and weights."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rather.tools.rounds.run import run_rounds
from rather.tools.rounds.settings import load_plan
from tests.commands.fake_server import Reply, serving
from tests.commands.test_servers import honest
from tests.rounds.test_rounds import quick_forgetting
from tests.rounds.tiny_rounds import write_plan
from tests.tiny import _quietly, fork_context, in_child

KILLS = 4


def rounds_in(folder: str) -> int:
    os.chdir(folder)
    with quick_forgetting():
        run_rounds(load_plan(Path("rounds.yaml")))
    return 0


# --- answers of a server ---

IN_FLIGHT = 4


class KillsWhoAsks:
    """A server whose client dies with some request; the text follows from prompt and seed."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.left = 0  # requests until the next kill
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.count += 1
            self.left -= 1
            if self.pid and self.left == 0:
                os.kill(self.pid, signal.SIGKILL)
        return honest(path, body)


def killed_by(server: KillsWhoAsks, folder: Path, requests: int) -> bool:
    """Return whether the server killed the command, with one of its next requests."""
    child = fork_context().Process(target=_quietly, args=(rounds_in, str(folder)))
    with server.lock:
        child.start()
        server.pid, server.left = child.pid, requests
    child.join()
    server.pid = None
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def answers_of(folder: Path) -> dict[str, Any]:
    """Return the rows and the repeated requests of each file of answers."""
    found = {}
    for meta in sorted(folder.rglob("*.jsonl.meta.json")):
        file = meta.with_name(meta.name.removesuffix(".meta.json"))
        rows = [json.loads(line)["responses"] for line in file.read_text().splitlines()]
        repeated = json.loads(meta.read_text())["requests"]["repeated"]
        found[str(file.relative_to(folder))] = (rows, repeated)
    return found


@pytest.mark.wide
def test_a_kill_repeats_at_most_the_requests_in_flight(tmp_path: Path) -> None:
    behaviour, draw, kills = KillsWhoAsks(), random.Random(0), 0
    names = ["base", "output/own/round-1/train/model"]
    with serving(behaviour, names) as server:
        keys = {"url": server.url, "concurrency": IN_FLIGHT}
        rounds = {"count": 1, "server": keys, "max_new_tokens": 8}

        write_plan(tmp_path / "whole", rounds=rounds, max_steps=2)
        assert in_child(rounds_in, str(tmp_path / "whole")) == 0
        whole = answers_of(tmp_path / "whole")
        requests = behaviour.count
        assert len(whole) == 3  # held-out prompts twice, and answers
        attempt = 0
        while kills < KILLS:
            attempt += 1
            folder, behaviour.count, kills_of_run = tmp_path / f"killed-{attempt}", 0, 0
            write_plan(folder, rounds=rounds, max_steps=2)
            while killed_by(behaviour, folder, draw.randint(3, 12)):
                kills_of_run += 1
            kills += kills_of_run
            found = answers_of(folder)
            assert {name: rows for name, (rows, _) in found.items()} == {
                name: rows for name, (rows, _) in whole.items()
            }
            repeated = sum(count for _, count in found.values())
            assert behaviour.count - requests <= repeated <= IN_FLIGHT * kills_of_run
            weights = "output/own/round-1/train/model/model.safetensors"
            assert (folder / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    print(f"{kills} kills in {attempt} runs of {requests} requests")
