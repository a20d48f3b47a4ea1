"""Each tracker, with its real package, shows a killed and resumed run as one run."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.pipeline.pipeline import DPOPipeline
from rather.tracking import trackers
from rather.tracking.json_lines import json_line
from rather.tracking.trackers import TRACKER_IDS, TRACKERS, TrackedRun, check_installed
from tests.commands.conftest import json_of, rows_of
from tests.house.source import ROOT
from tests.tiny import in_child, make_config, metrics
from tests.tracking.test_run import run as tracking
from tests.train.test_resume import train

REAL = [name for name in ("wandb", "trackio", "mlflow") if find_spec(name)]
CANARY = "hf_canarycanarycanarycanary"


def tracked_run(config: DPOConfig, start_step: int) -> TrackedRun:
    run = TrackedRun(config)
    run.begin(start_step)
    return run


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def settings(folder: Path) -> dict[str, Any]:
    return {
        "exp_name": "tracked",
        "max_steps": 5,
        "save_steps": 3,
        "track_with": ["tensorboard", *REAL],
        "tracker_kwargs": {
            "project": "own",
            "name": "first try",
            **({"tags": ["tiny"], "notes": "a run"} if {"wandb", "mlflow"} & set(REAL) else {}),
            **({"mode": "offline"} if "wandb" in REAL else {}),
        },
        "system_envs": {"SOME_TOKEN": CANARY},
    }


def tracked(folder: Path, kill_after: str) -> int:
    places = {
        "HOME": "home",
        "TRACKIO_DIR": "trackio",
        "WANDB_CACHE_DIR": "cache",
        "WANDB_CONFIG_DIR": "cache",
    }
    os.environ.update({name: str(folder / place) for name, place in places.items()})
    code = train(folder, settings(folder), kill_after)
    finish_writing()
    return code


def finish_writing() -> None:
    """Wait for the process in which W&B writes; a multiprocessing child must ask for that."""
    if "wandb" in REAL:
        import wandb

        wandb.teardown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed in step 5, after a checkpoint at step 3, and resumed to its end."""
    folder = tmp_path_factory.mktemp("tracked")
    make_config(folder)
    assert in_child(tracked, folder, "5") == -9
    ids = json_of(folder / "output/tracked/trackers.json")
    assert list(ids) == REAL
    assert in_child(tracked, folder, "") == 0
    assert json_of(folder / "output/tracked/trackers.json").keys() == ids.keys()
    return folder


def losses(folder: Path) -> dict[int, float]:
    lines = rows_of(folder / "output/tracked/metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def run_id_of(folder: Path, tracker: str) -> str:
    ids = json_of(folder / "output/tracked/trackers.json")
    return str(ids[tracker])


def wandb_records(file: Path, kind: str) -> Iterator[Any]:
    """W&B's file of a run: the log format of LevelDB after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, part = struct.unpack_from("<HB", data, at + 4)
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part
            record = Record.FromString(held)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)
            held = b""


@needs("wandb")
def test_wandb_offline(folder: Path) -> None:
    [run_id] = {
        file.stem.removeprefix("run-") for file in folder.glob("logs/tracked/wandb/*/*.wandb")
    }
    assert run_id == run_id_of(folder, "wandb")
    killed, resumed = sorted(folder.glob("logs/tracked/wandb/offline-run-*/*.wandb"))
    [run] = wandb_records(resumed, "run")
    assert (run.run_id, run.project, run.display_name, run.notes, list(run.tags)) == (
        run_id, "own", "first try", "a run", ["tiny"],
    )  # fmt: skip
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["pretrain"] == str(folder / "base")
    assert config["resumed_after_step"] == 3
    steps = {
        row.step.num: {"/".join(item.nested_key): item.value_json for item in row.item}
        for row in wandb_records(resumed, "history")
    }
    told = {step: json.loads(row["loss"]) for step, row in steps.items() if "loss" in row}
    assert told == pytest.approx(losses(folder))
    assert "eval/loss" in steps[0]
    assert killed.parent != resumed.parent


@needs("trackio")
def test_trackio(folder: Path) -> None:
    with sqlite3.connect(folder / "trackio" / "own.db") as database:
        rows = list(
            database.execute("select run_id, run_name, step, metrics from metrics order by id")
        )
        [config] = [json.loads(text) for [text] in database.execute("select config from configs")]
    run_id = run_id_of(folder, "trackio")
    assert {(identity, name) for identity, name, _, _ in rows} == {(run_id, "first try")}
    told = [(step, json.loads(metrics)) for _, _, step, metrics in rows]
    assert {step: row["loss"] for step, row in told if "loss" in row} == pytest.approx(
        losses(folder)
    )
    steps = [step for step, row in told if "loss" in row]
    # It writes behind: step 4 came before the kill or not.
    assert steps in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 4, 5])
    assert [step for step, row in told if row.get("resumed_after_step") == 3] == [3]
    assert config["pretrain"] == str(folder / "base")


@needs("mlflow")
def test_mlflow(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/logs/mlflow.db")
    experiment = client.get_experiment_by_name("own")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == run_id_of(folder, "mlflow")
    assert (run.info.run_name, run.info.status) == ("first try", "FINISHED")
    assert run.data.tags["resumed_after_step"] == "3"
    assert run.data.tags["mlflow.note.content"] == "a run"
    assert "tiny" in run.data.tags
    history = client.get_metric_history(run.info.run_id, "loss")
    # Each is written at once, and none can be removed.
    assert [point.step for point in history] == [1, 2, 3, 4, 4, 5]
    assert {point.step: point.value for point in history} == pytest.approx(losses(folder))
    assert run.data.params["actor_train.training_args.learning_rate"] == "0.001"
    assert run.data.params["system_envs.SOME_TOKEN"] == "***"


def test_no_secret_reaches_a_tracker(folder: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow", "swanlab"])
def test_a_missing_tracker_names_the_extra_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    config = make_config(tmp_path, track_with=name)
    (tmp_path / "pairs.jsonl").unlink()  # nothing is read before
    with pytest.raises(ConfigError, match=rf"pip install 'rather\[{name}\]'"):
        DPOPipeline(config)


def test_a_folder_is_not_an_installed_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B leaves a folder `wandb` where it was started."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_a_folder").mkdir()
    assert find_spec("only_a_folder") is not None
    assert not trackers.is_installed("only_a_folder")
    check_installed(["tensorboard"])


@needs("wandb")
@pytest.mark.parametrize(("key", "told"), [("", "wandb login"), ("a" * 40, "connection refused")])
def test_wandb_without_a_server_is_kept_in_local_files(
    key: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in {
        "BASE_URL": "http://127.0.0.1:9",
        "CONFIG_DIR": str(tmp_path),
        "API_KEY": key,
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setitem(trackers.WANDB_TIMEOUTS, "init_timeout", 2)
    config = make_config(tmp_path, track_with="wandb")
    with tracking(config) as tracker:
        tracker.log({"step": 1, "loss": 0.5})
    finish_writing()
    assert told in caplog.text
    assert "switched off" not in caplog.text
    [file] = tmp_path.glob("logs/run/wandb/offline-run-*/*.wandb")
    assert [row.step.num for row in wandb_records(file, "history")] == [1]


def with_a_newer_run_of_the_name(folder: Path) -> int:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio-names")
    places = [str(folder / place) for place in ("a", "b")]
    configs = [
        make_config(folder, track_with="trackio", exp_name="same", output_dir=place)
        for place in places
    ]
    for config in configs:
        with tracking(config) as tracker:
            tracker.log({"step": 1, "loss": 0.5})
            position = tracker.position()
    with tracking(configs[0], 1, position) as tracker:
        tracker.log({"step": 2, "loss": 0.4})
    return 0


@needs("trackio")
def test_trackio_never_continues_another_run_of_the_same_name(folder: Path) -> None:
    assert in_child(with_a_newer_run_of_the_name, folder) == 0
    with sqlite3.connect(folder / "trackio-names" / "rather.db") as database:
        rows = list(database.execute("select run_id, step from metrics order by id"))
    assert [step for _, step in rows] == [1, 1]
    assert len({identity for identity, _ in rows}) == 2


def test_records_that_a_tracker_lost_are_read_back_exactly(tmp_path: Path) -> None:
    records = [
        {"step": 0, "eval/loss": 0.7},
        {"step": 1, "loss": float("inf")},
        {"step": 2, "loss": 0.5},
    ]
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text("".join(map(json_line, records)))
    assert list(tracked_run(config, 2).records(1)) == records[1:]
    assert list(tracked_run(config, 0).records(0)) == []


@pytest.mark.parametrize("torn", [b"", b'{"wandb": "a', b"[]", b"\xff"])
def test_a_damaged_file_of_tracker_ids_starts_a_new_run(tmp_path: Path, torn: bytes) -> None:
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / TRACKER_IDS).write_bytes(torn)
    run = tracked_run(config, 2)
    assert run.ids.get("wandb") is None
    run.keep_id("wandb", "b")
    assert tracked_run(config, 2).ids["wandb"] == "b"


def test_each_tracker_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert TRACKERS.keys() - {"tensorboard"} <= project["optional-dependencies"].keys()


@needs("mlflow")
def test_an_unreachable_server_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = make_config(
        tmp_path, max_steps=2, track_with="mlflow", tracker_kwargs={"uri": "http://127.0.0.1:9"}
    )
    assert DPOPipeline(config).run() == 0
    assert caplog.text.count("mlflow failed and is switched off") == 1
    assert [line["step"] for line in metrics(config) if "loss" in line] == [1, 2]


@needs("swanlab")
def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = {"mode": "offline", "project": "own", "tags": ["tiny"], "notes": "a run"}
    config = make_config(tmp_path, track_with="swanlab", tracker_kwargs=options)
    with tracking(config) as tracker:
        tracker.log({"step": 1, "loss": 0.5})
        position = tracker.position()
    with tracking(config, 1, position) as tracker:
        tracker.log({"step": 2, "loss": 0.4})
    files = list(tmp_path.glob("logs/run/swanlog/*/*.swanlab"))
    run_id = json_of(config.run_dir / "trackers.json")["swanlab"]
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
