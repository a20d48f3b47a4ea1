"""Mixtures of experts on one device: everything equals padded rows through plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rather.config.schema import ModelArgs, TrainingArgs
from rather.data.batch import TokenPair
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.losses.objective import configure
from rather.model.attention import IMPLEMENTATION
from rather.model.check import check_family, expert_blocks, routers_of, twin_of
from rather.model.experts import sorted_experts
from rather.model.files import ModelFiles
from rather.model.layers import arrange_layers
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.optimizer import Optimizer
from rather.parallel.load import load_policy
from rather.parallel.mesh import Mesh
from rather.parallel.routers import balance_of
from rather.train.rank_trainer import RankTrainer, StepResult, WholeModelRunner
from tests.padded import padded_logps, random_pairs, ranked_pairs
from tests.tiny import TEXT, tiny_policy, widen

VOCAB, BETA, COEFFICIENT = 97, 0.5, 0.3
SMALL: dict[str, Any] = {
    **TEXT,
    "vocab_size": VOCAB,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "num_mtp_layers": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 4},
    "deepseek_v3": DEEPSEEK,
}

# LongCat-Flash also chooses among experts that do nothing; Phi-MoE's scores jump.
OTHERS: dict[str, dict[str, Any]] = {
    "longcat_flash": {
        **DEEPSEEK, "head_dim": 8, "zero_expert_num": 4, "ffn_hidden_size": 48, "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
    },
    "phimoe": {"num_local_experts": 4},
}  # fmt: skip


def tiny(family: str, attention: str = IMPLEMENTATION, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **(FAMILIES | OTHERS)[family], **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for name, buffer in widen(model.eval()).named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.05)
    return model


def the_pairs() -> list[TokenPair]:
    return [*random_pairs(3, VOCAB, seed=1, longest=12), *ranked_pairs(VOCAB)[:8]]


def step(
    family: str,
    budget: int = 10**6,
    *,
    coefficient: float | None = COEFFICIENT,
    model: Any = None,
    **options: Any,
) -> tuple[StepResult, dict[str, Tensor]]:
    """One step that changes nothing: its result, and the gradient of every parameter."""
    seen: dict[str, Tensor] = {}

    class Recording(Optimizer):
        def step(self, grad_norm: float) -> None:
            seen.update({name: g.clone() for name, g in self.named_gradients().items()})

    policy, pairs = PolicyModel(model or tiny(family)), the_pairs()
    optimizer = Recording(
        policy.named_parameters(), TrainingArgs(), schedule=lambda _: 0.0, max_grad_norm=0.0
    )
    trainer = RankTrainer(
        policy,
        configure(["sigmoid"], {"beta": BETA}),
        optimizer,
        router_loss=coefficient,
        **options,
    )
    return trainer.train_step(pack(pairs, budget), {"sum": reference(pairs)}), seen


def reference(pairs: Sequence[TokenPair]) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(len(pairs), 2, generator=draw).double() - 40


def counted_once(pairs: Sequence[TokenPair]) -> Tensor:
    """1 for each place of the padded rows whose beginning no earlier row has."""
    rows = [np.concatenate([p.prompt, side]) for p in pairs for side in (p.chosen, p.rejected)]
    mask, known = torch.zeros(len(rows), max(map(len, rows))), set()
    for i, row in enumerate(rows):
        for end in range(1, len(row) + 1):
            beginning = row[:end].tobytes()
            mask[i, end - 1] = float(beginning not in known)
            known.add(beginning)
    return mask


def plain(family: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, loss, router loss and gradients of padded rows in plain transformers."""
    model, pairs, routed = tiny(family, "eager"), the_pairs(), []
    for _, router in routers_of(model):
        router.register_forward_hook(lambda _module, _args, output: routed.append(output))
    logps = padded_logps(model, pairs)
    gap = ((logps - reference(pairs)) @ torch.tensor([1.0, -1.0]).double()) * BETA
    loss, mask = -logsigmoid(gap).mean(), counted_once(pairs)
    if family in ("deepseek_v3", "longcat_flash"):  # a bias decides, too
        rows, total = mask.sum() * len(routed), routed[0][0].shape[1]
        share = torch.sigmoid if family == "deepseek_v3" else torch.exp
        p = sum(mask.view(-1) @ (share(z) / share(z).sum(1, keepdim=True)) for z, *_ in routed)
        one_hot = [torch.nn.functional.one_hot(chosen, total).sum(1) for *_, chosen in routed]
        f = sum(mask.view(-1) @ each.float() for each in one_hot)
        balance = total * (f * p).sum() / rows**2
    else:
        logits = tuple(z for z, *_ in routed)
        balance = load_balancing_loss_func(logits, logits[0].shape[1], 2, mask)
    (loss + COEFFICIENT * balance).backward()
    gradients = {f"causal_lm.{n}": p.grad for n, p in model.named_parameters()}
    return logps.detach(), loss.detach(), balance.detach(), gradients


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: {error:.2g}"


@pytest.mark.parametrize(
    "family", [*FAMILIES, "phimoe", pytest.param("longcat_flash", marks=pytest.mark.defect("M2"))]
)
def test_a_step_equals_padded_transformers(family: str) -> None:
    logps, loss, balance, gradients = plain(family)
    for budget in (10**6, 80, 1):  # one micro-batch, several, one for each pair
        result, found = step(family, budget)
        assert torch.allclose(result.policy, logps, rtol=1e-5)
        assert result.loss == pytest.approx(float(loss), rel=1e-5)
        weight = result.sums["weight"]
        assert result.sums["router_loss"] / weight == pytest.approx(float(balance), rel=1e-5)
        assert_equal(found, gradients, 1e-5)


@pytest.mark.defect("M2")
def test_a_mixture_whose_layers_are_all_dense_has_no_metrics_of_experts() -> None:
    dense = tiny("qwen3_moe", mlp_only_layers=[0, 1])
    assert "router_loss" not in step("qwen3_moe", model=dense)[0].sums


def test_the_router_loss_changes_the_gradient() -> None:
    """Otherwise the comparison above could not fail."""
    without, with_it = (step("qwen3_moe", coefficient=number)[1] for number in (0.0, COEFFICIENT))
    with pytest.raises(AssertionError, match="gate"):
        assert_equal(
            {name: without[name] for name in without if ".gate." in name},
            {name: with_it[name] for name in with_it if ".gate." in name},
            0.01,
        )


def test_the_coefficient_is_that_of_the_model_by_default() -> None:
    model = tiny("olmoe", router_aux_loss_coef=0.25)
    assert_equal(step("olmoe", coefficient=None, model=model)[1],
                 step("olmoe", coefficient=0.25)[1], 1e-6)  # fmt: skip


@pytest.mark.parametrize("budget", [10**6, 80])
def test_without_a_coefficient_the_metrics_stay(budget: int) -> None:
    for family in ("deepseek_v3", "qwen3_moe"):
        expected = step(family)[0].sums
        found = step(family, budget, coefficient=0.0)[0].sums
        assert found == pytest.approx(expected, rel=1e-5)


def test_loads_of_experts() -> None:
    """A router that always chooses the same two of eight experts."""
    model = tiny("qwen3_moe")
    with torch.no_grad():
        for layer, router in routers_of(model):
            router.weight.zero_()
            router.weight[layer : layer + 2] = 0  # ties are broken by the order
    sums = step("qwen3_moe", model=model)[0].sums
    found = {name: value / sums["weight"] for name, value in sums.items()}
    assert found["experts/max_load"] == pytest.approx(4.0)
    assert found["experts/idle"] == pytest.approx(6 / 8)
    assert found["router_loss"] == pytest.approx(
        2.0
    )  # uniform probabilities: the experts a token has
    loads = [found[f"experts/load/{i}"] for i in range(8)]
    assert sorted(loads) == pytest.approx([0.0] * 6 + [4.0] * 2)


def test_recomputed_layers_count_once() -> None:
    model = tiny("qwen3_moe")
    arrange_layers(PolicyModel(model), recompute="full")
    for budget in (10**6, 80):
        result, gradients = step("qwen3_moe", budget, model=model)
        expected, plainly = step("qwen3_moe", budget)
        assert result.sums == pytest.approx(expected.sums, rel=1e-6)
        assert_equal(gradients, plainly, 1e-6)
        model.zero_grad()


def test_a_dense_model_has_no_router_loss() -> None:
    with pytest.raises(ConfigError, match=r"moe_aux_loss_coef.*no experts"):
        RankTrainer(tiny_policy(), configure(["sigmoid"], {}), router_loss=0.01)


# --- the twin ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_size_config_gets_a_twin_with_a_router(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert check_family(config)
    twin = twin_of(config)
    assert any(routers_of(twin))
    assert sum(p.numel() for p in twin.parameters()) < 400_000


def test_a_twin_without_a_router_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.model.check._families", {})
    monkeypatch.setattr("rather.model.check.routers_of", lambda _model: iter(()))
    with pytest.raises(ConfigError, match="its experts cannot be checked"):
        check_family(AutoConfig.for_model("mixtral"))


def router_gradients(policy: PolicyModel) -> list[Tensor]:
    grads = [router.weight.grad for _, router in routers_of(policy)]
    policy.zero_grad()
    return [grad.clone() for grad in grads if grad is not None]


def balanced() -> tuple[PolicyModel, Any]:
    policy = PolicyModel(tiny("qwen3_moe"))
    balance = balance_of(policy, Mesh(), COEFFICIENT, "cpu")
    assert balance is not None
    return policy, balance


@pytest.mark.defect("mutation 9")
def test_recomputed_layers_count_the_tokens_of_their_own_micro_batch() -> None:
    """A pipeline runs the forward pass of several micro-batches before the first backward pass."""
    policy, balance = balanced()
    balance.slope.copy_(torch.linspace(-1, 1, 8))
    batches = pack(the_pairs(), 60, ladder=64)
    assert len(batches) == 2
    assert len({len(batch.ids_N) for batch in batches}) == 1  # only their masks differ
    results = []
    for recompute in ("none", "full"):
        arrange_layers(policy, recompute=recompute)  # type: ignore[arg-type]
        sums = [pair_columns(policy, batch)["sum"].sum() for batch in batches]
        for total in sums:
            (total * 0).backward()
        results.append(router_gradients(policy))
    for recomputed, kept in zip(*results, strict=True):
        assert kept.norm() > 0.1
        assert torch.allclose(recomputed, kept, rtol=1e-4, atol=1e-5)


@pytest.mark.defect("mutation 10")
@pytest.mark.parametrize("budget", [60, 10**6], ids=["several micro-batches", "one"])
def test_the_router_loss_is_multiplied_by_the_loss_scale(budget: int) -> None:
    """Of float16; the optimizer divides all gradients by it."""
    policy, balance = balanced()
    runner, batches = WholeModelRunner(policy), pack(the_pairs(), budget)
    results = []
    for scale in (1.0, 1024.0):
        balance.backward(runner, batches, (), lambda _, columns: 0 * columns["sum"].sum(), scale)
        results.append(router_gradients(policy))
    for plain, scaled in zip(*results, strict=True):
        assert plain.norm() > 0
        assert torch.allclose(scaled, plain * 1024, rtol=1e-4)


@pytest.mark.defect("X14")
@pytest.mark.parametrize("chosen", [10**9, 9, 0])
def test_more_chosen_experts_than_a_layer_has_are_refused(chosen: int) -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, "num_experts": 8})
    config.num_experts_per_tok = chosen
    with pytest.raises(ConfigError, match=f"num_experts_per_tok of config.json is {chosen}, but a"):
        check_family(config)


@pytest.mark.defect("X14")
def test_an_expert_of_one_dimension_is_refused(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    files = ModelFiles([tmp_path / "model.safetensors"])
    assert "model.layers.0.mlp.experts.down_proj" in files
    assert "model.layers.0.mlp.experts.gate_up_proj" not in files
    with pytest.raises(ConfigError, match="its weights cannot be opened"):
        load_policy(str(tmp_path), ModelArgs(), "cpu")


def expert_numbers(
    experts: Any, function: Any, hidden: Tensor, chosen: Tensor, scores: Tensor
) -> list[Tensor]:
    """The output of an experts function, and the gradients of states, scores and weights."""
    hidden, scores = (x.detach().clone().requires_grad_() for x in (hidden, scores))
    output = function(experts, hidden, chosen, scores)
    slope = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    gradients = torch.autograd.grad((output * slope).sum(), [hidden, scores, *experts.parameters()])
    return [output.detach(), *gradients]


def chosen_experts(experts: Any, tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, two choices of each token, none of them the last expert, and their scores."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator)
    scores, chosen = torch.rand(tokens, experts.num_experts - 1, generator=generator).topk(2, dim=1)
    return hidden, chosen, scores


@pytest.mark.parametrize("family", FAMILIES)
def test_sorted_experts_equal_those_of_transformers(family: str) -> None:
    experts = next(expert_blocks(tiny(family)))[1].experts
    inputs = chosen_experts(experts, 30, SMALL["hidden_size"])
    expected = expert_numbers(experts, ALL_EXPERTS_FUNCTIONS["grouped_mm"], *inputs)
    found = expert_numbers(experts, sorted_experts, *inputs)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
