"""A record reaches metrics.jsonl, TensorBoard and the console; a failure never stops a run."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import termios
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rather.cluster.rank_output import STDOUT, RankOutput, pass_on
from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.tracking.json_lines import MetricsPosition
from rather.tracking.run import DrawnProgress, ProgressView, RunTracker, progress_view
from rather.tracking.trackers import TRACKERS, TensorBoard, TrackedRun

TRAIN = {
    "step": 10,
    "epoch": 0.1,
    "loss": 0.67123,
    "rewards/accuracies": 0.58,
    "rewards/margins": 0.041,
    "pairs_per_second": 12.34,
}
EVALUATION = {"step": 10, "eval/loss": 0.65, "eval/rewards/accuracies": 0.7, "eval/sft_loss": 2.0}


def config_in(folder: Path, **more: Any) -> DPOConfig:
    places = {
        "output_dir": str(folder / "out"),
        "logging_dir": str(folder / "logs"),
        "exp_name": "tiny",
    }
    data = {"data_args": {"file_name": "pairs.jsonl"}}
    more = {"track_with": "tensorboard", **more}
    return config_from_dict({**places, "pretrain": "model", "actor_train": data, **more})


def run(
    config: DPOConfig, start: int = 0, position: MetricsPosition = MetricsPosition()
) -> RunTracker:
    return RunTracker(
        TrackedRun(config), total_steps=200, start_step=start, metrics_position=position, quiet=True
    )


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def test_the_registry_matches_the_config() -> None:
    accepted = get_args(DPOConfig.model_fields["track_with"].annotation)
    names = {name for kind in accepted for name in get_args(kind) if isinstance(name, str)}
    assert names == TRACKERS.keys()


def test_a_record_reaches_every_destination(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with run(config) as tracker:
        tracker.log(TRAIN)
        tracker.log(EVALUATION)
    written = (config.run_dir / "metrics.jsonl").read_text()
    assert written == json.dumps(TRAIN) + "\n" + json.dumps(EVALUATION) + "\n"
    assert scalars(config.log_dir, "loss") == [(10, 0.6712)]
    assert scalars(config.log_dir, "eval/loss") == [(10, 0.65)]


def test_tensorboard_can_write_elsewhere_or_be_switched_off(tmp_path: Path) -> None:
    elsewhere = tmp_path / "board"
    with run(config_in(tmp_path, tracker_kwargs={"log_dir": str(elsewhere)})) as tracker:
        tracker.log(TRAIN)
    assert scalars(elsewhere, "loss") == [(10, 0.6712)]
    assert not (tmp_path / "logs").exists()
    with run(config_in(tmp_path, track_with=None, exp_name="none")) as tracker:
        tracker.log(TRAIN)
    assert not (tmp_path / "logs").exists()
    assert (tmp_path / "out" / "none" / "metrics.jsonl").exists()


def test_a_resume_replaces_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    tracker = run(config)
    for step in (1, 2):
        tracker.log({"step": step, "loss": step / 10})
    position = tracker.position()
    for step in (3, 4):  # a kill follows: the tracker is never closed
        tracker.log({"step": step, "loss": 9.0})
    with run(config, start=2, position=position) as tracker:
        tracker.log({"step": 3, "loss": 0.3})
    expected = [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert scalars(config.log_dir, "loss") == expected
    kept = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [(line["step"], line["loss"]) for line in kept] == expected


def test_a_run_killed_before_its_first_checkpoint_starts_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer import event_file_writer

    count = event_file_writer.AtomicCounter(
        0
    )  # names of one second and process sort by it, as text
    monkeypatch.setattr(event_file_writer, "_global_uid", count)
    config = config_in(tmp_path)
    for loss in (9.0, 0.5):
        tracker = run(config)
        tracker.log({"step": 0, "loss": loss})
    assert scalars(config.log_dir, "loss") == [(0, 0.5)]
    assert (config.run_dir / "metrics.jsonl").read_text() == '{"step": 0, "loss": 0.5}\n'


def broken(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def break_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoard, "__init__", broken)


def break_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoard, "log", broken)


def break_the_writer_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as a full disk does: in TensorBoard's own thread, which ends with the error."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    monkeypatch.setattr(RecordWriter, "write", broken)


def break_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoard, "close", broken)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "damage", [break_the_start, break_the_log, break_the_writer_thread, break_the_close]
)
def test_a_failing_tracker_is_logged_once_and_does_not_stop_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[pytest.MonkeyPatch], None],
) -> None:
    damage(monkeypatch)
    config = config_in(tmp_path)
    with run(config) as tracker:
        for step in range(30):  # more than the queue of TensorBoard's thread holds
            tracker.log({"step": step, "loss": 0.5})
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 30
    warnings = [
        record.message for record in caplog.records if "tensorboard failed" in record.message
    ]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


# --- console ---


def test_plain_lines_when_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    view = ProgressView(200, 0)
    view.log(10, TRAIN)
    view.log(10, EVALUATION)
    view.log(11, {**TRAIN, "skipped_iter": 1})
    view.close()
    out = capsys.readouterr().out.splitlines()
    shown = r"loss 0\.6712  acc 0\.58  margin 0\.04  12\.3 pairs/s"
    assert re.fullmatch(rf"step 10/200  {shown}  eta \d:\d\d:\d\d", out[0])
    assert out[1] == "step 10/200  eval  loss 0.6500  acc 0.70"
    assert re.fullmatch(rf"step 11/200  {shown}  skipped  eta \d:\d\d:\d\d", out[2])


def test_named_evaluation_sets_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 0, "eval/a/loss": 0.5, "eval/b/loss": 0.25, "eval/b/rewards/margins": 1.0}
    ProgressView(5, 0).log(0, record)
    assert capsys.readouterr().out.splitlines() == [
        "step 0/5  eval/a  loss 0.5000",
        "step 0/5  eval/b  loss 0.2500  margin 1.00",
    ]


def test_the_time_left_counts_only_steps_of_this_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1020.0, 1020.0])
    monkeypatch.setattr("rather.tracking.run.time.monotonic", lambda: next(clock))
    view = ProgressView(200, 100)
    view.log(110, {"step": 110, "loss": 0.5})  # ten steps in 20 s
    view.log(200, {"step": 200, "loss": 0.5})
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step 110/200  loss 0.5000  eta 0:03:00",
        "step 200/200  loss 0.5000  eta 0:00:00",
    ]


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int = 100, output: RankOutput | None = None
) -> str:
    """Return what a view writes to a pseudo-terminal; with `output`, from a rank on Ray."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    with open(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with redirect_stdout(output.stream(STDOUT)) if output else nullcontext():
            view = progress_view(200, 0)
        view.log(10, TRAIN)
        view.log(10, EVALUATION)
        view.close()
        if output:
            pass_on(output.take(), DrawnProgress().draw)
        print("\x03", file=terminal, flush=True)
        written = b""
        while b"\x03" not in written:  # what was written arrives in pieces
            written += os.read(master, 1 << 16)
    os.close(master)
    return written.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    written = on_a_terminal(monkeypatch, columns)
    assert "\x1b[" in written
    assert "10/200" in written
    assert "━" in written
    assert "loss 0.6712  acc 0.58  margin 0.04  12.3 pairs/s  eta" in written
    assert "step 10/200  eval  loss 0.6500  acc 0.70" in written


def test_the_driver_draws_the_same_bar_for_a_rank_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("rather.tracking.run.time.monotonic", lambda: 0.0)
    assert on_a_terminal(monkeypatch, output=RankOutput()) == on_a_terminal(monkeypatch)


def test_no_color_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", on_a_terminal(monkeypatch))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in on_a_terminal(monkeypatch)


def test_forced_colour_puts_no_codes_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    ProgressView(200, 0).log(10, TRAIN)
    assert "\x1b" not in capsys.readouterr().out


def test_a_closed_pipe_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `rather train ... | head` does after ten lines
    with open(writer, "wb", buffering=0, closefd=True) as raw:

        class Pipe:
            def write(self, text: str) -> int:
                return raw.write(text.encode()) or 0

            def flush(self) -> None: ...

            def isatty(self) -> bool:
                return False

        monkeypatch.setattr(sys, "stdout", Pipe())
        config = config_in(tmp_path, track_with=None)
        with RunTracker(TrackedRun(config), total_steps=200, start_step=0) as tracker:
            for _ in range(3):
                tracker.log(TRAIN)
        monkeypatch.undo()
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert caplog.text.count("console failed") == 1
