"""Files of TRL, the alignment handbook and SimPO: shared keys, mixtures of data, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rather.config.inherit import value_at
from rather.tools.migrate.engine import Migrated, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import CHANGED, IMPOSSIBLE, MISSING, OPEN, UNKNOWN
from rather.tools.migrate.source import SourceSettings, read_line

TRL = PEERS["trl"]
BASIC = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "learning_rate": 1e-6, "bf16": True}


def of(values: dict[str, Any], program: str = "", devices: int | None = None) -> Migrated:
    return migrate(SourceSettings("test", values, program=program), TRL, devices)


def problems(result: Migrated) -> dict[str, str]:
    bad = (MISSING, IMPOSSIBLE, UNKNOWN)
    return {row.key: row.status for row in result.rows if row.status in bad}


# ---- keys that several trainers have


@pytest.mark.defect("U1")
@pytest.mark.parametrize(
    "key",
    ["precompute_ref_log_probs", "sync_ref_model", "truncation_mode", "max_completion_length",
     "generate_during_eval", "max_prompt_length", "is_encoder_decoder"],
)  # fmt: skip
def test_a_key_of_several_trainers_determines_none(key: str) -> None:
    assert problems(of({**BASIC, key: None})).get("(loss)") == MISSING


@pytest.mark.defect("U1")
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_a_loss_of_several_trainers_determines_none(loss: str) -> None:
    assert problems(of({**BASIC, "loss_type": loss})).get("(loss)") == MISSING


# ---- the alignment handbook and SimPO

HANDBOOK = {
    "model_name_or_path": "org/model",
    "dataset_mixture": {
        "datasets": [
            {"id": "org/pairs", "config": "default", "split": "train_prefs", "weight": 1.0,
             "columns": ["chosen", "rejected"]},
            {"id": "org/more", "config": "small", "columns": ["chosen", "rejected"]},
        ],
        "test_split_size": 200,
        "seed": 0,
    },
    "bf16": True, "learning_rate": 5e-7, "max_length": 1024, "max_prompt_length": 512,
}  # fmt: skip
FILES = ["hf://datasets/org/pairs:train_prefs", "hf://datasets/org/more:small/train"]


@pytest.mark.defect("U26")
@pytest.mark.parametrize("program", ["dpo", "orpo"])
def test_a_mixture_of_the_handbook(program: str) -> None:
    result = of(HANDBOOK, program)
    assert problems(result) == {}
    assert value_at(result.config, "actor_train.data_args.file_name") == FILES
    assert result.config.validation.data_args.split == 200
    (row,) = (row for row in result.rows if row.key == "dataset_mixture")
    assert row.status == CHANGED


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"id": "org/a", "weight": 0.5}, "weight 0.5 is a random part of the rows"),
        ({"id": "org/a", "columns": ["chosen", "chat_template_kwargs"]}, "chat_template_kwargs"),
        ({"id": "org/a", "shards": 3}, "shards: not a setting"),
    ],
)
def test_what_a_mixture_cannot_be(entry: dict[str, Any], said: str) -> None:
    result = of({**HANDBOOK, "dataset_mixture": {"datasets": [entry]}}, "dpo")
    assert problems(result)["dataset_mixture"] == IMPOSSIBLE
    assert any(said in row.note for row in result.rows)


def test_messages_of_a_mixture_are_scored_whole() -> None:
    chats = {"datasets": [{"id": "org/chats", "columns": ["messages"]}]}
    result = of({**BASIC, "dataset_mixture": chats, "dataset_name": None}, "sft")
    assert problems(result) == {}
    assert result.config.actor_train.data_args.score == "all"


MIXER = {
    "model_name_or_path": "org/model", "dataset_mixer": {"org/pairs": 1.0},
    "dataset_splits": ["train_prefs", "test_prefs"], "auto_insert_empty_system_msg": False,
    "bf16": True, "learning_rate": 3e-7, "max_length": 1024, "max_prompt_length": 512,
    "evaluation_strategy": "steps", "eval_steps": 400,
}  # fmt: skip


@pytest.mark.defect("U26")
def test_the_older_mixer_of_the_handbook() -> None:
    result = of(MIXER, "run_dpo")
    assert problems(result) == {}
    assert value_at(result.config, "actor_train.data_args.file_name") == FILES[0]
    held_out = value_at(result.config, "validation.data_args.file_name")
    assert held_out == "hf://datasets/org/pairs:test_prefs"
    assert result.config.eval_steps == 400
    half = of({**MIXER, "dataset_mixer": {"org/pairs": 0.5}}, "run_dpo")
    assert problems(half)["dataset_mixer"] == IMPOSSIBLE


@pytest.mark.defect("U1")
def test_a_simpo_file_is_simpo() -> None:
    result = of({**MIXER, "beta": 2.0, "gamma_beta_ratio": 0.8})
    assert problems(result) == {}
    config = result.config
    assert (config.loss_names, config.beta, config.gamma_beta_ratio) == (["simpo"], 2.0, 0.8)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, {"auto_insert_empty_system_msg": MISSING}),
        ("{% if system %}{% endif %}", {"auto_insert_empty_system_msg": MISSING}),
        ("{{ messages }}", {}),
    ],
)
def test_an_inserted_system_message_is_reported(template: str | None, expected: Any) -> None:
    """The scripts that read dataset_mixer insert an empty one if the template has such messages."""
    values = {key: value for key, value in MIXER.items() if "system" not in key}
    assert problems(of({**values, "chat_template": template}, "dpo")) == expected


def test_a_template_in_the_file_is_to_be_saved() -> None:
    result = of({**BASIC, "chat_template": "{{ messages }}"}, "dpo")
    (row,) = (row for row in result.rows if row.key == "chat_template")
    assert (row.status, result.config.global_template) == (OPEN, "chat_template.jinja")


# ---- devices


@pytest.mark.defect("U26")
@pytest.mark.parametrize(
    "sharded", [{"deepspeed": "ds_zero3.json"}, {"fsdp": "full_shard auto_wrap"}]
)
def test_a_sharded_run_of_unknown_size_does_not_determine_the_batch(
    sharded: dict[str, Any],
) -> None:
    result = of({**BASIC, **sharded}, "dpo")
    assert problems(result) == {"(devices)": MISSING}
    assert "not determined: (devices)" in result.yaml()
    eight = of({**BASIC, **sharded}, "dpo", devices=8)
    assert problems(eight) == {}
    assert eight.config.global_batch() == 64


@pytest.mark.defect("U26")
def test_a_missing_file_of_accelerate_does_not_determine_the_batch(tmp_path: Path) -> None:
    line = "accelerate launch --config_file {} scripts/dpo.py --model_name_or_path m --dataset_name d.jsonl"
    missing = migrate(read_line(line.format("zero3.yaml"), folder=tmp_path), TRL)
    assert problems(missing) == {"(devices)": MISSING}
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    here = migrate(read_line(line.format("zero3.yaml"), folder=tmp_path), TRL)
    assert problems(here) == {}
    assert here.config.global_batch() == 32
