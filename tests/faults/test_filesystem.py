"""Clocks that jump, renames that fail, file systems that are read-only or nearly full.

The first two, and a file system that becomes read-only during a run, come from preload.c, a
stand-in for LD_PRELOAD; a tmpfs that is mounted read-only or small is a real one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.faults.fork_server import library
from tests.faults.points import kill
from tests.faults.runs import Run
from tests.faults.world import World

CODES = {0, 9}  # 9: disk full, or a path is not writable
Struck = Callable[..., tuple[list[int], str]]


@pytest.fixture
def struck(world: World) -> Struck:
    """Starts a run with faults of preload.c, then again without them: it must end the same.

    Returns the exit codes and the output of the first start.
    """

    if not library():
        pytest.skip("there is no C compiler for tests/faults/preload.c")

    def start(
        layout: str = "one", *, codes: set[int] = CODES, **faults: object
    ) -> tuple[list[int], str]:
        run = world.run(layout)
        folder = {"FAULT_FOLDER": str(run.config.run_dir)}
        run.environment = {**folder, **{name: str(value) for name, value in faults.items()}}
        first = run.start()
        assert set(first) <= codes, f"exit {first}\n{run.output()}"
        assert "Traceback" not in run.output(), run.output()
        output, run.environment = run.output(), {}
        if any(first):
            assert not any(run.start()), run.output()
        run.assert_like(world.clean(layout))
        return first, output

    return start


@pytest.mark.parametrize(
    ("layout", "every"),
    [("one", 7), *(pytest.param("dp2", n, marks=pytest.mark.faults_all) for n in (1, 50))],
)
def test_a_clock_that_jumps(struck: Struck, layout: str, every: int) -> None:
    """A year ahead and back, many times in a run: no deadline, cache or order depends on it."""
    struck(layout, codes={0}, FAULT_CLOCK=every)


@pytest.mark.parametrize("number", [3])
def test_a_rename_that_fails(struck: Struck, number: int) -> None:
    assert "Input/output error" in struck(FAULT_RENAME=number)[1], "no rename has failed"


@pytest.mark.faults_all
def test_every_rename_fails_once(struck: Struck) -> None:
    for number in count(1):
        if "Input/output error" not in struck(FAULT_RENAME=number)[1]:
            break
    assert number > 10


@pytest.mark.parametrize(
    # A later one would only cost the report.
    "number",
    [20, *(pytest.param(n, marks=pytest.mark.faults_all) for n in range(7, 62, 6))],
)
def test_a_file_system_that_becomes_read_only(struck: Struck, number: int) -> None:
    codes, output = struck(FAULT_READONLY=number)
    assert codes == [9], output
    assert "Read-only file system" in output


# --- a real file system ---


class Disk:
    """A tmpfs at a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def mount(self, options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(self.folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=False)


@pytest.fixture
def disk(world: World) -> Iterator[tuple[Run, Disk]]:
    run = world.run("one")
    made = Disk(run.folder)
    yield run, made
    made.close()


def test_a_read_only_file_system(world: World, disk: tuple[Run, Disk]) -> None:
    run, place = disk
    place.mount("size=100m")
    assert run.start(kill("backward", step=5)) == [-9]
    assert run.config.run_dir.is_relative_to(place.folder)
    place.mount("remount,ro")
    # The log of a start is below the folder of the run.
    before = sorted(path.name for path in run.config.run_dir.iterdir())
    codes, output = start_elsewhere(world, run)
    assert codes == [2], output
    assert "is not writable" in output
    assert sorted(path.name for path in run.config.run_dir.iterdir()) == before
    place.mount("remount,rw,size=100m")
    assert run.start() == [0], run.output()
    run.assert_like(world.clean("one"))


@pytest.mark.parametrize(
    "size", [400, *(pytest.param(n, marks=pytest.mark.faults_all) for n in range(40, 1200, 90))]
)
def test_a_nearly_full_file_system(world: World, disk: tuple[Run, Disk], size: int) -> None:
    run, place = disk
    place.mount(f"size={size}k")
    codes, output = start_elsewhere(world, run)
    assert set(codes) <= CODES, f"exit {codes}\n{output}"
    assert "Traceback" not in output, output
    assert not any(codes) or "No space left" in output or "too full" in output, output
    place.mount("remount,size=100m")
    assert run.start() == [0], run.output()
    run.assert_like(world.clean("one"))


def start_elsewhere(world: World, run: Run) -> tuple[list[int], str]:
    """Start a run whose own folder cannot take the log of the start."""
    codes = run.start(logs=world.folder / f"logs-of-{run.folder.name}")
    return codes, run.output()
