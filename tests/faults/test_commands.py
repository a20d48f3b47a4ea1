"""Kills during `rather eval`, `export`, `merge` and `sweep`: run again, they give the same result."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from tests.faults.fork_server import fork_server
from tests.faults.runs import config_of, train
from tests.faults.strikes import processes
from tests.faults.world import World
from tests.fuzz.harness import command
from tests.tiny import is_time

NAMES = ("eval", "export", "merge", "sweep")
ADAPTER = {"actor_train__model_args__lora_rank": 2, "max_steps": 2}
KILLS = 8  # of each command in make test-faults


class Commands:
    """Commands on finished runs, each start in a folder of its own."""

    def __init__(self, world: World) -> None:
        world.clean("one")
        self.folder, self.trained = world.folder / "commands", world.folder / "clean-one"
        self.numbers = count(1)

    def place(self) -> Path:
        place = self.folder / str(next(self.numbers))
        place.mkdir(parents=True)
        return place

    def arguments(self, name: str, place: Path) -> list[str]:
        """The command; what it writes is in `place`."""
        if name == "export":
            return ["export", str(self.trained / "run"), str(place / "out"), "--dtype", "bf16"]
        if name == "merge":
            return ["merge", str(self.adapter()), "--out", str(place / "out")]
        file = place / "dpo.yaml"
        file.write_text(dump_yaml(config_of(place, "one", {"max_steps": 2, "eval_steps": 1})))
        if name == "sweep":
            return ["sweep", str(file), "beta=0.1,0.2"]
        return ["eval", str(file), "--model", str(self.trained / "run" / "model")]

    def adapter(self) -> Path:
        """Return the adapter of a run that is trained for it once."""
        folder = self.folder / "adapted"
        config = config_of(folder, "one", ADAPTER)
        if not folder.exists():
            assert fork_server().run(train, (folder, "one", ADAPTER), [{}], self.place()) == [0]
        return config.run_dir / "adapter"

    def start(self, arguments: list[str], place: Path, kill_after: float | None = None) -> int:
        ended = threading.Event()

        def kill() -> None:
            if not ended.wait(kill_after):
                for child in processes("one"):
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            (code,) = fork_server().run(run_command, (arguments,), [{}], place / "logs")
        finally:
            ended.set()
            killer.join()
        return code

    def result(self, name: str, place: Path) -> Any:
        """Return what must be the same; None if there is nothing yet."""
        if name == "eval":
            text = "\n" + (place / "logs" / "0.log").read_text()
            found = json.loads(text[text.rindex("\n{") : text.rindex("}") + 1])
            return {key: value for key, value in found.items() if not is_time(key)}
        if name == "sweep":
            models = sorted(place.glob("*-sweep/*/model/model.safetensors"))
            return [(file.parents[1].name, _sha(file)) for file in models]
        if not (place / "out").exists():
            return None
        return {file.name: _sha(file) for file in (place / "out").iterdir()}


def run_command(arguments: list[str]) -> int:
    code = command(arguments)
    sys.stdout.flush()
    return code


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def commands(world: World) -> Commands:
    return Commands(world)


def kill_and_run_again(commands: Commands, name: str, kills: int) -> None:
    began, place = time.monotonic(), commands.place()
    assert commands.start(commands.arguments(name, place), place) == 0
    expected, took = commands.result(name, place), time.monotonic() - began
    draw = random.Random(name)
    for _ in range(kills):
        place = commands.place()
        arguments = commands.arguments(name, place)
        code = commands.start(arguments, place, draw.uniform(0.1, 0.9) * took)
        if name in ("export", "merge"):  # complete or not there
            assert commands.result(name, place) in (None, expected)
        if code or name == "sweep":
            assert code in (0, -signal.SIGKILL)
            if name == "sweep" or name == "eval" or commands.result(name, place) is None:
                assert commands.start(arguments, place) == 0, (place / "logs" / "0.log").read_text()
        assert commands.result(name, place) == expected
        assert [path for path in place.rglob("*") if path.name.startswith((".tmp", ".old"))] == []


@pytest.mark.parametrize(
    "name",
    [each if each == "export" else pytest.param(each, marks=pytest.mark.wide) for each in NAMES],
)
def test_a_killed_command_is_run_again(commands: Commands, name: str) -> None:
    kill_and_run_again(commands, name, 1)


@pytest.mark.faults_all
@pytest.mark.parametrize("name", NAMES)
def test_commands_killed_at_random_times(commands: Commands, name: str) -> None:
    kill_and_run_again(commands, name, KILLS)
