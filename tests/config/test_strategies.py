"""What a strategy's name becomes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.config.strategies import STAGES, Layout, layout
from rather.errors import ConfigError
from tests.house.source import ROOT


def config_of(
    strategy: dict[str, Any] | None = None,
    devices: int = 4,
    actor: dict[str, Any] | None = None,
    **changes: Any,
) -> DPOConfig:
    actor = {
        "data_args": {"file_name": "pairs.json"},
        "device_mapping": list(range(devices)),
        **(actor or {}),
    }
    actor |= {"strategy_args": strategy} if strategy else {}
    return config_from_dict({"pretrain": "model", "actor_train": actor, **changes})


def trained(strategy: dict[str, Any] | None, devices: int = 4) -> Layout:
    return layout(config_of(strategy, devices).actor_train)


def named(name: str, **details: Any) -> dict[str, Any]:
    return {"strategy_name": name, "strategy_config": details}


@pytest.mark.parametrize(
    ("strategy", "stage", "shard", "host"),
    [
        (named("ddp"), 0, 1, False),
        (named("zero1"), 1, 4, False),
        (named("zero2"), 2, 4, False),
        (named("zero2_cpu"), 2, 4, True),
        (named("zero3"), 3, 4, False),
        (named("fsdp2_train"), 3, 4, False),
        (named("hsdp", shard_size=2), 3, 2, False),
        (named("gemini"), 3, 4, False),
        (named("gemini_auto"), 3, 4, True),
        (named("3d"), 0, 1, False),
        (named("3d", zero_stage=1), 1, 4, False),
        (named("megatron_train"), 0, 1, False),
        (named("megatron_train", use_distributed_optimizer=True), 1, 4, False),
        (named("deepspeed_train", zero_optimization={"stage": 2}), 2, 4, False),
        (
            named(
                "deepspeed_train",
                zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}},
            ),
            3,
            4,
            True,
        ),
        (None, 2, 4, False),
    ],
)
def test_a_name_is_a_stage_and_degrees(
    strategy: dict[str, Any] | None, stage: int, shard: int, host: bool
) -> None:
    found = trained(strategy)
    assert (found.dp, found.stage, found.shard, found.host) == (4, stage, shard, host)


def test_one_device_has_nothing_to_divide() -> None:
    assert (trained(None, 1).stage, trained(None, 1).shard) == (0, 1)


def test_megatrons_keys() -> None:
    keys = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    keys |= {
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
    }
    found = trained(named("megatron_train", recompute_num_layers=1, **keys), 16)
    assert (found.dp, found.tp, found.pp, found.cp) == (2, 2, 2, 2)
    assert found.sequence_parallel
    assert found.recompute == "full"


def test_a_frozen_model_divides_only_its_weights() -> None:
    for name, stage in {
        "zero2": 0,
        "zero3": 3,
        "fsdp2_infer": 3,
        "megatron_infer": 0,
        "hf_infer": 0,
    }.items():
        config = config_of(None, reference={"strategy_args": {"strategy_name": name}})
        assert layout(config.reference).stage == stage, name


def test_the_layout_says_what_a_name_became() -> None:
    said = trained(
        named("megatron_train", tensor_model_parallel_size=2, use_distributed_optimizer=True)
    ).describe()
    expected = "megatron_train on 4 devices: dp 2 x tp 2; optimizer state sharded over 2 ranks"
    assert said == f"{expected}; run by torch.distributed"
    assert "2 replicas of 2" in trained(named("hsdp", shard_size=2)).describe()
    assert "host memory" in trained(named("gemini_auto")).describe()
    assert "each dp rank holds everything" in trained(named("ddp")).describe()


@pytest.mark.parametrize(
    ("strategy", "key", "said"),
    [
        (named("megatron_train", overlap_gradients=True), "overlap_gradients", "unknown key"),
        (
            named("megatron_train", expert_model_parallel_size=3),
            "strategy_config",
            "expert parallel 3 does not divide the 4 data-parallel ranks",
        ),
        (
            named("zero1", use_distributed_optimizer=True),
            "use_distributed_optimizer",
            "is a key of megatron_train",
        ),
        (
            named("megatron_train", recompute_method="block"),
            "recompute_method",
            "'block' is not allowed: Input should be 'uniform'",
        ),
        (
            named("megatron_train", recompute_num_layers=1),
            "recompute_num_layers",
            "needs recompute_granularity: full",
        ),
        (named("megatron_train", sequence_parallel=True), "sequence_parallel", "tp is 1"),
        (named("hsdp"), "shard_size", "hsdp needs a divisor of the 4"),
        (named("hsdp", shard_size=3), "shard_size", "hsdp needs a divisor of the 4"),
        (named("3d", zero_stage=4), "zero_stage", "4 is not allowed: Input should be 0, 1, 2 or 3"),
        (named("hf_infer"), "strategy_name", "'hf_infer' is not a strategy of this role"),
        (
            named("deepspeed_train", optimizer={"type": "AdamW"}),
            "optimizer.type",
            "is not supported",
        ),
        (
            named("deepspeed_train", train_batch_size=8),
            "train_batch_size",
            "set train_batch_size at the top level instead",
        ),
        (
            named("deepspeed_train", zero_optimization={"offload_param": {"device": "nvme"}}),
            "zero_optimization.offload_param.device",
            "'nvme' is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    strategy: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(strategy)
    assert key in str(refused.value)
    assert said in str(refused.value)


def test_deepspeeds_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    content = {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    file.write_text(json.dumps(content))
    config = config_of(named("deepspeed_train", config_file=str(file)))
    assert (layout(config.actor_train).stage, layout(config.actor_train).host) == (3, True)
    assert config.max_grad_norm == 0.5
    with pytest.raises(ConfigError, match=r"strategy_config: 0.5 differs from max_grad_norm"):
        config_of(named("deepspeed_train", config_file=str(file)), max_grad_norm=2.0)
    file.write_text(json.dumps({**content, "scheduler": {"type": "WarmupLR"}}))
    with pytest.raises(
        ConfigError, match=r"ds\.json: scheduler\.type: 'WarmupLR' is not supported"
    ):
        config_of(named("deepspeed_train", config_file=str(file)))


def test_ref_tp_is_the_references_degree() -> None:
    config = config_of(named("megatron_train", tensor_model_parallel_size=4), ref_tp=2)
    assert (
        layout(config.actor_train).tp,
        layout(config.reference).tp,
        layout(config.reference).dp,
    ) == (4, 2, 2)
    with pytest.raises(ConfigError, match="ref_tp"):
        config_of(None, ref_tp=2, reference={"strategy_args": {"tp_size": 4}})


def test_the_table_names_every_strategy() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert not [name for name in STAGES if f"`{name}`" not in page]
