"""ROLL's example of a mixture of experts, as it is: weights in all and active, memory of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from rather.config.load import load
from rather.config.schema import ActorModelArgs
from rather.model.sizes import Sizes, sizes_of
from rather.plan.memory import adapter_weights, role_state
from tests.commands.conftest import succeed, told
from tests.config.test_roll import FILES

WEIGHTS = 30_532_122_624
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS = 48 * 128 * 3 * 768 * 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of Qwen3-30B-A3B."""
    place = tmp_path_factory.mktemp("qwen3-30BA3B")
    AutoConfig.for_model(
        "qwen3_moe", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, dtype="bfloat16",
        tie_word_embeddings=False, max_position_embeddings=40_960,
    ).save_pretrained(place)  # fmt: skip
    return place


@pytest.fixture(scope="module")
def sizes(folder: Path) -> Sizes:
    config = load(FILES["experts"], [f"pretrain={folder}"])
    return sizes_of(config.actor_train.model_path, config.actor_train.model_args)


def test_active_weights(sizes: Sizes) -> None:
    assert (sizes.weights, sizes.of_experts) == (WEIGHTS, EXPERTS)
    assert sizes.active == WEIGHTS - EXPERTS * 120 // 128
    assert sizes.active / 1e9 == pytest.approx(3.35, abs=0.01)
    assert sizes.inner == 8 * 768


def test_weights_of_an_adapter_of_experts(sizes: Sizes) -> None:
    attention = ActorModelArgs(lora_rank=16)
    experts = ActorModelArgs(lora_rank=16, lora_target=["all-linear", *STACKS])
    of_attention, both = (adapter_weights(args, sizes.shapes) for args in (attention, experts))
    assert both - of_attention == 16 * 48 * 128 * (2048 + 2 * 768 + 768 + 2048)


@pytest.mark.parametrize(
    ("changes", "dense", "experts"),
    [
        ([], 16, 16),  # the optimizer is sharded over dp 8; each ep rank has its own experts
        (["strategy_config.expert_model_parallel_size=2"], 16, 16),
        (["strategy_config.tensor_model_parallel_size=2",
          "strategy_config.expert_model_parallel_size=4"], 16, 2 * 4),
    ],
)  # fmt: skip
def test_what_each_rank_holds(
    folder: Path, sizes: Sizes, changes: list[str], dense: int, experts: int
) -> None:
    settings = [f"actor_train.strategy_args.{change}" for change in changes]
    config = load(FILES["experts"], [f"pretrain={folder}", *settings])
    role = config.actor_train
    state = role_state(config, role, "cuda", sizes.shapes, role.model_args)
    expected = 8 * ((WEIGHTS - EXPERTS) / dense + EXPERTS / experts)
    assert state.by_purpose.moments == pytest.approx(expected, rel=1e-5)  # norms: whole under tp


def test_plan_prints_the_memory_of_a_rank(folder: Path) -> None:
    arguments = ["plan", str(FILES["experts"]), f"pretrain={folder}", "--gpu", "h200"]
    found = told(*arguments)
    assert "dp 8 x pp 2 x ep 8" in found["layout"]
    assert (found["weights"], found["active_weights"]) == (WEIGHTS, WEIGHTS - EXPERTS * 120 // 128)
    # The weights, gradients and moments of 1/16 of everything, in float32.
    assert found["memory_bytes"]["moments"] == pytest.approx(8 * WEIGHTS / 16, rel=1e-6)
    said = " ".join(succeed(*arguments).stdout.split())
    assert "30.5B weights, 3.35B used by a token" in said
