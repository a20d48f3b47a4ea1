"""A conversion with exit code 0 trains the same; everything else is reported."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.keys import table
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.tools.migrate import NAMES, rules
from rather.tools.migrate.engine import Migrated, _is_in_mapping, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import IMPOSSIBLE, MISSING, NEEDLESS, UNKNOWN
from rather.tools.migrate.source import read_file, read_line

DATA, HELD_OUT = "actor_train.data_args", "validation.data_args"
SECRET = "0123456789abcdef0123456789abcdef01234567"


def of_line(line: str, peer: str, devices: int | None = None) -> Migrated:
    return migrate(read_line(line), PEERS[peer], devices)


def of_file(folder: Path, values: dict[str, Any], peer: str) -> Migrated:
    file = folder / "source.yaml"
    file.write_text(yaml.safe_dump(values))
    return migrate(read_file(file), PEERS[peer])


def problems(result: Migrated) -> dict[str, str]:
    bad = (MISSING, IMPOSSIBLE, UNKNOWN)
    return {row.key: row.status for row in result.rows if row.status in bad}


def note(result: Migrated, key: str) -> str:
    [row] = [row for row in result.rows if row.key == key]
    return row.note


# ---- NeMo-RL: data sets


NEMO: dict[str, Any] = {
    "dpo": {"max_num_steps": 100, "reference_policy_kl_penalty": 0.05},
    "policy": {"model_name": "m", "train_global_batch_size": 8, "precision": "bfloat16",
               "max_total_sequence_length": 512, "dtensor_cfg": {"enabled": True}, "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6}}},
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
}  # fmt: skip


@pytest.mark.defect("U5")
@pytest.mark.parametrize(
    ("data", "train", "held_out"),
    [
        ({"train": {"dataset_name": "HelpSteer3", "split": "train"},
          "validation": {"dataset_name": "HelpSteer3", "split": "validation"}},
         "HelpSteer3-train.jsonl", "HelpSteer3-validation.jsonl"),
        ({"train": {"dataset_name": "HelpSteer3"}, "validation": None}, "HelpSteer3-train.jsonl", None),
        ({"train": {"dataset_name": "Tulu3Preference"}},
         "hf://datasets/allenai/llama-3.1-tulu-3-8b-preference-mixture", None),
        ({"train": {"data_path": "org/pairs", "split": "train"}, "validation": {"data_path": "org/pairs", "split": "dev"},
          "default": {"dataset_name": "PreferenceDataset"}},
         "hf://datasets/org/pairs", "hf://datasets/org/pairs:dev"),
        ({"train": {"dataset_name": "BinaryPreferenceDataset", "data_path": "a.jsonl", "prompt_key": "q"},
          "val_data_paths": {"one": "b.jsonl", "two": "c.jsonl"}}, "a.jsonl", {"one": "b.jsonl", "two": "c.jsonl"}),
        ({"dataset_name": "HelpSteer3"}, "HelpSteer3-train.jsonl", "HelpSteer3-validation.jsonl"),
    ],
)  # fmt: skip
def test_training_and_validation_of_nemo_rl_are_different_files(
    data: dict[str, Any], train: str, held_out: Any, tmp_path: Path
) -> None:
    result = of_file(tmp_path, {**NEMO, "data": data}, "nemo-rl")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.file_name == train
    assert result.config.validation.data_args.file_name == held_out


@pytest.mark.defect("U5")
@pytest.mark.parametrize(
    "entry",
    [{"dataset_name": "my_package.MyDataset"}, {"data_path": "a.jsonl", "prompt_file": "p.txt"},
     [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl"}]],
)  # fmt: skip
def test_data_of_nemo_rl_that_are_not_determined(entry: Any, tmp_path: Path) -> None:
    found = problems(of_file(tmp_path, {**NEMO, "data": {"train": entry}}, "nemo-rl"))
    assert found == {"data.train": IMPOSSIBLE, "(data)": MISSING}


# ---- LLaMA-Factory


FACTORY: dict[str, Any] = {
    "model_name_or_path": "m", "stage": "dpo", "do_train": True, "bf16": True, "dataset": "mine",
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
}  # fmt: skip


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """Return a folder with a dataset_info.json, as LLaMA-Factory is started in."""
    pairs = {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "conversations"}}
    registry = {
        "mine": {"file_name": "mine.json", **pairs},
        "hub": {"hf_hub_url": "org/pairs", "ms_hub_url": "other/pairs", "split": "dev", **pairs},
        "modelscope": {"ms_hub_url": "other/pairs", **pairs},
        "drawn": {"file_name": "mine.json", "num_samples": 5, **pairs},
        "answers": {"file_name": "answers.json"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(registry))
    return tmp_path


@pytest.mark.defect("U6")
def test_workers_of_ray_are_devices(factory: Path) -> None:
    result = of_file(factory, {**FACTORY, "ray_num_workers": 4}, "llama-factory")
    assert problems(result) == {}
    assert result.config.global_batch() == 32
    assert result.step == "A step has 32 pairs on 4 devices."
    axolotl = {**AXOLOTL, "use_ray": True, "ray_num_workers": 4}
    assert of_file(factory, axolotl, "axolotl").config.global_batch() == 8
    without = of_file(factory, {**axolotl, "use_ray": False}, "axolotl")
    assert without.config.global_batch() == 2
    line = "torchrun --nproc_per_node 8 -m x --ray_num_workers 4"
    assert problems(of_line(line, "llama-factory"))["ray_num_workers"] == IMPOSSIBLE


@pytest.mark.defect("U6")
@pytest.mark.parametrize("name", ["REMOTE:llamafactory/demo_data", {"mine": {}}])
def test_a_list_of_data_sets_that_is_not_here(name: Any, factory: Path) -> None:
    result = of_file(factory, {**FACTORY, "dataset_dir": name}, "llama-factory")
    assert problems(result)["dataset_dir"] == IMPOSSIBLE
    assert result.config.actor_train.data_args.dataset_dir is None


@pytest.mark.defect("U7")
@pytest.mark.parametrize(
    ("settings", "files", "expected"),
    [
        ({"max_samples": 1000}, "mine.json", {}),
        ({"dataset": "mine,hub"}, ["mine.json", "hf://datasets/org/pairs:dev"], {}),
        ({"dataset": "org/x", "dataset_dir": "ONLINE"}, "hf://datasets/org/x", {}),
        ({"dataset": "modelscope"}, None, {"dataset": IMPOSSIBLE}),
        ({"dataset": "drawn"}, None, {"dataset": IMPOSSIBLE}),
        ({"dataset": "answers"}, None, {"dataset": IMPOSSIBLE}),
        ({"dataset": "elsewhere"}, None, {"dataset": IMPOSSIBLE}),
        ({"stage": "sft"}, None, {"dataset": IMPOSSIBLE}),
        ({"model_name_or_path": "org/Llama-3-8B-GPTQ"}, "mine.json", {"(model)": IMPOSSIBLE}),
        ({"model_name_or_path": "org/Llama-3-8b-awq"}, "mine.json", {"(model)": IMPOSSIBLE}),
        ({"model_name_or_path": "org/Llama-3-8B-AQLM-2Bit-1x16-hf"}, "mine.json", {"(model)": IMPOSSIBLE}),
        ({"do_train": False, "do_predict": True}, "mine.json", {"do_predict": IMPOSSIBLE}),
    ],
)  # fmt: skip
def test_data_and_models_of_llama_factory(
    settings: dict[str, Any], files: Any, expected: dict[str, str], factory: Path
) -> None:
    result = of_file(factory, {**FACTORY, **settings}, "llama-factory")
    assert problems(result) == expected | ({} if files else {"(data)": MISSING})
    if files:
        data = result.config.actor_train.data_args
        assert (data.file_name, data.max_samples) == (files, settings.get("max_samples"))


# ---- adapters of an SFT, trained further on pairs


OWN, REFERENCE = "actor_train.model_args", "reference.model_args"
SWIFT = "swift rlhf --rlhf_type dpo --model m --dataset d.jsonl --torch_dtype bfloat16"


def adapters(result: Migrated) -> tuple[Any, Any, Any]:
    own, reference = result.config.actor_train.model_args, result.config.reference.model_args
    return own.adapter_name_or_path, own.lora_rank, reference.adapter_name_or_path


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_of_swift(kind: str) -> None:
    line = SWIFT.replace("swift", "megatron")
    result = of_line(f"{line} --recompute_granularity {kind}", "swift")
    assert result.config.actor_train.model_args.disable_gradient_checkpointing is False


@pytest.mark.defect("U8")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--adapters A", ("A", None, None)),
        ("--adapters A --lora_rank 8 --lora_alpha 32", ("A", None, None)),
        ("--adapters A --ref_adapters A", ("A", None, "A")),
        ("--adapters A --ref_adapters B", ("A", None, "B")),
        ("--rlhf_type orpo --adapters A", ("A", None, "A")),  # no reference
    ],
)
def test_adapters_of_swift(flags: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    result = of_line(f"{SWIFT} {flags}", "swift")
    assert problems(result) == {}
    assert adapters(result) == expected
    file = tmp_path / "written.yaml"
    file.write_text(result.yaml())
    assert CliRunner().invoke(app, ["config", "show", str(file)]).exit_code == 0


@pytest.mark.defect("U8")
def test_adapters_of_llama_factory(factory: Path) -> None:
    values = {**FACTORY, "adapter_name_or_path": "saves/sft", "lora_rank": 8, "lora_target": "all"}
    result = of_file(factory, values, "llama-factory")
    assert problems(result) == {}
    assert adapters(result) == ("saves/sft", None, None)  # the reference is the base model
    assert "cannot be combined" not in result.yaml()
    for more in ({"create_new_adapter": True}, {"adapter_name_or_path": "a,b"}):
        found = problems(of_file(factory, {**values, **more}, "llama-factory"))
        assert found["adapter_name_or_path"] == IMPOSSIBLE


# ---- secrets


@pytest.mark.defect("U9")
@pytest.mark.parametrize("flag", ["--use_wandb", "--logger.wandb.key"])
def test_keys_of_trackers_are_masked(flag: str, tmp_path: Path) -> None:
    line = f"deepspeed --module openrlhf.cli.train_dpo --pretrain m --bf16 --dataset d.jsonl {flag} {SECRET}"
    out = tmp_path / "dpo.yaml"
    command = ["migrate", "--line", line, "--out", str(out), "--force"]
    shown = CliRunner().invoke(app, command).output
    shown += CliRunner().invoke(app, [*command, "--json"]).output
    shown += "".join(file.read_text() for file in tmp_path.glob("*.yaml"))
    assert SECRET not in shown
    assert "wandb" in shown


# ---- messages


@pytest.mark.defect("U12")
@pytest.mark.parametrize("name", ["llama-factory", "axolotl", "swift", "openrlhf", "colossalchat"])
def test_no_setting_of_a_tool_is_called_unknown(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    listed = Path(migrate.__code__.co_filename).parent / "keys" / f"{name}.txt"
    assert "bench/migrate_keys.py" in listed.read_text()
    values = {key: "a value that is not the default" for key in peer.settings if not peer.rule(key)}
    found = of_file(tmp_path, {**values, "gradient_accumulation_stepz": 1}, name)
    rows = [row for row in found.rows if row.key in values]
    assert {row.status for row in rows} <= {IMPOSSIBLE}
    assert {row.note for row in rows} <= {"Rather has no rule for it"}
    typo = note(found, "gradient_accumulation_stepz")
    assert typo.startswith(f"{name} {peer.version} has no such setting")


@pytest.mark.defect("U12")
def test_a_setting_without_a_rule_may_have_its_default(factory: Path) -> None:
    result = of_file(factory, {**FACTORY, "train_from_scratch": False}, "llama-factory")
    assert {row.status for row in result.rows if row.key == "train_from_scratch"} == {NEEDLESS}
    result = of_file(factory, {**FACTORY, "train_from_scratch": True}, "llama-factory")
    assert problems(result) == {"train_from_scratch": IMPOSSIBLE}


AXOLOTL: dict[str, Any] = {
    "base_model": "m", "rl": "dpo", "learning_rate": 1e-5, "micro_batch_size": 2,
    "datasets": [{"path": "d.jsonl", "type": "chat_template.default"}], "warmup_steps": 5,
}  # fmt: skip


@pytest.mark.defect("U12")
def test_axolotl_without_rl_trains_on_answers(tmp_path: Path) -> None:
    rows = [{"path": "d.jsonl", "type": "chat_template"}]
    values = {**AXOLOTL, "rl": None, "datasets": rows}
    result = of_file(tmp_path, values, "axolotl")
    assert problems(result) == {}
    config = result.config
    assert (config.task, config.actor_train.data_args.score) == ("sft", "assistant")
    packed = of_file(tmp_path, {**values, "sample_packing": True}, "axolotl")
    assert problems(packed) == {"sample_packing": IMPOSSIBLE}
    alpaca = of_file(tmp_path, {**values, "datasets": [{"path": "d", "type": "alpaca"}]}, "axolotl")
    assert problems(alpaca)["datasets"] == IMPOSSIBLE


@pytest.mark.defect("U12")
def test_the_number_of_devices_that_the_launcher_says(factory: Path) -> None:
    told = of_line(f"NPROC_PER_NODE=8 {SWIFT} --per_device_train_batch_size 2", "swift")
    assert told.step == "A step has 16 pairs on 8 devices."
    unknown = of_file(factory, FACTORY, "llama-factory")
    assert "8 pairs on each device; the source does not say" in unknown.step
    assert "--devices" in unknown.step


@pytest.mark.defect("U12")
def test_what_is_always_so_agrees_with_the_file(factory: Path) -> None:
    for peer in PEERS.values():
        assert not any("Only the last turn" in sentence for sentence in peer.always)


# ---- ZeRO and FSDP without a number of devices


@pytest.mark.defect("U26")
@pytest.mark.parametrize("sharded", [{"deepspeed": "zero3.json"}, {"fsdp": "full_shard auto_wrap"}])
def test_sharded_weights_need_the_number_of_devices(sharded: dict[str, str], factory: Path) -> None:
    result = of_file(factory, {**FACTORY, **sharded}, "llama-factory")
    assert problems(result) == {"(devices)": MISSING}
    assert "does not say how many there are" in result.yaml()
    file = factory / "source.yaml"
    known = migrate(read_file(file), PEERS["llama-factory"], devices=4)
    assert problems(known) == {}
    assert known.config.global_batch() == 32


# ---- arguments of a script


@pytest.mark.defect("U16")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("/data/$1.jsonl", {"dataset": IMPOSSIBLE, "(data)": MISSING}),
        ('"/data/${1}.jsonl"', {"dataset": IMPOSSIBLE, "(data)": MISSING}),
        ("$1", {"dataset": IMPOSSIBLE, "(data)": MISSING}),
        ("${1:-/data/d.jsonl}", {}),
        ('/data/d.jsonl "$@"', {}),
    ],
)
def test_arguments_of_a_script_are_only_known_when_it_runs(
    data: str, expected: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"set -x\n{SWIFT.replace('d.jsonl', data)}\n")
    result = migrate(read_file(script), PEERS["swift"])
    assert problems(result) == expected
    if expected:
        assert note(result, "dataset") == "its value is only known when it runs"
    else:
        assert result.config.actor_train.data_args.file_name == "/data/d.jsonl"


# ---- Axolotl: warm-up, checkpoints, evaluations


@pytest.mark.defect("U20")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"(warm-up)": MISSING}),
        ({"max_steps": 1000}, 30),
        ({"max_steps": 9000}, 100),
        ({"max_steps": 50}, 2),  # 1 becomes 2
        ({"warmup_steps": 7}, 7),
        ({"warmup_ratio": 0.1, "max_steps": 99}, 9),
    ],
)
def test_the_warm_up_of_axolotl(settings: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    values = {key: v for key, v in AXOLOTL.items() if key != "warmup_steps"} | {"save_steps": 9}
    result = of_file(tmp_path, {**values, **settings}, "axolotl")
    if isinstance(expected, dict):
        assert problems(result) == expected
    else:
        assert problems(result) == {}
        assert result.config.actor_train.training_args.warmup_steps == expected


@pytest.mark.defect("U20")
@pytest.mark.parametrize(
    ("settings", "save", "evaluate"),
    [
        ({"saves_per_epoch": 2, "evals_per_epoch": 4, "num_epochs": 2, "val_set_size": 0.1}, 0.25, 0.125),
        ({"saves_per_epoch": 1, "num_epochs": 1}, None, None),
        ({"num_epochs": 4}, 0.25, None),  # after each epoch, by default
        ({"save_strategy": "epoch", "num_epochs": 2}, 0.5, None),
        ({"save_strategy": "no"}, None, None),
        ({"save_steps": 0.2}, 0.2, None),
        ({"save_steps": 50}, 50, None),
    ],
)  # fmt: skip
def test_checkpoints_and_evaluations_of_axolotl(
    settings: dict[str, Any], save: Any, evaluate: Any, tmp_path: Path
) -> None:
    result = of_file(tmp_path, {**AXOLOTL, **settings}, "axolotl")
    assert problems(result) == {}
    assert (result.config.save_steps, result.config.eval_steps) == (save, evaluate)


@pytest.mark.defect("U20")
def test_epochs_that_are_not_whole_have_no_exact_number_of_checkpoints(tmp_path: Path) -> None:
    for more in ({"num_epochs": 1.5}, {"max_steps": 10}):
        values = {**AXOLOTL, "save_strategy": "epoch", **more}
        assert problems(of_file(tmp_path, values, "axolotl")) == {"save_strategy": IMPOSSIBLE}


@pytest.mark.defect("U20")
@pytest.mark.parametrize(
    ("value", "total", "steps"), [(0.1, 30, 3), (0.1, 3, 1), (1 / 3, 9, 3), (0.3, 10, 3), (7, 3, 7)]
)
def test_a_fraction_of_the_run(value: float, total: int, steps: int) -> None:
    held_out = {"data_args": {"split": 5}}
    config = DPOConfig.model_validate(
        {"save_steps": value, "eval_steps": value, "validation": held_out}
    )
    assert config.interval("save_steps", total) == steps
    assert config.interval("eval_steps", total) == steps


@pytest.mark.defect("U20")
def test_a_fraction_needs_a_length() -> None:
    assert DPOConfig(save_steps=None).interval("save_steps", None) is None
    with pytest.raises(ConfigError, match=r"save_steps: 0\.5 is a fraction of the run"):
        DPOConfig(save_steps=0.5).interval("save_steps", None)
    with pytest.raises(ConfigError, match="a fraction of the run between 0 and 1"):
        DPOConfig(save_steps=1.5)


# ---- other tools


def test_colossalchats_scripts_as_published_are_not_determined() -> None:
    line = 'colossalai run --nproc_per_node 4 train_dpo.py --pretrain "" --dataset a --batch_size 1'
    assert problems(of_line(line, "colossalchat"))["(model)"] == MISSING


@pytest.mark.defect("U7")
def test_max_samples_of_openrlhf() -> None:
    line = (
        "deepspeed --module openrlhf.cli.train_dpo --pretrain m --bf16 --max_samples 500 --dataset "
    )
    result = of_line(f"{line} a.jsonl --eval_dataset b.jsonl", "openrlhf")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.max_samples == 500
    assert result.config.validation.data_args.max_samples is None  # only training rows
    several = of_line(f"{line} a.jsonl,b.jsonl", "openrlhf")
    assert problems(several) == {"max_samples": IMPOSSIBLE}


def test_splits_of_older_versions_of_openrlhf() -> None:
    line = "deepspeed --module openrlhf.cli.train_dpo --pretrain m --bf16 --dataset org/d --train_split a --eval_split b"
    result = of_line(line, "openrlhf")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.file_name == "hf://datasets/org/d:a"
    assert result.config.validation.data_args.file_name == "hf://datasets/org/d:b"


def test_an_empty_key_that_no_list_has_changes_nothing(tmp_path: Path) -> None:
    result = of_file(tmp_path, {**AXOLOTL, "eval_table_max_new_tokens": None}, "axolotl")
    assert problems(result) == {}


@pytest.mark.parametrize("name", ["shared", *(name.replace("-", "_") for name in NAMES)])
def test_every_key_in_a_table_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are texts: a typing error in one of Rather's keys must not wait for a user."""
    paths: list[str] = []
    translate = rules._same

    def record(text: str, note: str) -> rules.Rule:
        paths.extend(map(rules.full, text.partition(": ")[0].rstrip(":").split()))
        return translate(text, note)

    monkeypatch.setattr(rules, "_same", record)
    runpy.run_path(str(Path(rules.__file__).parent / "peers" / f"{name}.py"))
    assert paths or name == "roll"  # it has Rather's own keys
    assert [path for path in paths if path not in table() and not _is_in_mapping(path)] == []
