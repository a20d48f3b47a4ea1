"""Linear layers that sum their weight gradients in float32, and adapters in fewer steps: on the CPU in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rather.config.schema import ActorModelArgs, TrainingArgs
from rather.model.adapted_layers import AdaptedLinear, group_adapted
from rather.model.adapters import as_reference, inject
from rather.model.attention import IMPLEMENTATION
from rather.model.layers import layers_of
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer, schedule
from rather.optim.rounding import Rounding
from rather.optim.summing import SummingLinear, group_projections, summing

INPUTS = [torch.randn(1, rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (3, 5)]


def optimizer_of(model: nn.Module) -> Optimizer:
    rate = schedule(TrainingArgs(), total_steps=10)
    return Optimizer(model.named_parameters(), TrainingArgs(), schedule=rate, max_grad_norm=1.0)


def gradients(model: Any, optimizer: Optimizer) -> dict[str, Tensor]:
    optimizer.zero_grad()
    optimizer.begin_sums()
    for x in INPUTS:
        model(x.bfloat16().requires_grad_()).float().square().sum().backward()
    return {name: grad.clone() for name, grad in optimizer.named_gradients().items()}


def test_sums_are_those_of_separate_additions() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 8)).bfloat16()
    sums = copy.deepcopy(plain)
    optimizer = optimizer_of(sums)
    optimizer.sum_inside(sums.modules())
    assert [type(m) for m in sums] == [SummingLinear, nn.SiLU, SummingLinear]
    expected = gradients(plain, optimizer_of(plain))
    for _step in range(2):  # a second one begins with zeros again
        found = gradients(sums, optimizer)
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, expected[name], rtol=0.02, atol=0.02)
    optimizer.zero_grad()
    assert all(layer.total is None for layer in sums if isinstance(layer, SummingLinear))


@pytest.mark.parametrize("small", [0, 20, 1 << 20], ids=["none", "some", "all"])
def test_gradients_of_small_parameters_wait_and_give_the_same_sums(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rather.optim.adamw.SMALL", small)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)).bfloat16()
    expected: dict[str, Tensor] = {}
    for x in [*INPUTS, INPUTS[0] / 3]:
        model(x.bfloat16()).float().square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            more = parameter.grad.float()
            expected[name] = expected[name] + more if name in expected else more
            parameter.grad = None
    optimizer = optimizer_of(model)
    (sums,) = {state._sums for state in optimizer._states.values()}
    waiting = []
    for x in [*INPUTS, INPUTS[0] / 3]:
        model(x.bfloat16()).float().square().sum().backward()
        waiting.append(len(sums.late))
    assert waiting == [{0: 0, 20: 2}.get(small, 4)] * 3  # with 20: the biases
    found = optimizer.named_gradients()
    assert not sums.late
    assert all(torch.equal(found[name], total) for name, total in expected.items())
    model(INPUTS[0].bfloat16()).sum().backward()
    optimizer.zero_grad()
    assert not sums.late
    assert not optimizer.named_gradients()


@pytest.mark.parametrize("inside", [False, True], ids=["added after", "added inside"])
def test_a_product_is_not_rounded_before_it_is_added(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False)).bfloat16()
    optimizer = optimizer_of(model)
    if inside:
        optimizer.sum_inside(model.modules())
    optimizer.begin_sums()
    for x in INPUTS:
        model(x.bfloat16()).sum().backward()  # the gradient of a weight is a sum of inputs
    (found,) = optimizer.gradients()
    exact = sum(x.bfloat16().double().sum((0, 1)) for x in INPUTS)
    assert ((found - exact).abs().max() < 1e-6) == inside


def test_without_gradients_or_after_narrowing_it_is_a_plain_layer() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    optimizer = optimizer_of(model)
    optimizer.sum_inside(model.modules())
    optimizer.begin_sums()
    with torch.no_grad():
        model(INPUTS[0].bfloat16())
    assert not model[0].total.any()
    optimizer.zero_grad()
    assert optimizer.narrow_gradients()
    assert all(grad.dtype == torch.bfloat16 for grad in gradients(model, optimizer).values())


def test_weights_that_are_not_summed_in_float32_keep_their_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8))  # float32: a gradient is its own sum
    optimizer_of(model).sum_inside(model.modules())
    assert type(model[0]) is nn.Linear


def adapted(rank: int = 2, **options: Any) -> PolicyModel:
    torch.manual_seed(0)
    config: Any = Qwen2Config(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    config.num_attention_heads, config.num_key_value_heads, config.vocab_size = 2, 1, 50
    config._attn_implementation = IMPLEMENTATION
    causal_lm: Any = Qwen2ForCausalLM
    model = causal_lm(config)
    inject(model, ActorModelArgs(lora_rank=rank, lora_target="all-linear", **options))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    return PolicyModel(model).eval()


def results_of(layer: Any, rows: int = 4) -> list[Tensor]:
    """Output and all gradients of a layer."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, rows, layer.in_features, generator=generator).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    trained = [p.grad for p in layer.parameters() if p.requires_grad and p.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *trained]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", [False, True], ids=["adapter", "adapter off"])
def test_an_adapted_layer_computes_what_peft_computes(reference: bool) -> None:
    results = []
    for kind in (LoraLinear, AdaptedLinear):
        policy = adapted()
        if kind is AdaptedLinear:
            AdaptedLinear.replace(policy.causal_lm)
        layer = layers_of(policy)[0].mlp.down_proj
        assert type(layer) is kind
        with as_reference(policy) if reference else torch.enable_grad():
            results.append(results_of(layer))
    assert (len(results[0]) == 2) is reference
    assert_close(*results)


def test_an_adapter_of_another_kind_keeps_its_layer() -> None:
    policy = adapted(use_dora=True)
    AdaptedLinear.replace(policy.causal_lm)
    assert type(layers_of(policy)[0].mlp.down_proj) is LoraLinear


@pytest.mark.parametrize("rank", [2, 8], ids=["separate", "joined"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "down_proj", "gate_proj"])
def test_an_adapter_may_be_part_of_the_product(name: str, rank: int) -> None:
    """Rank 2 is too narrow for it. Square, narrowing and widening layers."""
    results = []
    for joins in (False, True):
        policy = adapted(rank)
        AdaptedLinear.replace(policy.causal_lm, joins=joins)
        modules = dict(layers_of(policy)[0].named_modules())
        layer = next(module for path, module in modules.items() if path.endswith(name))
        assert layer.joins is (joins and rank == 8)
        results.append(results_of(layer))
    assert_close(*results)


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_joined_adapters_add_to_their_sums(part: str) -> None:
    """Query, key and value are one product."""
    results = []
    for joins in (False, True):
        policy = adapted(8).bfloat16()
        AdaptedLinear.replace(policy.causal_lm, joins=joins)
        module = getattr(layers_of(policy)[0], part)
        optimizer = optimizer_of(module)
        optimizer.sum_inside(module.modules())
        group_adapted(module.modules())
        optimizer.begin_sums()
        for rows in (3, 5):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(1, rows, 16, generator=generator).bfloat16().requires_grad_()
            if part == "mlp":
                y = module(x)
            else:
                assert (module.q_proj.group is None) is not joins
                y = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)
            y.float().square().sum().backward()
        found = {name: grad.clone() for name, grad in optimizer.named_gradients().items()}
        results.append({**found, "x": x.grad})
    assert len(results[0]) == {"mlp": 7, "self_attn": 9}[part]
    for name, expected in results[0].items():
        assert results[1][name].dtype == expected.dtype
        assert (results[1][name] - expected).norm() <= 0.03 * expected.norm(), name


class Projecting(nn.Module):
    """Projections of one input, in the order in which a model calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.o_proj = nn.Linear(8, 8, bias=False)
        self.other: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x if self.other is None else self.other)
        y: Tensor = self.o_proj(q * k.repeat(1, 1, 3)[..., :8]) + self.v_proj(x).sum()
        return y


@pytest.mark.parametrize("other", [False, True], ids=["one input", "another input between"])
def test_grouped_projections_compute_the_same(other: bool) -> None:
    torch.manual_seed(0)
    plain = Projecting().bfloat16()
    plain.other = torch.randn(1, 1, 8).bfloat16() if other else None
    grouped = copy.deepcopy(plain)
    optimizer = optimizer_of(grouped)
    optimizer.sum_inside(grouped.modules())
    group_projections(grouped.modules())
    group: Any = grouped.q_proj.group
    assert group is grouped.v_proj.group is not grouped.o_proj.group
    expected = gradients(plain, optimizer_of(plain))
    found = gradients(grouped, optimizer)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=0.05, atol=0.1)
    assert found["k_proj.weight"].abs().sum() > 0
    assert group.x is None or other
    with torch.no_grad():
        results = [model(INPUTS[0].bfloat16()) for model in (grouped, plain)]
        torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
        grouped.k_proj.weight.zero_()  # an update
        assert not group.weight[8:11].any()


@pytest.mark.parametrize(
    "move", [copy.deepcopy, lambda model: model.double()], ids=["copy", "move"]
)
def test_weights_that_are_copied_or_moved_leave_their_group(move: Any) -> None:
    model = Projecting()
    summing(model.modules(), set(model.parameters()))
    group_projections(model.modules())
    moved = move(model)
    assert moved.q_proj.group is None
    with torch.no_grad():
        moved.q_proj.weight.zero_()
        y = moved.q_proj(torch.ones(1, 8, dtype=moved.q_proj.weight.dtype))
        assert torch.equal(y[0], moved.q_proj.bias)


def test_adapted_layers_that_move_leave_their_group() -> None:
    policy = adapted(8).bfloat16()
    AdaptedLinear.replace(policy.causal_lm, joins=True)
    attention = layers_of(policy)[0].self_attn
    optimizer_of(attention).sum_inside(attention.modules())
    group_adapted(attention.modules())
    assert attention.q_proj.group is not None
    policy.float()
    assert attention.q_proj.group is None


class Twice(nn.Module):
    """A weight that is used twice: in two layers, by two calls of one layer, or also directly."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False) if how == "two layers" else self.first
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y @ self.first.weight.t() if self.how == "directly" else self.second(y)


@pytest.mark.defect("R7")
@pytest.mark.parametrize("how", ["two layers", "two calls", "directly"])
def test_a_weight_that_is_used_twice_gets_its_whole_gradient(how: str) -> None:
    torch.manual_seed(0)
    plain = Twice(how).bfloat16()
    expected = gradients(plain, optimizer_of(plain))
    torch.manual_seed(0)
    sums = Twice(how).bfloat16()
    optimizer = optimizer_of(sums)
    optimizer.sum_inside(sums.modules())
    for _step in range(2):
        found = gradients(sums, optimizer)
        assert found.keys() == expected.keys() == {"first.weight"}
        error = (found["first.weight"] - expected["first.weight"]).norm()
        assert error < 0.02 * expected["first.weight"].norm()


@pytest.mark.defect("R7")
def test_projections_that_share_a_weight_form_no_group() -> None:
    model = Projecting()
    model.v_proj.weight = model.k_proj.weight
    summing(model.modules(), set(model.parameters()))
    group_projections(model.modules())
    with torch.no_grad():
        model.k_proj.weight.zero_()
        x = torch.ones(1, 8)
        for layer in (model.q_proj, model.k_proj, model.v_proj):
            y = layer(x)
            assert torch.equal(y[0], layer.bias) is (layer is not model.q_proj)


@pytest.mark.defect("R12")
def test_a_held_weight_that_is_not_contiguous_is_updated() -> None:
    weight = nn.Parameter(torch.randn(6, 4).t())
    held = Rounding(held=frozenset({"weight"}))
    args = TrainingArgs(learning_rate=0.1)
    optimizer = Optimizer(
        [("weight", weight)], args, schedule=lambda _done: 0.1, max_grad_norm=1.0, rounding=held
    )
    before = weight.detach().clone()
    weight.square().sum().backward()
    optimizer.step(1.0)
    moved = (weight.detach() - before).abs()
    assert moved.min() > 0.05
