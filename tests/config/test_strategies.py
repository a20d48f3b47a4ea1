"""What a strategy's name becomes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rather.config.load import config_from_dict
from rather.config.strategies import STAGES, Layout, layout
from tests.cells import read_table
from tests.config.conftest import assert_the_last_is_refused, smallest, strategy
from tests.house.source import ROOT


def trained(text: str, devices: int = 4) -> Layout:
    return layout(config_from_dict(smallest(*strategy(text, devices))).actor_train)


NAMES = {  # stage, ranks that share the state, whether it is in host memory
    "ddp": (0, 1, False),
    "zero1": (1, 4, False),
    "zero2": (2, 4, False),
    "zero2_cpu": (2, 4, True),
    "zero3": (3, 4, False),
    "fsdp2_train": (3, 4, False),
    "hsdp: shard_size=2": (3, 2, False),
    "gemini": (3, 4, False),
    "gemini_auto": (3, 4, True),
    "3d": (0, 1, False),
    "3d: zero_stage=1": (1, 4, False),
    "megatron_train": (0, 1, False),
    "megatron_train: use_distributed_optimizer=true": (1, 4, False),
    "deepspeed_train: zero_optimization.stage=2": (2, 4, False),
    "deepspeed_train: zero_optimization={stage: 3, offload_param: {device: cpu}}": (3, 4, True),
    "default": (2, 4, False),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_a_stage_and_degrees(text: str) -> None:
    found = trained(text)
    assert found.dp == 4
    assert (found.stage, found.shard, found.host) == NAMES[text]


def test_one_device_has_nothing_to_divide() -> None:
    assert (trained("default", 1).stage, trained("default", 1).shard) == (0, 1)


def test_megatrons_keys() -> None:
    degrees = (
        "tensor_model_parallel_size=2 + pipeline_model_parallel_size=2 + context_parallel_size=2"
    )
    recompute = "recompute_granularity=full + recompute_method=uniform + recompute_num_layers=1"
    found = trained(f"megatron_train: {degrees} + sequence_parallel=true + {recompute}", 16)
    assert (found.dp, found.tp, found.pp, found.cp) == (2, 2, 2, 2)
    assert found.sequence_parallel
    assert found.recompute == "full"


@pytest.mark.parametrize(
    ("name", "stage"),
    [("zero2", 0), ("zero3", 3), ("fsdp2_infer", 3), ("megatron_infer", 0), ("hf_infer", 0)],
)
def test_a_frozen_model_divides_only_its_weights(name: str, stage: int) -> None:
    settings = [*strategy("default"), f"reference.strategy_args.strategy_name={name}"]
    assert layout(config_from_dict(smallest(*settings)).reference).stage == stage


def test_the_layout_says_what_a_name_became() -> None:
    said = trained(
        "megatron_train: tensor_model_parallel_size=2 + use_distributed_optimizer=true"
    ).describe()
    expected = "megatron_train on 4 devices: dp 2 x tp 2; optimizer state sharded over 2 ranks"
    assert said == f"{expected}; run by torch.distributed"
    for text, word in {
        "hsdp: shard_size=2": "2 replicas of 2",
        "gemini_auto": "host memory",
        "ddp": "each dp rank holds everything",
    }.items():
        assert word in trained(text).describe()


REFUSED = """
    megatron_train: overlap_gradients=true | unknown key; known: tp_size
    megatron_train: expert_model_parallel_size=3 | expert parallel 3 does not divide the 4 data-parallel ranks
    zero1: use_distributed_optimizer=true | is a key of megatron_train
    megatron_train: recompute_method=block | 'block' is not allowed: Input should be 'uniform'
    megatron_train: recompute_num_layers=1 | needs recompute_granularity: full
    megatron_train: sequence_parallel=true | tp is 1
    hsdp: shard_size=null | hsdp needs a divisor of the 4
    hsdp: shard_size=3 | hsdp needs a divisor of the 4
    3d: zero_stage=4 | 4 is not allowed: Input should be 0, 1, 2 or 3
    deepspeed_train: optimizer.type=AdamW | 'AdamW' is not supported
    deepspeed_train: train_batch_size=8 | set train_batch_size at the top level instead
    deepspeed_train: zero_optimization.offload_param.device=nvme | 'nvme' is not supported
    default: pp_size=2 + pipeline_schedule=1f1 | '1f1' is not allowed: Input should be 'gpipe', '1f1b'
    default: pp_size=2 + virtual_pipeline_model_parallel_size=0 | 0 is not allowed: Input should be greater than or equal to 1
    default: pp_size=2 + virtual_pipeline_model_parallel_size=2 + pipeline_schedule=1f1b | '1f1b' takes 1 to 1 stages a rank, not 2
    default: pp_size=2 + virtual_pipeline_model_parallel_size=3 + pipeline_schedule=zbv | 'zbv' takes 2 to 2 stages a rank, not 3
    default: pp_size=2 + virtual_pipeline_model_parallel_size=1 + pipeline_schedule=interleaved | takes 2 to any stages a rank, not 1
    default: pp_size=2 + pipeline_schedule=zbv + recompute_granularity=selective | selective needs one backward pass, and 'zbv' has two; set full or null
    default: virtual_pipeline_model_parallel_size=2 | needs pp_size > 1; remove it
    default: pipeline_schedule=gpipe | needs pp_size > 1; remove it
"""


@pytest.mark.parametrize(("cell", "said"), read_table(REFUSED))
def test_what_cannot_be_honoured_is_refused_by_name(judged, cell: str, said: str) -> None:
    settings = strategy(cell)
    assert_the_last_is_refused(judged(*settings), settings, said)


def test_hsdp_needs_its_size(judged) -> None:
    (line,) = judged(*strategy("hsdp"))
    assert "strategy_config.shard_size: hsdp needs a divisor of the 4" in line


def test_deepspeeds_json_is_read(judged, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    content = {"bf16": {"enabled": "auto"}, "gradient_clipping": 0.5, "zero_optimization": zero}
    content["train_micro_batch_size_per_gpu"] = "auto"
    file.write_text(json.dumps(content))
    settings = strategy(f"deepspeed_train: config_file={file}")
    config = config_from_dict(smallest(*settings))
    assert (layout(config.actor_train).stage, layout(config.actor_train).host) == (3, True)
    assert config.max_grad_norm == 0.5
    (line,) = judged(*settings, "max_grad_norm=2.0")
    assert "strategy_config: 0.5 differs from max_grad_norm" in line
    file.write_text(json.dumps({**content, "scheduler": {"type": "WarmupLR"}}))
    (line,) = judged(*settings)
    assert "ds.json: scheduler.type: " in line


def test_ref_tp_is_the_references_degree(judged) -> None:
    settings = strategy("megatron_train: tensor_model_parallel_size=4")
    config = config_from_dict(smallest(*settings, "ref_tp=2"))
    actor, reference = layout(config.actor_train), layout(config.reference)
    assert (actor.tp, reference.tp, reference.dp) == (4, 2, 2)
    own = "reference.strategy_args.tp_size=4"
    assert judged(*strategy("default"), "ref_tp=2", own)[0].startswith("ref_tp: ")


def test_the_table_names_every_strategy() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert not [name for name in STAGES if f"`{name}`" not in page]
