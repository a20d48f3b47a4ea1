"""gpt-oss as it is released, with experts of four bits: read exactly, trained, exported in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.errors import ConfigError
from rather.model.files import ModelFiles
from rather.parallel.load import load_policy
from tests.model.test_hybrids import hybrid
from tests.train.test_hybrid_runs import assert_exported, run

STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss in bfloat16 whose experts are random numbers of four bits."""
    folder = tmp_path_factory.mktemp("released")
    hybrid("gpt_oss").bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        random = torch.randint(0, 256, (*shape, 16), generator=draw)
        tensors[f"{name}_blocks"] = random.to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 124, shape, generator=draw).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    packing = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = json.loads(file.read_text("utf-8")) | {"quantization_config": packing}
    file.write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="module")
def by_transformers(released: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        released, dtype="bfloat16", quantization_config=Mxfp4Config(dequantize=True)
    )
    return dict(model.state_dict())


def test_weights_are_those_that_transformers_unpacks(
    released: Path, by_transformers: dict[str, Tensor]
) -> None:
    files = ModelFiles([released / "model.safetensors"])
    assert set(files) | {"lm_head.weight"} == set(by_transformers) | {"lm_head.weight"}
    for name in files:
        assert files.dtype(name) == torch.bfloat16
        assert torch.equal(files[name], by_transformers[name]), name


def test_a_rank_reads_its_own_block(released: Path, by_transformers: dict[str, Tensor]) -> None:
    files = ModelFiles([released / "model.safetensors"])
    name = next(name for name in files if name.endswith("down_proj"))
    whole = ShardSpec.full(files.shape(name))
    block = whole.narrow(0, 1, 2).narrow(1, 17, 40).narrow(2, 3, 20)
    assert torch.equal(files.read(name, block), by_transformers[name][block.slices])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_policy_has_them(
    released: Path, by_transformers: dict[str, Tensor], dtype: str
) -> None:
    policy = load_policy(str(released), ModelArgs(dtype=dtype), "cpu")  # type: ignore[arg-type]
    assert policy.causal_lm.config.dtype == torch.bfloat16
    for name, weight in policy.causal_lm.named_parameters():
        assert torch.equal(weight.bfloat16(), by_transformers[name].bfloat16()), name


def test_it_trains_and_the_export_is_bfloat16(released: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(released)
    trained = run(tmp_path, "gpt_oss", "packed", max_steps=2)
    after = load_file(trained / "model/model.safetensors")
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert "quantization_config" not in (trained / "model/config.json").read_text("utf-8")
    before = ModelFiles([released / "model.safetensors"])
    assert after.keys() == set(before)
    assert all(after[name].shape == before.shape(name) for name in after)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert_exported(trained / "model")


def test_blocks_without_their_scales_are_refused(released: Path, tmp_path: Path) -> None:
    tensors = load_file(released / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        ModelFiles([tmp_path / "model.safetensors"])


def test_four_bits_of_another_kind_are_refused(released: Path) -> None:
    """They were ignored: linear layers were in bfloat16."""
    with pytest.raises(ConfigError, match=r"quantization: 4bit reads neither MXFP4 weights"):
        load_policy(str(released), ActorModelArgs(lora_rank=2, quantization="4bit"), "cpu")
