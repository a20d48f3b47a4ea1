"""Faults attached from outside: where they strike, that they strike once, and that nothing of them stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import inject
from tests.house.source import python_files


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[Any]:
    yield lambda text: inject.arm(text, tmp_path / inject.MARKERS)
    inject.detach()


def test_the_product_knows_nothing_of_faults() -> None:
    named = [file for file in python_files("rather") if "RATHER_FAULT" in file.read_text()]
    assert named == []


def test_an_unknown_fault_is_refused() -> None:
    for text in ("phase=bakward,kind=kill", "phase=save,kind=explode", "phase=save,kind=nan"):
        with pytest.raises(AssertionError):
            inject.parse(text)


def test_a_fault_strikes_where_all_keys_match_and_once_per_run_folder(
    arm: Any, tmp_path: Path
) -> None:
    spec = "step=2,phase=save.write,role=driver,rank=0,visit=2,kind=raise"
    for start in range(2):  # the second time in a resumed run
        arm(spec)
        inject.at_step(1)
        inject.point("save.write")
        inject.at_step(2)
        inject.point("save")
        inject.point("save.write")  # the first visit
        if start == 0:
            with pytest.raises(inject.InjectedFault, match=r"step=2,phase=save\.write"):
                inject.point("save.write")
        inject.point("save.write")
    assert [marker.name for marker in (tmp_path / inject.MARKERS).iterdir()] == [spec]


def test_kinds(arm: Any) -> None:
    arm("phase=metrics,kind=enospc; phase=save,kind=slow,seconds=0; phase=backward,kind=nan")
    with pytest.raises(OSError, match="No space left") as full:
        inject.point("metrics")
    assert full.value.errno == errno.ENOSPC
    inject.point("save")
    inject.point("backward")  # NaN is not for this caller
    assert inject.wants_nan("backward")
    assert not inject.wants_nan("backward")


def test_threads_follow_the_step_of_the_main_thread(arm: Any) -> None:
    arm("")
    inject.at_step(5)
    steps: list[int] = []

    def work() -> None:
        steps.append(inject.step())
        inject.at_step(6)
        steps.append(inject.step())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (steps, inject.step()) == ([5, 6], 5)


def test_a_file_operation_is_a_place_and_detached_it_is_not(arm: Any, tmp_path: Path) -> None:
    plain = os.rename
    arm("phase=save.rename,kind=raise")
    (tmp_path / ".tmp-checkpoint-2-1").mkdir()
    with pytest.raises(inject.InjectedFault):
        os.rename(tmp_path / ".tmp-checkpoint-2-1", tmp_path / "checkpoint-2")
    assert os.rename is not plain
    inject.detach()
    assert os.rename is plain
