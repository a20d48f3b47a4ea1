"""Tensor parallel: log-probs, gradients and whole runs are those of one process."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rather.errors import ConfigError
from rather.model.layers import arrange_layers
from rather.model.policy import PolicyModel
from rather.parallel.context import spread_tokens
from rather.parallel.mesh import Mesh
from rather.parallel.shard import Stage, shard
from rather.parallel.tensor import check_split, split_model
from rather.train.rank_trainer import WholeModelRunner
from tests.cells import cells
from tests.model.test_families import FAMILIES, SMALL
from tests.same.against_whole import worst_difference
from tests.same.canonical import (
    MANY_STEPS,
    STEPS,
    VARIANTS,
    Outcome,
    Setup,
    alone,
    assert_same,
    joined,
    make_policy,
    make_trainer,
    train,
)
from tests.same.pool import pool
from tests.tiny import tiny_policy

Sizes = dict[str, int]
DIVISIBLE = sorted(FAMILIES.keys() - {"gpt2"})  # which has no plan
FEW_STEPS = 2


def run(
    sizes: Sizes, setup: Setup, sequence_parallel: bool = False, stage: Stage = "ddp"
) -> Outcome:
    """One rank of the canonical run."""
    mesh, policy = Mesh.build(**sizes), make_policy(setup)
    split_model(policy, mesh, sequence_parallel=sequence_parallel)
    spread_tokens(policy, mesh)
    arrange_layers(policy)
    if mesh.size("dp") * mesh.size("cp") > 1:
        shard(policy, mesh, stage)
    return train(make_trainer(setup, mesh, policy, WholeModelRunner(policy, stage)), setup)


@pytest.mark.parametrize(
    ("sequence_parallel", "steps"), cells([(False, STEPS), (True, STEPS)], [(True, MANY_STEPS)])
)
def test_the_canonical_run(sequence_parallel: bool, steps: int) -> None:
    setup = Setup(steps=steps)
    assert_same(joined(pool(2).run(run, {"tp": 2}, setup, sequence_parallel)), alone(setup))


@pytest.mark.parametrize(
    ("variant", "sequence_parallel"),
    [("aot", False), ("untied", False), ("orpo", True), ("qwen2", True)],
)
def test_losses_and_families(variant: str, sequence_parallel: bool) -> None:
    setup = Setup(**VARIANTS[variant], steps=FEW_STEPS)
    assert_same(joined(pool(2).run(run, {"tp": 2}, setup, sequence_parallel)), alone(setup))


@pytest.mark.parametrize(
    ("sizes", "stage", "sequence_parallel"),
    [
        ({"shard": 2, "tp": 2}, "zero3", True),
        ({"replicate": 2, "tp": 2}, "ddp", False),
        ({"cp": 2, "tp": 2}, "ddp", True),
    ],
    ids=["zero3", "dp", "cp"],
)
def test_together_with_other_axes(sizes: Sizes, stage: Stage, sequence_parallel: bool) -> None:
    setup = Setup(steps=FEW_STEPS)
    got = joined(pool(prod(sizes.values())).run(run, sizes, setup, sequence_parallel, stage))
    assert_same(got, alone(setup))


def differences(sequence_parallel: bool) -> dict[str, float]:
    return {
        name: worst_difference(name, {"tp": 2}, sequence_parallel=sequence_parallel)
        for name in DIVISIBLE
    }


@pytest.mark.parametrize("sequence_parallel", cells([False], [True]))
def test_every_family(sequence_parallel: bool) -> None:
    for each in pool(2).run(differences, sequence_parallel):
        assert max(each.values()) < 1e-4, each


def with_options(name: str, sizes: Sizes, options: dict[str, Any]) -> float:
    return worst_difference(name, sizes, sequence_parallel=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"arranged": {"recompute": "full"}},
        pytest.param({"arranged": {"compiled": True}}, marks=[pytest.mark.slow, pytest.mark.wide]),
        {"model": {"attention_bias": True, "mlp_bias": True}},  # a row's bias counts once
    ],
    ids=["recomputed", "compiled", "biases"],
)
def test_layers_however_arranged(options: dict[str, Any]) -> None:
    assert max(pool(2).run(with_options, "llama", {"tp": 2}, options)) < 1e-4


def test_four_ranks_with_widths_that_do_not_divide() -> None:
    """97 words and 50 columns of the MLP over four ranks."""
    options = {"model": {"num_key_value_heads": 4, "intermediate_size": 50}}
    assert max(pool(4).run(with_options, "llama", {"tp": 4}, options)) < 1e-4


# --- what is refused ---


def refusal(family: str, tp: int, changes: dict[str, Any]) -> str:
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **changes})
    try:
        check_split(config, Mesh.build(tp=tp))
    except ConfigError as error:
        return str(error)
    return ""


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
    for message in pool(2).run(refusal, family, 2, changes):
        assert told in message
        assert bool(told) == bool(message)


@pytest.mark.parametrize(
    ("family", "sequence_parallel"), cells([("qwen3", False)], [("llama", True)])
)
def test_fewer_heads_of_keys_than_ranks(family: str, sequence_parallel: bool) -> None:
    """Two heads of keys and values on four ranks: each is whole on all, and taken by two."""
    options = {"model": {"num_attention_heads": 8, "num_key_value_heads": 2}}
    run_it = with_options if sequence_parallel else plain_options
    assert max(pool(4).run(run_it, family, {"tp": 4}, options)) < 1e-4


def plain_options(name: str, sizes: Sizes, options: dict[str, Any]) -> float:
    return worst_difference(name, sizes, sequence_parallel=False, **options)


def heads_refusal() -> str:
    config = AutoConfig.for_model(
        "llama", **{**SMALL, "num_attention_heads": 12, "hidden_size": 96}
    )
    config.num_key_value_heads = 3
    with pytest.raises(ConfigError) as refused:
        split_model(PolicyModel(AutoModelForCausalLM.from_config(config)), Mesh.build(tp=4))
    return str(refused.value)


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
