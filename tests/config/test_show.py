"""What `rather config` prints, the reference page, the examples and the layouts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from rather.config.checks import device_problems
from rather.config.keys import table
from rather.config.load import config_from_dict, load, load_config
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS, Schedule, TrainingArgs
from rather.config.show import explain, json_schema, reference_markdown, show
from rather.config.strategies import Layout, layout
from rather.errors import ConfigError

from .conftest import smallest

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted(REPOSITORY.glob("examples/**/*.yaml"))
EXAMPLES.remove(REPOSITORY / "examples/rounds/rounds.yaml")  # tests/rounds reads it
BIG = REPOSITORY / "examples/qwen2.5-3B-dpo_megatron/dpo_config.yaml"


def test_show_prints_values_and_sources(write) -> None:
    text = show(load(write(), ["beta=0.05", "system_envs.HF_TOKEN=canary"]))
    lines = {line.partition(":")[0].strip(): line.split("  # ") for line in text.splitlines()}
    assert [part.strip() for part in lines["beta"]] == ["beta: 0.05", "command line"]
    assert [part.strip() for part in lines["pretrain"]] == ["pretrain: org/model", "dpo.yaml:1"]
    assert [part.strip() for part in lines["seed"]] == ["seed: 42", "default"]
    assert "model_name_or_path: org/model" in text
    assert "# follows pretrain" in text
    assert "canary" not in text


def test_explain_a_key(write) -> None:
    text = explain(load(write(), ["label_smoothing=0.1"]), "label_smoothing")
    assert "value    0.1  (command line)" in text
    assert "takes    a number >= 0 and < 0.5" in text
    assert "default  null" in text
    assert "Assumed fraction of mislabelled pairs" in text
    assert "keys     learning_rate" in explain(None, "actor_train.training_args")
    with pytest.raises(ConfigError, match="bata: unknown key; did you mean 'beta'"):
        explain(None, "bata")


def test_every_key_has_a_description_and_a_readable_type() -> None:
    for key in table().values():
        assert key.meaning.endswith("."), key.path
        assert "<" not in key.expects.replace("< ", "").replace("<= ", ""), key.path
        assert "typing" not in key.expects, key.path


def test_json_schema_covers_every_key() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {key.path for key in table().values() if not key.parent} | {
        "defaults",
        "hydra",
    }
    beta = schema["properties"]["beta"]
    assert beta["description"].startswith("Strength")
    assert {"type": "string", "pattern": r"\$\{.+\}"} in beta["anyOf"]
    assert schema["$defs"]["TrainingArgs"]["additionalProperties"] is False


def test_the_reference_page_is_up_to_date() -> None:
    page = REPOSITORY / "docs/config.md"
    assert page.read_text(encoding="utf-8") == reference_markdown(), (
        "run: rather config reference > docs/config.md"
    )
    for key in table().values():
        assert f"| `{key.name}` |" in page.read_text(encoding="utf-8")


# --- examples ---


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads(path: Path) -> None:
    load_config(path, check_paths=False)


def test_the_quick_start_is_ten_lines_and_its_files_are_there(monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    path = REPOSITORY / "examples/quickstart/dpo.yaml"
    assert len(path.read_text().splitlines()) <= 10
    load_config(path)


def test_the_big_example_is_read_as_written() -> None:
    config = load_config(BIG, check_paths=False)
    assert layout(config.actor_train) == Layout(
        8, recompute="full", name="megatron_train", stage=1, shard=8
    )
    assert layout(config.reference) == Layout(8, name="megatron_infer")
    assert config.global_batch() == 128
    assert str(config.checkpoint_copy_dir) == "output/models/qwen2.5-3B-dpo-config"


@pytest.mark.parametrize("folder", ["examples/quickstart", "quickstart"])
def test_seed_002_the_launcher_takes_folder_name_and_overrides(tmp_path: Path, folder: str) -> None:
    """From the repository, and elsewhere from examples/, as ROLL's shell scripts call it."""
    command = [sys.executable, str(REPOSITORY / "examples/start_dpo_pipeline.py")]
    command += ["--config_path", folder, "--config_name", "dpo", "bata=1", "seed=x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "bata (command line): unknown key; did you mean 'beta'?" in done.stderr
    assert "seed (command line): 'x' is not a whole number" in done.stderr
    assert not list(tmp_path.iterdir())


# --- layouts ---


def test_sizes_have_many_names() -> None:
    for setting in (
        "actor_train.strategy_args.tp_size=2",
        "actor_train.strategy_args.strategy_config={tp_size: 2}",
        "actor_train.strategy_args.strategy_config={tensor_model_parallel_size: 2}",
        "actor_train.strategy_args={tp_size: 2, strategy_config: {tensor_model_parallel_size: 2}}",
    ):
        config = config_from_dict(smallest(setting, "actor_train.device_mapping=0-7"))
        assert layout(config.actor_train) == Layout(4, 2, name="zero2", stage=2, shard=4)
    config = config_from_dict(
        smallest(
            "actor_train.strategy_args={pp_size: 2, cp_size: 2}", "actor_train.device_mapping=0-7"
        )
    )
    assert layout(config.reference) == Layout(2, pp=2, cp=2, name="zero2")


def test_layout_for_another_number_of_devices() -> None:
    role = config_from_dict(
        smallest("actor_train.strategy_args.tp_size=2", "actor_train.device_mapping=0-3")
    ).actor_train
    assert layout(role, 8).dp == 4
    with pytest.raises(ConfigError, match="does not divide the 3 devices"):
        layout(role, 3)


def test_recomputation_by_either_key() -> None:
    details = "actor_train.strategy_args.strategy_config"
    for setting, level in {
        "actor_train.model_args.disable_gradient_checkpointing=false": "full",
        "actor_train.model_args.disable_gradient_checkpointing=true": "none",
        f"{details}.recompute_granularity=full": "full",
        f"{details}.recompute_granularity=selective": "selective",
        f"{details}.recompute_granularity=half": "half",
        "seed=1": None,  # whatever fits
    }.items():
        assert layout(config_from_dict(smallest(setting)).actor_train).recompute == level
    assert layout(
        config_from_dict(smallest(f"{details}.offload_activations=true")).actor_train
    ).offload


@pytest.mark.parametrize(
    ("written", "read"), [("on", "on"), ("true", "on"), ("off", "off"), ("auto", "auto")]
)
def test_a_bare_on_is_not_a_boolean(written: str, read: str) -> None:
    assert config_from_dict(smallest(f"compile={written}")).compile == read


@pytest.mark.parametrize("key", ["compile", "reference.offload"])
def test_some_settings_are_for_a_gpu_only(key: str) -> None:
    config = config_from_dict(smallest(f"{key}=on"))
    (line,) = device_problems(config, "cpu")
    assert line.startswith(f"{key}: on")
    assert device_problems(config, "cuda") == []


def test_a_share_of_a_gpu_means_nothing_on_a_cpu() -> None:
    share = "strategy_args.gpu_memory_utilization"
    config = config_from_dict(smallest(f"reference.{share}=0.4"))
    for device in ("cpu", "cuda"):  # on a GPU both roles share it
        (line,) = device_problems(config, device)
        assert line.startswith(f"reference.{share}: 0.4")
    both = smallest(f"reference.{share}=0.4", f"actor_train.{share}=0.5")
    assert device_problems(config_from_dict(both), "cuda") == []


def test_lean_on_a_cpu_needs_its_dtype() -> None:
    (line,) = device_problems(config_from_dict(smallest("precision=lean")), "cpu")
    assert line.startswith("precision: lean")
    assert line.endswith("set actor_train.model_args.dtype=bf16")
    complete = config_from_dict(smallest("precision=lean", "actor_train.model_args.dtype=bf16"))
    assert (
        device_problems(complete, "cpu")
        == device_problems(config_from_dict(smallest("precision=lean")), "cuda")
        == []
    )


# --- what the schema says must be what the rest of the house knows ---


def test_schedules_are_those_that_exist() -> None:
    optim = pytest.importorskip("rather.optim.optimizer")
    for name in get_args(Schedule):
        rate = optim.schedule(TrainingArgs(lr_scheduler_type=name, learning_rate=1.0), 10)
        assert 0 < rate(1) <= 1


def test_losses_are_those_that_exist() -> None:
    losses = pytest.importorskip("rather.losses.losses")
    numbers = {number for rule in losses.LOSSES.values() for number in rule.numbers}
    assert set(LOSS_NUMBERS) == numbers
    objective = pytest.importorskip("rather.losses.objective")
    assert set(LOSS_MODIFIERS) == {field.name for field in fields(objective.Modifiers)}
