"""kill -9 at random moments over all stages: the same command ends in the same files and weights."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from rather.tools.rounds.run import run_rounds
from rather.tools.rounds.settings import load_plan
from tests.rounds.test_rounds import digests, quick_forgetting
from tests.rounds.tiny_rounds import write_plan
from tests.tiny import _quietly, fork_context, in_child

KILLS = 20


def rounds_in(folder: str) -> int:
    os.chdir(folder)
    with quick_forgetting():
        run_rounds(load_plan(Path("rounds.yaml")))
    return 0


def killed_after(folder: Path, seconds: float) -> bool:
    """Return whether the command was killed; False if it had ended before."""
    child = fork_context().Process(target=_quietly, args=(rounds_in, str(folder)))
    child.start()
    child.join(seconds)
    assert child.pid
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def newest_stage(folder: Path) -> str:
    files = [file for file in folder.rglob("*") if file.is_file() and ".cache" not in file.parts]
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    return "/".join(newest.relative_to(folder).parts[:3])


@pytest.mark.wide
def test_twenty_random_kills_change_nothing(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write_plan(whole)
    began = time.monotonic()
    assert in_child(rounds_in, str(whole)) == 0
    duration = time.monotonic() - began
    draw, kills, moments = random.Random(0), 0, Counter[str]()
    attempt = 0
    while kills < KILLS:
        attempt += 1
        folder = tmp_path / f"killed-{attempt}"
        write_plan(folder)
        while killed_after(folder, draw.uniform(0.05, 0.5) * duration):
            kills += 1
            moments[newest_stage(folder)] += 1
        assert digests(folder / "output/own") == digests(whole / "output/own")
    print(f"{kills} kills in {attempt} runs of {duration:.1f} s; last written: {dict(moments)}")
