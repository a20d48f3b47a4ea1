"""A failing run summary stops no run, and the environment is set before any GPU is used."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rather.errors import WorkerLost
from rather.pipeline import run_summary as notes
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.layout import write_run_report
from rather.run_folder.names import DATA_REPORT, FINISHED, PLAN, RUN_REPORT
from tests.tiny import make_config


def failing(*_args: Any, **_options: Any) -> None:
    raise KeyError("a note")


def test_a_failing_summary_does_not_stop_the_run(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("Forecast", "token_view", "counts"):
        monkeypatch.setattr(notes, name, failing)
    config = make_config(shared, exp_name="unnoted", max_steps=2)
    with caplog.at_level(logging.WARNING):
        assert DPOPipeline(config).run() == 0
    told = [record.getMessage() for record in caplog.records if record.name == notes.__name__]
    assert {line.split(" failed; ")[0] for line in told} == {
        "the forecast",
        "the look at the first pairs",
        RUN_REPORT,
    }
    assert (config.run_dir / "config.yaml").exists()
    assert (config.run_dir / FINISHED).exists()
    assert not (config.run_dir / PLAN).exists()


def test_a_lone_surrogate_does_not_prevent_the_report(tmp_path: Path) -> None:
    write_run_report(tmp_path, {"dropped": "\ud83d", "kept": "ü"}, DATA_REPORT)
    text = (tmp_path / DATA_REPORT).read_text(encoding="utf-8")
    assert json.loads(text) == {"dropped": "\ud83d", "kept": "ü"}


def test_a_lost_worker_is_not_swallowed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again: `run` must hear of it."""

    def gone(*_args: Any) -> int:
        raise WorkerLost("gone")

    pipeline = DPOPipeline(make_config(shared, exp_name="gone", max_steps=1))
    monkeypatch.setattr(type(pipeline.actor_train), "peak_memory", gone)
    with pytest.raises(WorkerLost):
        pipeline.run()


def test_the_environment_is_set_before_any_gpu_is_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch reads the settings of its allocator once; the forecast is the first that asks for a GPU's memory."""
    seen: dict[str, str | None] = {}

    def look(*_args: Any, **_options: Any) -> None:
        seen.update({name: os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "OWN_SETTING")})

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OWN_SETTING"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(notes, "pairs_of", look)
    DPOPipeline(
        make_config(shared, exp_name="settled", max_steps=1, system_envs={"OWN_SETTING": "1"})
    ).run()
    assert seen == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OWN_SETTING": "1"}
