"""RATHER_FAULT: what it takes, where it strikes, and that it strikes once."""

from __future__ import annotations

import ast
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rather import faults
from rather.errors import ConfigError
from rather.pipeline.pipeline import DPOPipeline
from tests.house.source import ROOT, python_files, tree, where
from tests.tiny import make_config


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def armed(text: str, role: str = "driver", rank: int = 0) -> None:
        monkeypatch.setenv(faults.VARIABLE, text)
        faults.arm(tmp_path, role, rank)

    yield armed
    faults.at_step(0)
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.arm(tmp_path, "driver", 0)


def places() -> dict[str, list[str]]:
    """Phases that the source names in `faults.point` and `faults.wants_nan`, with where it does."""
    found: dict[str, list[str]] = {}
    for file in python_files("rather"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "faults.point",
                "faults.wants_nan",
            ):
                (phase,) = node.args
                assert isinstance(phase, ast.Constant), (
                    f"{where(file, node)}: a phase is written out"
                )
                found.setdefault(phase.value, []).append(where(file, node))
    return found


def test_every_point_is_listed_and_every_phase_has_a_point() -> None:
    assert {phase: at for phase, at in places().items() if phase not in faults.PHASES} == {}
    assert set(faults.PHASES) - places().keys() == set()


def test_the_page_lists_every_phase() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "\n".join(f"| `{phase}` | {place} |" for phase, place in faults.PHASES.items()) in page


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "step=3,phase=bakward,kind=kill",
            "phase 'bakward' is unknown; there are data, .*backward",
        ),
        ("phase=backward,kind=explode", "kind 'explode' is unknown; there are kill, raise"),
        (
            "phase=backward,kind=kill,role=actor",
            "role 'actor' is unknown; there are driver, actor_train, reference",
        ),
        ("phase=backward,kind=kill,when=now", "'when=now' is unknown; it takes step, rank"),
        ("phase=backward,kind=kill,step=soon", "step 'soon' is no number from 0 on"),
        ("phase=backward,kind=kill,visit=0", "visit '0' is no number from 1 on"),
        ("step=3,kind=kill", "names no phase; add phase="),
        ("phase=backward", "names no kind; add kind="),
        (
            "phase=save.rename,kind=nan",
            "kind=nan strikes in phase forward or backward, not in 'save.rename'",
        ),
        ("phase=backward,kind=kill,seconds=3", "seconds belongs to kind=slow"),
    ],
)
def test_an_unknown_word_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"RATHER_FAULT: .*{named}"):
        faults.parsed(text)


def test_a_wrong_word_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "phase=nowhere,kind=kill")
    with pytest.raises(ConfigError, match="nowhere"):
        DPOPipeline(make_config(tmp_path))
    assert not (tmp_path / "output").exists()


def test_it_strikes_where_all_words_fit_and_once_per_run_folder(arm: Any, tmp_path: Path) -> None:
    spec = "step=2,phase=save.write,role=driver,rank=0,visit=2,kind=raise"
    for _ in range(2):  # the second time in a run that goes on
        arm(spec)
        faults.at_step(1)
        faults.point("save.write")
        faults.at_step(2)
        faults.point("save")
        faults.point("save.write")  # the first visit
        if not (tmp_path / faults.MARKERS).exists():
            with pytest.raises(faults.InjectedFault, match=r"step=2,phase=save\.write"):
                faults.point("save.write")
        faults.point("save.write")
    arm(spec, rank=1)
    faults.at_step(2)
    faults.point("save.write")
    faults.point("save.write")
    assert [marker.name for marker in (tmp_path / faults.MARKERS).iterdir()] == [
        "step=2,phase=save.write,role=driver,rank=0,visit=2,kind=raise"
    ]


def test_kinds(arm: Any) -> None:
    arm("phase=metrics,kind=enospc; phase=save,kind=slow,seconds=0; phase=backward,kind=nan")
    with pytest.raises(OSError, match="No space left") as full:
        faults.point("metrics")
    assert full.value.errno == errno.ENOSPC
    faults.point("save")
    faults.point("backward")  # a NaN is made by the one who asks
    assert faults.wants_nan("backward")
    assert not faults.wants_nan("backward")


def test_a_worker_s_points_have_its_role_and_a_thread_its_step(arm: Any) -> None:
    class Worker:
        role = "reference"

        @faults.by_role
        def work(self) -> None:
            faults.point("forward")

    arm("step=5,phase=forward,role=reference,kind=raise")
    faults.at_step(5)
    faults.point("forward")  # not in the worker
    told: list[BaseException] = []

    def ahead() -> None:
        assert faults.step() == 5  # that of the main thread
        faults.at_step(6)
        Worker().work()
        faults.at_step(5)
        try:
            Worker().work()
        except faults.InjectedFault as error:
            told.append(error)

    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join()
    assert len(told) == 1
    assert faults.step() == 5


def test_nothing_is_armed_without_a_word(arm: Any, tmp_path: Path) -> None:
    arm("")
    for phase in faults.PHASES:
        faults.point(phase)
    assert not (tmp_path / faults.MARKERS).exists()
