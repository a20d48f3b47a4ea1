"""Tensor parallel: log-probs and gradients of every family are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rather.model.policy import PolicyModel
from rather.parallel.mesh import Mesh
from rather.parallel.tensor import check_split, split_model
from tests.cells import cells
from tests.model.test_families import FAMILIES, SMALL
from tests.same.against_whole import refusal, worst_difference
from tests.same.pool import pool
from tests.tiny import tiny_policy

DIVISIBLE = sorted(FAMILIES.keys() - {"gpt2"})  # which has no plan


UNLIKE = ["gemma3_text", "gpt_neox", "phi3"]  # own norms and windows, fused projections


def differences(names: list[str], sequence_parallel: bool) -> dict[str, float]:
    return {
        name: worst_difference(name, {"tp": 2}, sequence_parallel=sequence_parallel)
        for name in names
    }


@pytest.mark.parametrize(
    ("names", "sequence_parallel"),
    cells([(UNLIKE, False)], [(DIVISIBLE, False), (DIVISIBLE, True)]),
    ids=["unlike", "all", "all by sequence"],
)
def test_every_family(names: list[str], sequence_parallel: bool) -> None:
    for each in pool(2).run(differences, names, sequence_parallel):
        assert max(each.values()) < 1e-4, each


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}  # on four ranks: two take each
MODELS = [
    ("llama", 2, {"arranged": {"recompute": "full"}}),
    ("llama", 2, {"model": {"attention_bias": True, "mlp_bias": True}}),  # counted once
    # 97 words and 50 columns of the MLP do not divide.
    ("llama", 4, {"model": {"num_key_value_heads": 4, "intermediate_size": 50}}),
    ("qwen3", 4, {"model": HEADS, "sequence_parallel": False}),
]
FURTHER = [
    ("llama", 2, {"arranged": {"compiled": True}}),
    ("llama", 4, {"model": HEADS}),
]


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    cells(MODELS, FURTHER),
    ids=["recomputed", "biases", "widths", "fewer heads", "compiled", "fewer heads by sequence"],
)
def test_layers_however_arranged(family: str, ranks: int, options: dict[str, Any]) -> None:
    options = {"sequence_parallel": True, **options}
    assert max(pool(ranks).run(worst_difference, family, {"tp": ranks}, **options)) < 1e-4


# --- what is refused ---


def split_refusal(family: str, tp: int, changes: dict[str, Any]) -> str:
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **changes})
    return refusal(check_split, config, Mesh.build(tp=tp))


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("gpt2", {}, "no tensor parallel plan for model family 'gpt2'"),
        ("mixtral", {}, ""),  # attention is divided, experts are not
        (
            "cohere",
            {"use_qk_norm": True},
            "model family 'cohere' cannot be divided",
        ),  # its norm spans all heads
        ("llama", {}, ""),
    ],
)
def test_families_that_cannot_be_divided_are_named(
    family: str, changes: dict[str, Any], told: str
) -> None:
    for message in pool(2).run(split_refusal, family, 2, changes):
        assert told in message
        assert bool(told) == bool(message)


def heads_refusal() -> str:
    config = AutoConfig.for_model(
        "llama", **{**SMALL, "num_attention_heads": 12, "hidden_size": 96}
    )
    config.num_key_value_heads = 3
    policy = PolicyModel(AutoModelForCausalLM.from_config(config))
    return refusal(split_model, policy, Mesh.build(tp=4))


def test_heads_that_do_not_divide_are_reported() -> None:
    assert set(pool(4).run(heads_refusal)) == {
        "tp_size: 4 does not divide num_key_value_heads: 3 of model family 'llama'; set it to a divisor"
    }


def on_meta() -> tuple[int, int, str]:
    with torch.device("meta"):
        policy = tiny_policy()
    whole = sum(p.numel() for p in policy.parameters())
    split_model(policy, Mesh.build(tp=2))
    own = sum(p.numel() for p in policy.parameters())
    return whole, own, str({p.device.type for p in policy.parameters()})


def test_a_model_without_weights_is_divided_too() -> None:
    (whole, first, device), (_, second, _) = pool(2).run(on_meta)
    norms = 5 * 32
    assert first + second == whole + norms
    assert device == "{'meta'}"
