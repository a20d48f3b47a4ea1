"""A run writes its forecast and what it measured; `rather plan` and `rather doctor`."""

from __future__ import annotations

import os
import random
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from rather.commands import doctor
from rather.config.load import dump_yaml
from rather.pipeline.pipeline import DPOPipeline
from tests.commands.conftest import json_of, refusal, succeed, told
from tests.tiny import WORDS, make_config, make_model, metrics, write_rows

SIZES: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 4000,
}
MODEL = "actor_train.model_args.model_name_or_path"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model large enough that its own memory, not that of libraries, is what grows; two steps."""
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "base", **SIZES)
    draw = random.Random(0)
    for name, count in (("pairs", 8), ("held_out", 2)):
        texts = [[" ".join(draw.choices(WORDS, k=30)) for _ in range(3)] for _ in range(count)]
        rows = (
            {"prompt": one, "chosen": f" {two}", "rejected": f" {three}"}
            for one, two, three in texts
        )
        write_rows(folder / f"{name}.jsonl", rows)
    config = make_config(
        folder, actor_train__training_args__per_device_train_batch_size=4, sequence_length=128
    )
    file = folder / "dpo.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    assert DPOPipeline(config).run() == 0
    return {"config": config, "yaml": file, "plan": json_of(config.run_dir / "plan.json")}


def test_the_forecast_of_memory_holds(run: dict[str, Any]) -> None:
    plan = run["plan"]
    forecast, measured = plan["memory_bytes"]["total"], plan["measured"]["memory_bytes"]
    assert measured == pytest.approx(forecast, rel=0.2)
    assert plan["error"]["memory"] == pytest.approx(forecast / measured - 1)
    assert plan["counted"].startswith("growth of the resident set")


def test_what_was_done_is_what_was_forecast(run: dict[str, Any]) -> None:
    plan, folder = run["plan"], run["config"].run_dir
    assert (plan["pairs_per_step"], plan["steps"], plan["train_pairs"]) == (4, 2, 8)
    assert plan["measured"]["seconds_per_step"] > 0
    tokens = sum(line.get("tokens", 0) for line in metrics(run["config"]))
    assert plan["tokens_per_step"] * plan["steps"] == pytest.approx(tokens, rel=0.05)
    for name, files, near in (
        ("checkpoints", "checkpoint-*/*", 0.05), ("model", "model/*.safetensors", 0.02)
    ):  # fmt: skip
        written = sum(file.stat().st_size for file in folder.glob(files) if file.is_file())
        assert plan["disk_bytes"][name] == pytest.approx(written, rel=near), name


def test_plan_forecasts_on_this_machine(run: dict[str, Any]) -> None:
    found = told("plan", run["yaml"])
    assert found["memory_bytes"] == run["plan"]["memory_bytes"]
    assert found["seconds_per_step"] > 0
    assert "timed on this cpu" in found["speed"]
    assert found["verdict"].startswith("fits: ")
    assert all(other["fits"] for other in found["others"])


def test_plan_for_other_gpus_says_what_it_takes(run: dict[str, Any]) -> None:
    said = " ".join(succeed("plan", run["yaml"], "--gpus", 4, "--gpu", "h100").stdout.split())
    assert "4 per device x 1 accumulated x 4 data-parallel = 16 pairs per step" in said
    assert "h100's data sheet" in said
    assert [part for part in [*run["plan"]["memory_bytes"], "disk:"] if part not in said] == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gpu", "h800"], "--gpu h800: unknown; did you mean 'h"),
        (["--gpus", "2"], "--gpus: PyTorch finds no GPU here; choose a model with --gpu"),
        (["--gpu", "l4", f"{MODEL}=no/body"], "no/body: found no config.json"),
        (["--gpu", "l4", "--gpus", "3", "actor_train.strategy_args.tp_size=2"],
         "does not divide the 3 devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_gives_a_one_line_error(
    run: dict[str, Any], args: list[str], said: str
) -> None:
    printed = refusal(2, "plan", run["yaml"], *args)
    assert said in printed
    assert "Traceback" not in printed


def other_model(run: dict[str, Any], folder: Path, **changes: Any) -> str:
    """The setting of a folder with nothing but a config.json like that of the run's model."""
    config = json_of(run["yaml"].parent / "base" / "config.json")
    write_rows(folder / "config.json", [config | changes])
    return f"{MODEL}={folder}"


def test_plan_needs_no_weights_and_no_data(run: dict[str, Any], tmp_path: Path) -> None:
    found = told("plan", run["yaml"], other_model(run, tmp_path), "--gpu", "l4")
    assert "is not a tokenizer folder" in found["assumed"]
    assert found["micro_batch"]["largest_tokens"] >= 128


def test_plan_times_this_machine_without_data(run: dict[str, Any], tmp_path: Path) -> None:
    """The pairs that are assumed have only tokens that the model has."""
    no_data = f"actor_train.data_args.file_name={tmp_path / 'none.jsonl'}"
    found = told("plan", run["yaml"], no_data)
    assert "none.jsonl" in found["assumed"]
    assert "timed on this cpu" in found["speed"]


def test_plan_does_not_time_layers_that_do_not_fit(run: dict[str, Any], tmp_path: Path) -> None:
    printed = succeed("plan", run["yaml"], other_model(run, tmp_path, hidden_size=10**6)).stdout
    assert "time: unknown; 3 layers of the model do not fit here" in printed
    assert "does not fit: needs" in printed


# --- doctor ---


def test_doctor_finds_this_machine_fit(run: dict[str, Any]) -> None:
    printed = succeed("doctor", run["yaml"]).stdout
    checks = ("Python", "PyTorch", "GPU", "Ray", "shared", "open files", "0 problems")
    assert [check for check in checks if check not in printed] == []


def test_doctor_names_problems_with_their_fix(run: dict[str, Any]) -> None:
    assert "no_such_key" in refusal(1, "doctor", run["yaml"], "no_such_key=1")
    [problem] = problems(run["yaml"], "no_such_key=1")
    assert problem.name == "config"
    assert problem.fix


def problems(file: Path, *overrides: str) -> list[doctor.Diagnosis]:
    found = doctor.diagnose(file, list(overrides))
    return [each for each in found if each.state == "problem"]


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; run the tests as another user"
)
def test_doctor_sees_a_folder_that_cannot_be_written(run: dict[str, Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = problems(run["yaml"], f"output_dir={tmp_path}/out")
    assert any("cannot be written" in problem.text for problem in found)


def test_doctor_knows_packages_from_folders_and_from_those_of_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version_of", unknown)
    monkeypatch.setattr(
        "rather.tracking.trackers.find_spec", lambda name: ModuleSpec(name, None, origin="here")
    )
    assert doctor.installed("ray") == "unknown version"
    monkeypatch.setattr("rather.tracking.trackers.find_spec", lambda name: ModuleSpec(name, None))
    assert doctor.installed("ray") is None


def test_doctor_warnings_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.tracking.trackers.find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    found = {each.name: each for each in doctor.diagnose()}
    assert (found["Ray"].state, "torchrun" in found["Ray"].fix) == ("warning", True)
    assert any(name.startswith("disk") and each.state == "warning" for name, each in found.items())
