"""The commands: their help, what they print and write, and the exit code of every kind of failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cells import read_table
from tests.commands.conftest import exits, rather, succeed
from tests.tiny import rows_of

pytestmark = pytest.mark.usefixtures("no_self_check")
MUST_SHOW = """\
pretrain: {folder}/base
bata: 0.2
label_smoothing: 0.7
actor_train:
  data_args:
    file_name: {folder}/pairs.jsonl
  training_args:
    learning_rate: fast
"""


@pytest.fixture
def yaml_file(shared: Path, tmp_path: Path) -> Callable[..., Path]:
    """A YAML as a user writes it; runs go to a folder of their own, the tokenised pairs are shared."""

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "exp_name": "run",
            "output_dir": str(tmp_path / "out"),
            "logging_dir": str(tmp_path / "logs"),
            "pretrain": str(shared / "base"),
            "sequence_length": 64,
            "max_steps": 2,
            "track_with": None,
            "actor_train": {
                "data_args": {
                    "file_name": str(shared / "pairs.jsonl"),
                    "cache_dir": str(shared / "output" / ".cache" / "data"),
                },
                "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8},
            },
            "validation": {"data_args": {"file_name": str(shared / "held_out.jsonl")}},
        }
        file = tmp_path / "dpo.yaml"
        file.write_text(yaml.safe_dump({**values, **changes}))
        return file

    return write


# --- help ---


COMMANDS = [
    "",
    "train",
    "data",
    "eval",
    "demo",
    "config",
    *(f"config {x}" for x in ("show", "explain", "schema")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = succeed(*command.split(), "--help")
    assert "Usage:" in result.stdout
    if command in ("train", "data", "eval", "config show", "config explain"):
        assert f"Example: rather {command} " in result.stdout.replace("`", "")


# --- configuration ---


def test_three_problems_are_one_message_and_nothing_is_written(
    shared: Path, tmp_path: Path
) -> None:
    """Through a real process: exit code, stderr, no traceback, and without waiting for torch."""
    file = tmp_path / "dpo.yaml"
    file.write_text(MUST_SHOW.format(folder=shared))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "rather", "train", str(file)],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for said in (
        "bata (dpo.yaml:2): unknown key; did you mean 'beta'?",
        "label_smoothing (dpo.yaml:3): 0.7 is not a number >= 0 and < 0.5",
        "learning_rate (dpo.yaml:8): 'fast' is not a number",
    ):
        assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dpo.yaml"]


@pytest.mark.parametrize("command", ["train", "data"])
def test_a_folder_that_cannot_be_made_is_one_line(
    command: str, yaml_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    file = yaml_file(output_dir=str(tmp_path / "file" / "out"))
    done = rather(command, file, "actor_train.data_args.cache_dir=null")
    assert done.exit_code == 9, done.output
    assert done.stderr.splitlines()[-1].startswith("rather: ")
    assert "Not a directory" in done.stderr


def test_a_demo_in_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = rather("demo", "--out", tmp_path / "file" / "demo")
    assert done.exit_code == 9
    text = "cannot be created (Not a directory); choose another folder"
    assert done.stderr == f"rather: {tmp_path / 'file' / 'demo'}: {text}.\n"


def test_config_show_explain_schema_and_reference(yaml_file: Callable[..., Path]) -> None:
    file = yaml_file(beta=0.3)
    shown = succeed("config", "show", file, "label_smoothing=0.1")
    (beta,) = [line for line in shown.stdout.splitlines() if line.startswith("beta")]
    assert "0.3" in beta
    assert "dpo.yaml" in beta
    explained = succeed("config", "explain", "actor_train.training_args.learning_rate", file)
    assert "Peak learning rate" in explained.stdout
    assert "0.001" in explained.stdout
    succeed("config", "explain", "beta")
    schema = rather("config", "schema")
    assert "actor_train" in json.loads(schema.stdout)["properties"]
    assert "| `beta` |" in rather("config", "reference").stdout


def test_an_unknown_key_cannot_be_explained() -> None:
    assert "beta" in exits(2, "config", "explain", "bata")


# --- training and evaluation ---


def test_train_then_evaluate(yaml_file: Callable[..., Path], shared: Path, tmp_path: Path) -> None:
    """`rather eval` prints what the run's last evaluation wrote; of the base model, what its first did."""
    file = yaml_file()
    succeed("train", file)
    run = tmp_path / "out" / "run"
    lines = rows_of(run / "metrics.jsonl")
    evaluations = [
        {k: v for k, v in line.items() if k.startswith("eval/")}
        for line in lines
        if "eval/loss" in line
    ]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = succeed("eval", file)
    assert json.loads(result.stdout) == pytest.approx(evaluations[-1], rel=1e-6)
    base = rather("eval", file, "--model", shared / "base")
    assert json.loads(base.stdout) == pytest.approx(evaluations[0], rel=1e-6)
    nowhere = rather("eval", file, "--model", tmp_path / "nowhere")
    assert (nowhere.exit_code, "nowhere" in nowhere.stderr) == (2, True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert {path.name for path in (tmp_path / "logs" / "run").iterdir()} == {
        "driver.log", "actor_train-0.log", "reference-0.log",
    }  # fmt: skip
    again = succeed("train", file)
    assert "is finished at step 2" in again.output
    assert "belongs to another run" in exits(4, "train", file, "beta=0.7", "max_steps=3")
    succeed("train", file, "beta=0.7", "--overwrite")


def test_a_dry_run_writes_no_run(yaml_file: Callable[..., Path], tmp_path: Path) -> None:
    result = succeed("train", yaml_file(), "--dry-run")
    assert "40 pairs, 2 steps of 8 pairs" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["dpo.yaml"]


def test_data_shows_pairs(yaml_file: Callable[..., Path]) -> None:
    result = succeed("data", yaml_file(), "--show", "2")
    assert "40" in result.stdout
    assert "[[" in result.stdout  # what is scored, where there are no colours


EXITS = """
    3 | train {file} actor_train.data_args.file_name={folder}/none.jsonl | none.jsonl
    2 | train {file} pretrain={folder}/none | does not exist
    2 | train {folder}/none.yaml | none.yaml
    2 | eval {file} | Train first
    2 | eval {file} validation.data_args.file_name=null | held-out
    6 | train {file} actor_train.worker_cls=tests.train.test_pipeline.NotANumber | such steps in a row
    2 | train {file} pref_loss=sigmoyd | did you mean 'sigmoid'?
"""


@pytest.mark.parametrize(("code", "line", "said"), read_table(EXITS))
def test_exit_codes(
    yaml_file: Callable[..., Path], tmp_path: Path, code: str, line: str, said: str
) -> None:
    done = rather(*line.format(file=yaml_file(), folder=tmp_path).split())
    assert (done.exit_code, said in done.stderr) == (int(code), True), done.output


def test_what_a_loss_refuses_has_its_line_and_costs_nothing(
    yaml_file: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"pref_loss": "hinge", "gamma": 1.0, "f_divergence_type": "js", "soft_labels": True}
    printed = exits(2, "train", yaml_file(**changes))
    assert "gamma (dpo.yaml:" in printed
    assert "loss 'hinge' takes beta; it has no gamma" in printed
    assert "soft_labels (dpo.yaml:" in printed
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "logs").exists()


def test_refused_data_leaves_its_report(yaml_file: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": "w1", "chosen": " w2", "rejected": f" w{i}"} for i in range(2, 9)]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file, bad = yaml_file(), f"actor_train.data_args.file_name={tmp_path / 'bad.jsonl'}"
    exits(3, "train", file, bad)
    report = json.loads((tmp_path / "out" / "run" / "data_report.json").read_text())
    assert report["train"]["dropped"]["identical_text"]["count"] == 1
    succeed("train", file, "resume_from_checkpoint=false")  # that was no run yet
    exits(2, "train", file, "resume_from_checkpoint=false")


def test_the_written_config_trains_on(yaml_file: Callable[..., Path], tmp_path: Path) -> None:
    """config.yaml of a run that was started anew must not start anew again."""
    succeed("train", yaml_file(max_steps=1), "--overwrite")
    written = tmp_path / "out" / "run" / "config.yaml"
    succeed("train", written, "max_steps=2")
    lines = rows_of(written.with_name("metrics.jsonl"))
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
