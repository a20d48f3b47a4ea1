"""A run writes its forecast and what it measured; `rather plan` and `rather doctor`."""

from __future__ import annotations

import json
import os
import random
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rather.commands.doctor import diagnose
from rather.config.load import dump_yaml
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import WORDS, make_config, make_model

SIZES: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 4000,
}


def write_pairs(file: Path, count: int) -> None:
    draw = random.Random(0)

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=30))

    rows = [
        {"prompt": words(), "chosen": " " + words(), "rejected": " " + words()}
        for _ in range(count)
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model large enough that its own memory, not that of libraries, is what grows; two steps."""
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "base", **SIZES)
    write_pairs(folder / "pairs.jsonl", 8)
    write_pairs(folder / "held_out.jsonl", 2)
    config = make_config(
        folder, actor_train__training_args__per_device_train_batch_size=4, sequence_length=128
    )
    file = folder / "dpo.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    assert DPOPipeline(config).run() == 0
    return {
        "folder": config.run_dir,
        "yaml": file,
        "plan": json.loads((config.run_dir / "plan.json").read_text()),
    }


def invoke(*args: str) -> Any:
    from rather.cli import app

    return CliRunner().invoke(app, list(args))


def test_the_forecast_of_memory_holds(run: dict[str, Any]) -> None:
    plan = run["plan"]
    assert plan["measured"]["memory_bytes"] == pytest.approx(plan["memory_bytes"]["total"], rel=0.2)
    assert plan["error"]["memory"] == pytest.approx(
        plan["memory_bytes"]["total"] / plan["measured"]["memory_bytes"] - 1
    )
    assert plan["counted"].startswith("growth of the resident set")


def test_what_was_done_is_what_was_forecast(run: dict[str, Any]) -> None:
    plan = run["plan"]
    assert (plan["pairs_per_step"], plan["steps"], plan["train_pairs"]) == (4, 2, 8)
    assert plan["measured"]["seconds_per_step"] > 0
    lines = [
        json.loads(line) for line in (run["folder"] / "metrics.jsonl").read_text().splitlines()
    ]
    tokens = [line["tokens"] for line in lines if "tokens" in line]
    assert plan["tokens_per_step"] * plan["steps"] == pytest.approx(sum(tokens), rel=0.05)
    kept = sum(
        file.stat().st_size for file in run["folder"].glob("checkpoint-*/*") if file.is_file()
    )
    assert plan["disk_bytes"]["checkpoints"] == pytest.approx(kept, rel=0.05)
    model = sum(file.stat().st_size for file in (run["folder"] / "model").glob("*.safetensors"))
    assert plan["disk_bytes"]["model"] == pytest.approx(model, rel=0.02)


def test_plan_forecasts_on_this_machine(run: dict[str, Any]) -> None:
    done = invoke("plan", str(run["yaml"]), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["memory_bytes"] == run["plan"]["memory_bytes"]
    assert found["seconds_per_step"] > 0
    assert "timed on this cpu" in found["speed"]
    assert found["verdict"].startswith("fits: ")
    assert all(other["fits"] for other in found["others"])


def test_plan_for_other_gpus_says_what_it_takes(run: dict[str, Any]) -> None:
    done = invoke("plan", str(run["yaml"]), "--gpus", "4", "--gpu", "h100")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "4 per device x 1 accumulated x 4 data-parallel = 16 pairs per step" in said
    assert "h100's data sheet" in said
    for part in (
        "weights",
        "gradients",
        "master",
        "moments",
        "activations",
        "logits",
        "reference",
        "buffers",
        "disk:",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gpu", "h800"], "--gpu h800: unknown; did you mean 'h"),
        (
            ["--gpus", "2"],
            "--gpus: PyTorch finds no GPU here; choose a model with --gpu",
        ),
        (
            ["--gpu", "l4", "actor_train.model_args.model_name_or_path=no/body"],
            "no/body: found no config.json",
        ),
        (
            ["--gpu", "l4", "--gpus", "3", "actor_train.strategy_args.tp_size=2"],
            "does not divide the 3 devices",
        ),
    ],
)
def test_what_cannot_be_planned_gives_a_one_line_error(
    run: dict[str, Any], args: list[str], said: str
) -> None:
    done = invoke("plan", str(run["yaml"]), *args)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_plan_needs_no_weights_and_no_data(run: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run["yaml"].parent / "base" / "config.json").read_text())
    change = f"actor_train.model_args.model_name_or_path={tmp_path}"
    done = invoke("plan", str(run["yaml"]), change, "--gpu", "l4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "is not a tokenizer folder" in found["assumed"]
    assert found["micro_batch"]["largest_tokens"] >= 128


def test_plan_times_this_machine_without_data(run: dict[str, Any], tmp_path: Path) -> None:
    """The pairs that are assumed have only tokens that the model has."""
    done = invoke(
        "plan",
        str(run["yaml"]),
        f"actor_train.data_args.file_name={tmp_path / 'none.jsonl'}",
        "--json",
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "none.jsonl" in found["assumed"]
    assert "timed on this cpu" in found["speed"]


def test_plan_does_not_time_layers_that_do_not_fit(run: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((run["yaml"].parent / "base" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 10**6}))
    done = invoke("plan", str(run["yaml"]), f"actor_train.model_args.model_name_or_path={tmp_path}")
    assert done.exit_code == 0, done.output
    assert "time: unknown; 3 layers of the model do not fit here" in done.stdout
    assert "does not fit: needs" in done.stdout


# --- doctor ---


def test_doctor_finds_this_machine_fit(run: dict[str, Any]) -> None:
    done = invoke("doctor", str(run["yaml"]))
    assert done.exit_code == 0, done.output
    for check in (
        "Python",
        "PyTorch",
        "GPU",
        "Ray",
        "shared",
        "open files",
    ):
        assert check in done.stdout
    assert "0 problems" in done.stdout


def test_doctor_names_problems_with_their_fix(run: dict[str, Any]) -> None:
    done = invoke("doctor", str(run["yaml"]), "no_such_key=1")
    assert done.exit_code == 1
    assert "no_such_key" in done.stdout
    found = [each for each in diagnose(run["yaml"], ["no_such_key=1"]) if each.state == "problem"]
    assert [each.name for each in found] == ["config"]
    assert all(each.fix for each in found)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; run the tests as another user"
)
def test_doctor_sees_a_folder_that_cannot_be_written(run: dict[str, Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = list(diagnose(run["yaml"], [f"output_dir={tmp_path}/out"]))
    assert any(each.state == "problem" and "cannot be written" in each.text for each in found)


def test_doctor_knows_packages_from_folders_and_from_those_of_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import rather.commands.doctor as doctor

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
    import rather.commands.doctor as doctor

    monkeypatch.setattr("rather.tracking.trackers.find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    found = {each.name: each for each in diagnose()}
    assert (found["Ray"].state, "torchrun" in found["Ray"].fix) == ("warning", True)
    assert any(name.startswith("disk") and each.state == "warning" for name, each in found.items())
