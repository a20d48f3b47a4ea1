"""ROLL's own files: three generations of dpo_config.yaml load as they are, the dense ones run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rather.cli import train_from_config
from rather.config import compat
from rather.config.keys import table
from rather.config.load import config_from_dict, load
from rather.config.strategies import layout
from tests.config.conftest import smallest
from tests.tiny import make_model, make_pairs, metrics

FILES = {
    name: Path(__file__).parent / "roll" / name / "dpo_config.yaml"
    for name in ("dense", "older", "experts")
}


def elsewhere(folder: Path) -> list[str]:
    """Model, pairs, folders, platform, devices and length of a run: what differs from machine to
    machine."""
    make_model(folder / "model")
    pairs, held_out = (
        make_pairs(folder / "pairs.jsonl", 32),
        make_pairs(folder / "held_out.jsonl", 4, seed=1),
    )
    return [
        f"pretrain={folder / 'model'}",
        f"actor_train.data_args.file_name=[{pairs}]",
        f"validation.data_args.file_name={held_out}",
        f"output_dir={folder / 'output'}",
        f"logging_dir={folder / 'logs'}",
        f"checkpoint_config.output_dir={folder / 'copies'}",
        f"tracker_kwargs.log_dir={folder / 'board'}",
        "platform=cpu",
        "actor_train.device_mapping=[0]",
        "reference.device_mapping=[0]",
        "max_steps=2",
        "actor_train.training_args.warmup_steps=1",
    ]


def keys_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what comes before the first colon of each message."""
    return [message.partition(":")[0] for message in caplog.messages]


def test_dense_file_loads_as_it_is() -> None:
    config = load(FILES["dense"])
    assert config.global_batch() == 128
    assert config.beta == 0.1
    assert config.checkpoint_copy_dir.name == "qwen2.5-3B-dpo-config"
    assert layout(config.actor_train).stage == 1
    assert config.system_envs == {"USE_MODELSCOPE": "1"}


def test_older_file_loads_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Its sizes per device count answers, its reference has a template, its defaults list names
    ROLL's own groups."""
    with caplog.at_level(logging.WARNING):
        config = load(FILES["older"])
    assert config.global_batch() == config.train_batch_size == 64
    assert config.actor_train.training_args.per_device_train_batch_size == 8
    assert config.actor_train.data_args.template == "qwen2_5_dpo"
    assert keys_of(caplog) == [
        "actor_train.training_args.per_device_train_batch_size",
        "reference.data_args (dpo_config.yaml",
    ]


def test_file_with_experts_loads_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Its 16 devices are on two nodes, although it says one: ROLL corrects that, too."""
    with caplog.at_level(logging.WARNING):
        config = load(FILES["experts"])
    assert config.num_nodes == 2
    for role in config.roles.values():
        found = layout(role)
        assert (found.dp, found.tp, found.pp, found.ep) == (8, 1, 2, 8)
    assert layout(config.actor_train).stage == 1
    said = " ".join(keys_of(caplog))
    assert all(name in said for name in ("num_nodes", "moe_grouped_gemm", "moe_permute_fusion"))
    assert "expert_model_parallel_size" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "older"])
def test_dense_files_run(name: str, tmp_path: Path) -> None:
    overrides = [
        *elsewhere(tmp_path),
        *(["train_batch_size=8"] if name == "older" else []),
    ]  # 64 on eight devices
    assert train_from_config(FILES[name], overrides) == 0
    config = load(FILES[name], overrides)
    steps = [line for line in metrics(config) if "loss" in line]
    assert len(steps) == 2
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=2e-3)
    assert (config.run_dir / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("group", "stage", "host"),
    [("deepspeed_zero", 0, False), ("deepspeed_zero2", 2, False), ("deepspeed_zero3", 3, False),
     ("deepspeed_zero3_cpuoffload", 3, True)],
)  # fmt: skip
def test_groups_of_deepspeed_are_shipped(write, group: str, stage: int, host: bool) -> None:
    text = f"""
    defaults:
      - ../config/{group}@_here_
    pretrain: org/model
    actor_train:
      data_args:
        file_name: pairs.json
      strategy_args:
        strategy_name: deepspeed_train
        strategy_config: ${{{group}}}
      device_mapping: 0-3
    """
    found = layout(load(write(text)).actor_train)
    assert (found.stage, found.host) == (stage, host)


def test_a_users_own_group_comes_first(write, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "deepspeed_zero3.yaml").write_text(
        "deepspeed_zero3: {zero_optimization: {stage: 1}}\n"
    )
    (tmp_path / "runs").mkdir()
    text = """
    defaults: [../config/deepspeed_zero3@_here_]
    pretrain: org/model
    actor_train:
      data_args: {file_name: pairs.json}
      strategy_args: {strategy_name: deepspeed_train, strategy_config: "${deepspeed_zero3}"}
      device_mapping: 0-3
    """
    assert layout(load(write(text, "runs/dpo.yaml")).actor_train).stage == 1


@pytest.mark.parametrize(
    "setting",
    ["rollout_batch_size=128", "is_offload_states=true", "rpc_timeout=3600", "actor_train.use_sequence_packing=true",
     "actor_train.strategy_args.strategy_config.overlap_grad_reduce=true", "val_batch_size=8",
     "actor_train.training_args.save_hf_model=true", "checkpoint_config.async_upload=true"],
)  # fmt: skip
def test_ignored_keys_are_logged_once(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_from_dict(smallest(setting))
    assert keys_of(caplog) == [setting.partition("=")[0]]


def test_keys_that_request_nothing_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_from_dict(
            smallest("is_offload_states=false", "actor_train.training_args.fp16=false")
        )
    assert not caplog.records


def test_response_length_next_to_sequence_length_is_only_logged() -> None:
    assert (
        config_from_dict(smallest("response_length=512", "sequence_length=768")).sequence_length
        == 768
    )


def test_half_of_a_batch_is_not_taken_for_answers_without_val_batch_size(judged) -> None:
    sizes = ["train_batch_size=4", "actor_train.training_args.per_device_train_batch_size=8",
             "actor_train.training_args.gradient_accumulation_steps=1"]  # fmt: skip
    assert "4 pairs is not dp 1" in judged(*sizes)[0]
    config = config_from_dict(smallest(*sizes, "val_batch_size=4"))
    assert config.actor_train.training_args.per_device_train_batch_size == 4


def test_no_key_of_rather_is_ignored() -> None:
    ours = table()
    assert not [path for path in (*compat.IGNORED, *compat.REFUSED) if path in ours]
