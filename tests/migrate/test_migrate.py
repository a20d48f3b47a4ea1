"""Settings of every peer become a YAML that loads, and no key is lost on the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rather.cli import app
from rather.config.inherit import value_at
from rather.config.keys import table
from rather.config.load import load
from rather.errors import ConfigError
from rather.tools.migrate import NAMES
from rather.tools.migrate.engine import Migrated, guess, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import (
    CHANGED,
    IMPOSSIBLE,
    KEPT,
    LEFT_OUT,
    MISSING,
    NEEDLESS,
    RENAMED,
    UNKNOWN,
    WRITTEN,
)
from rather.tools.migrate.source import SourceSettings, read_file, read_line
from rather.tracking.json_lines import flatten

SOURCES = {path.stem: path for path in (Path(__file__).parent / "sources").iterdir()}
OF_ROLL = Path(__file__).parents[1] / "config" / "roll"
ROLL_FILES = {name: OF_ROLL / name / "dpo_config.yaml" for name in ("dense", "older", "experts")}
TRAINING = "actor_train.training_args"
SCHEDULE = f"{TRAINING}.lr_scheduler_kwargs"


def of(
    values: dict[str, Any], peer: str = "trl", devices: int | None = None, program: str = ""
) -> Migrated:
    return migrate(SourceSettings("test", values, program=program), PEERS[peer], devices)


def status(result: Migrated, key: str) -> str:
    (row,) = (row for row in result.rows if row.key == key)
    return row.status


def note(result: Migrated, key: str) -> str:
    (row,) = (row for row in result.rows if row.key == key)
    return row.note


# ---- the published examples


@pytest.mark.parametrize("name", SOURCES)
def test_examples_become_files_that_load(name: str, tmp_path: Path) -> None:
    source = read_file(SOURCES[name])
    peer = guess(source, PEERS)
    assert peer.name == name
    result = migrate(source, peer)
    file = tmp_path / "dpo.yaml"
    file.write_text(result.yaml(), encoding="utf-8")
    config = load(file)
    for path, value in flatten(result.values, whole=[SCHEDULE]).items():
        if path in table() and "device_mapping" not in path:
            assert value_at(config, path) == value, path
    said = {row.key for row in result.rows}
    assert flatten(source.values, whole=peer.whole.split()).keys() <= said
    assert UNKNOWN not in {row.status for row in result.rows}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl", {"pretrain": "Qwen/Qwen2-0.5B-Instruct", f"{TRAINING}.learning_rate": 5e-7, "save_steps": 500,
                 "actor_train.data_args.overlong": "truncate_response", "actor_train.model_args.lora_rank": 32,
                 "eval_steps": 50, "label_smoothing": None, "train_batch_size": None}),
        ("llama-factory", {"beta": 0.1, "global_template": "qwen3", "sequence_length": 2048, "output_dir":
                           "saves/qwen3-4b/lora", f"{TRAINING}.warmup_ratio": 0.1,
                           "actor_train.model_args.lora_target": "all-linear"}),
        ("axolotl", {"pref_loss": "sigmoid", f"{TRAINING}.per_device_train_batch_size": 2, "sequence_length": 4096,
                     "validation.data_args.split": 0.05, "actor_train.model_args.dtype": "bf16"}),
        ("openrlhf", {"train_batch_size": 256, "sequence_length": 8192, "save_steps": None, "max_grad_norm": 1.0,
                      "actor_train.strategy_args.strategy_name": "zero3", f"{TRAINING}.adam_beta2": 0.95}),
        ("colossalchat", {f"{TRAINING}.learning_rate": 1e-6, "actor_train.strategy_args.strategy_name": "zero2",
                          f"{TRAINING}.warmup_steps": 60, f"{TRAINING}.lr_scheduler_type": "cosine"}),
        ("nemo-rl", {"beta": 0.05, "train_batch_size": 128, f"{TRAINING}.adam_epsilon": 1e-5, "num_gpus_per_node": 8,
                     f"{TRAINING}.warmup_steps": 20, "max_steps": 150}),
        ("swift", {"rpo_alpha": 0.1, "validation.data_args.split": 0.01, f"{TRAINING}.weight_decay": 0.1,
                   "actor_train.strategy_args.strategy_name": "zero2", "max_ckpt_to_keep": 2}),
    ],
)  # fmt: skip
def test_what_examples_become(name: str, expected: dict[str, Any]) -> None:
    source = read_file(SOURCES[name])
    config = migrate(source, guess(source, PEERS)).config
    assert {path: value_at(config, path) for path in expected} == expected


def test_batches_are_those_of_all_devices() -> None:
    sizes = {
        "trl": 16,
        "llama-factory": 8,
        "openrlhf": 256,
        "colossalchat": 4 * 4 * 2,
        "swift": 2 * 16,
        "nemo-rl": 128,
    }
    for name, pairs in sizes.items():
        source = read_file(SOURCES[name])
        assert migrate(source, PEERS[name]).config.global_batch() == pairs, name
    assert of({"per_device_train_batch_size": 2}, devices=4).config.global_batch() == 8


def test_roll_files() -> None:
    results = {name: migrate(read_file(path), PEERS["roll"]) for name, path in ROLL_FILES.items()}
    assert {row.status for row in results["dense"].rows} == {KEPT, NEEDLESS}
    assert results["older"].config.global_batch() == 64
    assert "both roles read the same tokens" in note(results["older"], "reference.data_args")
    experts = "actor_train.strategy_args.strategy_config.expert_model_parallel_size"
    assert status(results["experts"], experts) == KEPT


# ---- TRL


def test_statuses() -> None:
    result = of(
        {
            "beta": 0.2,
            "max_length": 512,
            "padding_free": True,
            "optim": "adafactor",
            "betta": 1,
            "label_smoothing": 0.1,
        },
        program="dpo",
    )
    told = {"beta": KEPT, "max_length": RENAMED, "label_smoothing": CHANGED, "optim": IMPOSSIBLE, "betta": UNKNOWN,
            "padding_free": NEEDLESS, "num_train_epochs": WRITTEN, "(model)": MISSING}  # fmt: skip
    assert {key: status(result, key) for key in told} == told
    assert "# not known: betta = 1" in result.yaml()


@pytest.mark.parametrize(
    ("values", "smoothing"),
    [
        ({"label_smoothing": 0.1}, None),
        ({"label_smoothing": 0.1, "loss_type": ["robust"]}, 0.1),
        ({"label_smoothing": 0.1, "max_prompt_length": 128}, 0.1),  # before 0.29 it was cDPO
    ],
)
def test_label_smoothing_means_what_it_meant_there(
    values: dict[str, Any], smoothing: float | None
) -> None:
    assert of(values, program="dpo").config.label_smoothing == smoothing


def test_a_file_from_before_0_29_has_its_defaults() -> None:
    data = of({"base_model_attribute_name": None, "f_divergence_type": "alpha_divergence"})
    values = data.values["actor_train"]["data_args"]
    assert (values["overlong"], values["max_prompt_length"]) == ("truncate_prompt", 512)
    assert data.config.f_alpha_divergence_coef == 0.0


def test_defaults_of_trl_are_written_out() -> None:
    values = of({"beta": 0.1}, program="dpo").values
    assert values["actor_train"]["training_args"]["num_train_epochs"] == 3.0
    assert values["actor_train"]["data_args"]["overlong"] == "truncate_response"
    assert values["actor_train"]["model_args"] == {"dtype": "bf16"}
    assert (values["logging_steps"], values["save_steps"], values["max_ckpt_to_keep"]) == (
        10,
        500,
        0,
    )
    assert "learning_rate" not in values["actor_train"]["training_args"]  # ours is 1e-6 too


def test_a_schedule_without_warm_up_keeps_none() -> None:
    result = of({"lr_scheduler_type": "constant", "warmup_steps": 20})
    assert result.config.actor_train.training_args.warmup_steps == 0
    assert status(result, "warmup_steps") == CHANGED


def test_a_share_of_warm_up() -> None:
    assert of({"warmup_steps": 0.1}).config.actor_train.training_args.warmup_ratio == 0.1


def test_a_missing_length_limit_is_reported() -> None:
    result = of({"max_length": None})
    assert result.config.sequence_length == 32768
    assert status(result, "max_length") == CHANGED


def test_no_secret_is_written() -> None:
    result = of({"hub_token": "hf_canary", "hub_model_id": "me/model"})
    assert "canary" not in result.yaml() + "".join(f"{row.value}{row.note}" for row in result.rows)
    assert status(result, "hub_token") == status(result, "hub_model_id") == LEFT_OUT
    envs = {"HF_TOKEN": "hf_canary", "NCCL_DEBUG": "INFO"}
    roll = of({"pretrain": "m", "system_envs": envs}, "roll")
    assert roll.config.system_envs == {"NCCL_DEBUG": "INFO"}
    assert "canary" not in roll.yaml()
    assert of({"prompt_key": "question"}, "openrlhf").config.actor_train.data_args.columns == {
        "prompt": "question"
    }


def test_losses_and_weights() -> None:
    config = of(
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    ).config
    assert config.loss_names == ["sigmoid", "bco_pair", "sft"]
    assert config.loss_weights == [0.8, 0.2, 1.0]


def test_keys_the_loss_refuses_are_reported_and_left_out() -> None:
    result = of({"loss_type": "nca_pair", "f_divergence_type": "js_divergence"})
    assert result.config.f_divergence_type is None
    assert status(result, "f_divergence_type") == IMPOSSIBLE


def test_adapter_only_where_it_is_asked_for() -> None:
    assert of({"lora_r": 8}).config.actor_train.model_args.lora_rank is None
    peft = {"use_peft": True, "lora_dropout": 0.05}
    config = of({**peft, "model_name_or_path": "meta-llama/Llama-3.2-1B"}).config
    assert config.actor_train.model_args.lora_rank == 16
    assert config.actor_train.model_args.lora_target == ["q_proj", "v_proj"]
    unknown = of({**peft, "model_name_or_path": "microsoft/phi-2"})
    assert "(layers of the adapter)" in {row.key for row in unknown.rows if row.status == MISSING}


# ---- command lines


def test_a_line_with_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "model_name_or_path: org/model\nbeta: 0.3\nlearning_rate: 5e-7\n"
    )
    source = read_line("accelerate launch --num_processes 4 -m trl dpo --config base.yaml --beta 0.2 --bf16 false "
                       "--no_gradient_checkpointing --loss_type sigmoid sft", folder=tmp_path)  # fmt: skip
    assert source.devices == 4
    assert source.values == {"model_name_or_path": "org/model", "beta": 0.2, "learning_rate": 5e-7, "bf16": False,
                             "no_gradient_checkpointing": True, "loss_type": ["sigmoid", "sft"]}  # fmt: skip
    config = migrate(source, guess(source, PEERS)).config
    assert config.actor_train.model_args.disable_gradient_checkpointing is True
    assert config.actor_train.model_args.dtype == "fp32"
    assert config.actor_train.device_mapping == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("line", "devices"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 2 train_dpo.py --plugin 3d --tp 2", 16),
        ("CUDA_VISIBLE_DEVICES=0,1,2 swift rlhf --rlhf_type dpo", 1),  # one process
        ("CUDA_VISIBLE_DEVICES=0,1,2 accelerate launch dpo.py --beta 0.1", 3),
        ("NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo", 2),
        ("python train.py --beta 0.1", None),
    ],
)
def test_devices_of_a_launcher(line: str, devices: int | None) -> None:
    assert read_line(line).devices == devices


def test_a_line_that_names_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"config file nowhere.yaml does not exist"):
        read_line("trl dpo --config nowhere.yaml")


def test_colossalchats_simpo_is_what_it_computes() -> None:
    kept = of({"loss_type": "simpo_loss", "beta": 2.0}, "colossalchat").config
    assert (kept.loss_names, kept.length_normalization, kept.gamma) == (["sigmoid"], True, 1.4)
    free = of(
        {"loss_type": "simpo_loss", "disable_reference_model": True, "gamma": 1.0}, "colossalchat"
    ).config
    assert (free.loss_names, free.gamma) == (["simpo"], 1.0)


def test_deepspeed_by_its_file_or_its_name(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert of({"deepspeed": str(file)}).config.actor_train.strategy_args.strategy_config == {
        "config_file": str(file)
    }
    values = {"stage": "dpo", "deepspeed": "examples/deepspeed/ds_z3_config.json"}
    elsewhere = of(values, "llama-factory")
    assert elsewhere.config.actor_train.strategy_args.strategy_name == "zero3"
    assert status(elsewhere, "deepspeed") == CHANGED
    assert status(of({"deepspeed": "ds.json"}), "deepspeed") == IMPOSSIBLE


# ---- whose it is


@pytest.mark.parametrize("values", [{"beta": 0.1}, {"rl": "dpo", "stage": "dpo"}])
def test_an_ambiguous_file_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--from"):
        guess(SourceSettings("x.yaml", values), PEERS)


def test_the_option_lists_every_supported_tool() -> None:
    assert tuple(PEERS) == NAMES


@pytest.mark.parametrize("name", [name for name in PEERS if name != "roll"])
def test_every_default_and_mark_is_a_key_with_a_rule(name: str) -> None:
    peer = PEERS[name]
    assert not [key for key in (*peer.defaults, *peer.marks.split()) if peer.rule(key) is None and key not in
                ("ref_model_init_kwargs", "base_model_attribute_name", "is_encoder_decoder")]  # fmt: skip


# ---- the command


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "dpo.yaml"
    arguments = ["migrate", str(SOURCES["trl"]), "--trainer", "dpo", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "A step has 16 pairs on each device; the source does not say how many" in done.output
    assert yaml.safe_load(out.read_text())["pretrain"] == "Qwen/Qwen2-0.5B-Instruct"
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "either a file or a command line"), (["x.yaml", "--line", "y"], "either a file or a command line"), (["nowhere.yaml"], "cannot be read"),
     (["--line", "trl dpo --beta 0.1", "--from", "tlr"], "unknown; choose one of trl")],
)  # fmt: skip
def test_what_the_command_refuses(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["migrate", *arguments])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    "content", [b"beta: 0.1\nname: caf\xe9\n", b"a: &x [*x]\n"], ids=["no UTF-8", "in itself"]
)
def test_files_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    for arguments in ([str(file)], ["--line", f"trl dpo --config {file}"]):
        done = CliRunner().invoke(app, ["migrate", *arguments])
        assert done.exit_code == 2
        assert f"{file}: cannot be read" in done.output


def test_every_tool_is_documented() -> None:
    """TRL has a page; each of the others has a section, and a column in the table of keys."""
    pages = Path(__file__).parents[2] / "docs" / "coming_from"
    assert (pages / "trl.md").is_file()
    sections = (pages / "index.md").read_text(encoding="utf-8").lower().replace(" ", "")
    columns = (pages / "keys.md").read_text(encoding="utf-8")
    for name in NAMES[1:]:
        assert re.search(rf"^##(ms-)?{name}$", sections, re.MULTILINE), name
        assert name == "roll" or f"| {name} |" in columns
