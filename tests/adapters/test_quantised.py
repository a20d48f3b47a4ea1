"""An adapter on 4-bit weights: its reference is these without it, and it is merged into the weights as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rather.commands.export import merge
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair
from rather.data.pack import pack
from rather.model.policy import pair_columns
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from tests.adapters.test_merge import difference_in
from tests.runs import assert_resumes
from tests.tiny import make_config, make_model, make_pairs, metrics

pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed; pip install 'rather[quantization]'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    make_model(folder / "base", hidden_size=128, intermediate_size=256)
    make_pairs(folder / "pairs.jsonl", 40)
    make_pairs(folder / "held_out.jsonl", 9, seed=1)
    return folder


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    args = {"quantization": "4bit", "lora_rank": 4, "dtype": "fp32"}
    settings = {f"actor_train__model_args__{key}": value for key, value in args.items()}
    training = {
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
    }
    changes["deterministic"] = torch.cuda.is_available()
    return make_config(
        folder, exp_name=name, actor_train__training_args=training, **settings, **changes
    )


@pytest.fixture(scope="module")
def trained(folder: Path) -> DPOPipeline:
    pipeline = DPOPipeline(config_of(folder, "whole", max_steps=4, save_steps=2))
    assert pipeline.run() == 0
    return pipeline


def test_gradients_pass_through_4_bit_weights(folder: Path, trained: DPOPipeline) -> None:
    """Also after passes without gradients, in which bitsandbytes would repack them on some CPUs."""
    args = trained.config.actor_train.model_args
    policy = load_policy(str(folder / "base"), args, "cpu")
    (batch,) = pack(trained.data.train.take([0, 1]), 10**6)
    name, weight = next(each for each in policy.named_parameters() if "lora_B" in each[0])

    def total() -> Tensor:
        return pair_columns(policy, batch)["sum"].sum()

    total().backward()
    assert weight.grad is not None
    slope = weight.grad.norm()
    step = 0.05 * weight.grad / slope
    with torch.no_grad():
        weight += step
        above = total()
        weight -= 2 * step
        assert (above - total()) / 0.1 == pytest.approx(float(slope), rel=0.02), name


def log_prob(model: Any, pair: TokenPair) -> Tensor:
    """Of the chosen answer, by the model's own forward."""
    ids = torch.tensor([*pair.prompt.tolist(), *pair.chosen.tolist()], device=model.device)[None]
    with torch.no_grad():
        logps = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return sum(
        (logps[a - 1 : b - 1].sum() for a, b in pair.chosen_scored),
        torch.zeros((), device=model.device),
    ).cpu()


def test_the_reference_is_the_4_bit_base(folder: Path, trained: DPOPipeline) -> None:
    lines = metrics(trained.config)
    assert next(line["loss"] for line in lines if "loss" in line) == pytest.approx(
        math.log(2), abs=1e-6
    )
    assert lines[-1]["eval/loss"] < math.log(2) - 0.01
    pair = trained.data.train.take([0])[0]
    assert trained.reference is not None
    own = trained.reference.compute_log_probs(trained.parts.packing.pack([pair], "train", 256))[
        "sum"
    ][0, 0]
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    held = {
        "quantization_config": four,
        "dtype": torch.float32,
        "device_map": {"": trained.actor_train.device},
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder / "base", **held)
    # In eval mode bitsandbytes multiplies in bfloat16 on some CPUs.
    expected = log_prob(loaded.train(), pair)
    full = log_prob(AutoModelForCausalLM.from_pretrained(folder / "base"), pair)
    assert float(own) == pytest.approx(float(expected), abs=1e-3)
    assert abs(float(expected - full)) > 5e-3, "4 bits are not the full weights"


def test_it_is_merged_into_the_weights_as_they_were(
    folder: Path, trained: DPOPipeline, tmp_path: Path
) -> None:
    run_dir = trained.config.run_dir
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert getattr(merged.config, "quantization_config", None) is None
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    pair = trained.data.train.take([0])[0]
    own, before = log_prob(merged, pair), log_prob(base, pair)
    by_peft = log_prob(PeftModel.from_pretrained(base, run_dir / "adapter"), pair)
    assert abs(float(own - before)) > 0.01
    assert float(own) == pytest.approx(float(by_peft), abs=1e-4)
    told = merge(str(run_dir / "adapter"), tmp_path / "merged")
    assert "base quantised in training" in told
    assert 1e-4 < difference_in(told) < 1


def test_it_resumes_to_the_same_bits(folder: Path) -> None:
    assert_resumes(config_of(folder, "again", max_steps=4, save_steps=2), 2)
