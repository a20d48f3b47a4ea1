"""trace.json: what worked when, readable after a kill, gone on with after a resume."""

from __future__ import annotations

import json
import logging
import signal
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.timeline import TRACKS, Trace
from tests.tiny import in_child, make_config
from tests.train.test_resume import train

Event = dict[str, Any]


def opened(file: Path) -> list[Event]:
    """As Chrome's viewer reads it: without the last comma, the bracket put where it is missing."""
    events: list[Event] = json.loads(file.read_text().rstrip().removesuffix(",") + "]")
    return events


def events(config: DPOConfig, track: str) -> list[Event]:
    """What happened on one track, in the order in which it ended."""
    every = opened(config.run_dir / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in every if event["ph"] == "M"}
    return [event for event in every if event["ph"] == "X" and names[event["tid"]] == track]


def steps(config: DPOConfig, track: str) -> list[tuple[str, int]]:
    return [(event["name"], event["args"]["step"]) for event in events(config, track)]


def overlap(one: Event, other: Event) -> int:
    """Microseconds that two events have in common; negative where they lie apart."""
    ends = (event["ts"] + event["dur"] for event in (one, other))
    return int(min(ends) - max(one["ts"], other["ts"]))


def test_a_reference_in_turn_never_works_while_the_policy_trains(shared: Path) -> None:
    config = make_config(shared, exp_name="traced", max_steps=3, save_steps=2, trace=True)
    assert DPOPipeline(config).run() == 0
    assert steps(config, "data") == [("pack", 1), ("pack", 2), ("pack", 3)]
    assert steps(config, "reference") == [("log-probs", 1), ("log-probs", 2), ("log-probs", 3)]
    assert steps(config, "actor_train") == [("train", 1), ("train", 2), ("train", 3)]
    assert steps(config, "driver") == [("evaluate", 0), ("save", 2), ("evaluate", 3), ("save", 3)]
    asked, trained = events(config, "reference"), events(config, "actor_train")
    rounding = 2  # microseconds
    assert max(overlap(one, other) for one in asked for other in trained) <= rounding
    for one, other in zip(asked, trained, strict=True):
        assert one["ts"] + one["dur"] <= other["ts"] + rounding
        assert other["dur"] > 0


def test_the_trace_of_a_killed_run_is_continued(shared: Path) -> None:
    changes = {"exp_name": "killed-trace", "max_steps": 4, "save_steps": 2, "trace": True}
    config = make_config(shared, **changes)
    assert in_child(train, shared, changes, "3") == -signal.SIGKILL
    assert steps(config, "actor_train") == [("train", 1), ("train", 2)]
    with (config.run_dir / "trace.json").open("a") as file:
        file.write('{"ph": "X", "na')  # torn in the middle of a line
    assert DPOPipeline(config).run() == 0
    trained = events(config, "actor_train")
    assert [event["args"]["step"] for event in trained] == [1, 2, 3, 4]
    assert all(overlap(one, other) <= 2 for one, other in pairwise(trained))
    assert sum(event["ph"] == "M" for event in opened(config.run_dir / "trace.json")) == len(TRACKS)


def test_a_run_from_scratch_starts_a_new_trace(shared: Path) -> None:
    changes = {"exp_name": "anew-trace", "max_steps": 1}
    for trace in (True, True, False):
        config = make_config(shared, **changes, trace=trace, overwrite=True)
        assert DPOPipeline(config).run() == 0
        assert (config.run_dir / "trace.json").exists() is trace
        assert not trace or steps(config, "actor_train") == [("train", 1)]


def test_a_full_disk_for_the_trace_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace._file = FileIO("/dev/full", "w")
    with caplog.at_level(logging.WARNING, "rather"):
        for step in (1, 2):
            trace.add("driver", "save", step, 0.0, 1.0)
    trace.close()
    assert (
        caplog.text.count(
            "/dev/full: cannot be written (No space left on device); nothing more is drawn"
        )
        == 1
    )
