"""Adapters of stacked experts: they are PEFT's, by name, in every number, and on the disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rather.config.schema import ActorModelArgs, ModelArgs
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.model.adapted_experts import AdaptedExperts
from rather.model.adapters import as_reference, inject
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.summing import summing
from rather.parallel.load import load_policy
from rather.pipeline.pipeline import DPOPipeline
from tests.model.test_experts import tiny
from tests.padded import padded_logps, random_pairs
from tests.runs import assert_resumes, saved, steps
from tests.tiny import make_config, make_model, make_pairs, metrics

LN_2 = math.log(2)
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
PAIRS = random_pairs(4, 63, seed=1, longest=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts in float32, pairs, and an adapter that PEFT has written."""
    folder = tmp_path_factory.mktemp("experts")
    make_model(folder / "base")  # its tokenizer
    tiny("qwen3_moe", "eager", vocab_size=63).save_pretrained(folder / "base")
    for name, count in (("pairs", 40), ("held_out", 9)):
        make_pairs(folder / f"{name}.jsonl", count, seed=count)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=STACKS, use_rslora=True
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), config)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    adapted.save_pretrained(folder / "tuned")
    return folder


def by_peft(folder: Path, adapter: Path, *, trains: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter, is_trainable=trains).eval()


def log_probs(policy: PolicyModel) -> Tensor:
    (batch,) = pack(PAIRS, budget=10**6)
    return pair_columns(policy, batch)["sum"]


def test_log_probs_and_gradients_are_those_of_peft(folder: Path) -> None:
    args = ModelArgs(adapter_name_or_path=str(folder / "tuned"))
    policy, other = (
        load_policy(str(folder / "base"), args, "cpu"),
        by_peft(folder, folder / "tuned", trains=True),
    )
    found, expected = log_probs(policy), padded_logps(other, PAIRS)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    scale = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * scale).sum().backward()
    (expected * scale).sum().backward()
    gradients = {
        n.removeprefix("base_model.model."): p.grad
        for n, p in other.named_parameters()
        if p.grad is not None
    }
    assert sum("experts" in name for name in gradients) == 8
    for name, parameter in policy.causal_lm.named_parameters():
        if parameter.requires_grad:
            expected = gradients.pop(name)
            assert float((parameter.grad - expected).norm() / expected.norm()) < 1e-4, name
    assert not gradients
    with torch.no_grad(), as_reference(policy), other.disable_adapter():
        assert torch.allclose(log_probs(policy), padded_logps(other, PAIRS), rtol=0, atol=1e-4)


def test_a_model_of_peft_runs_by_factors_and_keeps_their_gradients(folder: Path) -> None:
    """As DPOTrainer takes it; sums inside of linear layers would miss factors that nobody calls."""
    model = by_peft(folder, folder / "tuned", trains=True)
    with torch.no_grad():
        expected = padded_logps(model, PAIRS)
        AdaptedExperts.replace(model)
        assert torch.allclose(padded_logps(model, PAIRS), expected, rtol=0, atol=1e-4)
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    summed = summing(model.modules(), trained)
    names = {name for name, parameter in model.named_parameters() if parameter in summed}
    assert names
    assert not any(".experts." in name for name in names)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"use_dora": True}, "cannot be combined with use_dora"),
        ({"init_lora_weights": "pissa"}, "cannot be combined with init_lora_weights=pissa"),
        ({"quantization": "4bit"}, "cannot be combined with quantization"),
        ({"lora_target": "experts.up_proj"}, "lora_target: .*named? .*experts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        inject(tiny("qwen3_moe"), ActorModelArgs(**{"lora_target": STACKS, **args}))


def config_of(folder: Path, name: str, args: dict[str, Any], **changes: Any) -> Any:
    settings = {f"actor_train__model_args__{key}": value for key, value in args.items()}
    settings["actor_train__training_args__learning_rate"] = 0.01
    settings["reference__cache__enabled"] = False
    return make_config(folder, exp_name=name, **{"max_steps": 2, **settings, **changes})


NEW = {"lora_rank": 4, "lora_target": ["all-linear", *STACKS]}


def of_run(folder: Path, name: str, args: dict[str, Any]) -> set[str]:
    """Train, compare the adapter and the merged model, and return the kinds of changed weights."""
    config = config_of(folder, name, args)
    assert DPOPipeline(config).run() == 0
    assert steps(config)[0]["loss"] == pytest.approx(LN_2, abs=1e-6)  # the reference is the start
    assert metrics(config)[-1]["eval/loss"] < LN_2 - 1e-3
    model, adapter = config.run_dir / "model", config.run_dir / "adapter"
    expected = padded_logps(by_peft(folder, adapter), PAIRS)
    merged = padded_logps(AutoModelForCausalLM.from_pretrained(model), PAIRS)
    again = load_policy(str(folder / "base"), ModelArgs(adapter_name_or_path=str(adapter)), "cpu")
    assert torch.allclose(merged, expected, rtol=0, atol=1e-4)
    assert torch.allclose(log_probs(again), expected, rtol=0, atol=1e-4)
    saved, source = (load_file(path / "model.safetensors") for path in (model, folder / "base"))
    assert saved.keys() == source.keys()
    changed = [name for name in source if not torch.equal(saved[name], source[name])]
    return {name.split(".")[-2] for name in changed if ".experts." in name}


def test_from_the_base_or_an_adapter_of_peft_to_the_merged_model(folder: Path) -> None:
    """The start of an adapter that is trained further is kept as a second one, the reference."""
    one_stack = {"lora_rank": 4, "lora_target": "mlp.experts.gate_up_proj"}
    continued = {"adapter_name_or_path": str(folder / "tuned")}
    assert of_run(folder, "one", one_stack) == {"gate_proj", "up_proj"}
    for name, args in (("new", NEW), ("continued", continued)):
        assert of_run(folder, name, args) == {"gate_proj", "up_proj", "down_proj"}


def test_resumed_to_the_bit(folder: Path) -> None:
    once = config_of(folder, "once", NEW, max_steps=3, save_steps=2)
    assert_resumes(once, 2)
    assert sum(".experts." in key for key in saved(once, 3, "model")) == 8
