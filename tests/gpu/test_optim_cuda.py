"""The optimizer's kernels: split masters are those of torch's fused AdamW, lean rounding is right on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.config.schema import TrainingArgs
from rather.optim.adamw import decode
from rather.optim.optimizer import Optimizer
from rather.optim.rounding import Rounding

pytestmark = pytest.mark.gpu

SHAPES = [
    (7, 5),
    (300, 700),
    (896,),
    (1, 65536),
    (65536 + 300,),
    (2, 65536),
]  # tails, whole chunks, several
NUMBERS = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}


def weights(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, spread: float = 0.02
) -> nn.ParameterDict:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [
        torch.randn(shape, generator=generator, device="cuda").bfloat16() * spread
        for shape in shapes
    ]
    return nn.ParameterDict(
        {f"w{number}": nn.Parameter(w.to(dtype)) for number, w in enumerate(drawn)}
    )


def optimizer_of(
    model: nn.Module, rate: float, max_grad_norm: float = 0.0, **changes: Any
) -> Optimizer:
    names = {"lean", "seed", "rounding"} & changes.keys()
    options = {name: changes.pop(name) for name in names}
    args = TrainingArgs(learning_rate=1.0, **changes)
    return Optimizer(
        model.named_parameters(),
        args,
        schedule=lambda _: rate,
        max_grad_norm=max_grad_norm,
        **options,
    )


def backward(model: nn.ParameterDict, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for weight in model.values():
        gradient = torch.randn(weight.shape, generator=generator, device="cuda").bfloat16()
        (weight * gradient.to(weight.dtype)).sum().backward()


def update(optimizer: Optimizer) -> None:
    optimizer.step(float(optimizer.grad_norm()))
    optimizer.zero_grad()


@pytest.mark.parametrize("wide_gradients", [True, False])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("rate", [5e-7, 1e-5, 1e-3])
def test_split_is_torch_adamw(rate: float, max_grad_norm: float, wide_gradients: bool) -> None:
    """Within two float32 steps of a weight for every update: the kernel has float32 where torch has float64 numbers."""
    ours, wide = weights(SHAPES, torch.bfloat16), weights(SHAPES, torch.float32)
    optimizer = optimizer_of(ours, rate, max_grad_norm, **NUMBERS)
    assert wide_gradients or optimizer.narrow_gradients()
    exact = optimizer_of(wide, rate, max_grad_norm, **NUMBERS)
    for step in range(50):
        for model, its in ((ours, optimizer), (wide, exact)):
            backward(model, step)
            update(its)
        for name, true in exact.masters.items() if step in (0, 49) else ():
            off = (optimizer.masters[name] - true).abs()
            assert (off <= 2 * (step + 1) * (true.abs() * 2.0**-23 + rate * 1e-6)).all()
    same = [
        (optimizer.masters[name] == true).float().mean() for name, true in exact.masters.items()
    ]
    print(
        f"rate {rate}: bit-equal masters after 50 updates: {100 * float(min(same)):.1f} % at least"
    )
    for name, moment in exact.moments().items():
        largest = float(
            moment.abs().max()
        )  # sums of many roundings: near zero they are large beside the value
        assert torch.allclose(optimizer.moments()[name], moment, rtol=1e-5, atol=1e-6 * largest)


def test_a_parameter_is_the_rounded_image_of_its_master() -> None:
    model = weights(SHAPES, torch.bfloat16)
    optimizer = optimizer_of(model, 1e-3, **NUMBERS)
    for step in range(3):
        backward(model, step)
        update(optimizer)
    for name, master in optimizer.masters.items():
        halves = (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(model[name][~halves], master.bfloat16()[~halves])
        assert (master != model[name].float()).any()


PLACES = {
    "sliced": ShardSpec((2000, 3000), (700, 1500), (300, 700)),
    "far": ShardSpec((70000, 65536), (69990, 0), (2, 65536)),
    "rows": ShardSpec((900, 700), (300, 0), (300, 700)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["half", "held"])
@pytest.mark.parametrize("names", [["rows"], ["rows", "sliced", "far"]])
def test_the_kernel_rounds_by_the_written_thresholds(names: list[str], dtype: torch.dtype) -> None:
    rounding = Rounding("dithered", PLACES, held=frozenset(names))
    model = weights([PLACES[name].sizes for name in names], torch.bfloat16).to(dtype)
    model = nn.ParameterDict(dict(zip(names, model.values(), strict=True)))
    before = {name: weight.detach().clone() for name, weight in model.items()}
    optimizer = optimizer_of(model, 1e-6, rounding=rounding, **NUMBERS)
    for step in range(3):
        backward(model, step)
        update(optimizer)
    for name, master in optimizer.masters.items():
        expected = rounding.rounded(name, master)
        assert torch.equal(model[name].detach(), expected.to(dtype))
        assert 0.9 < kept(before[name], master, expected) < 1.1


def kept(before: Tensor, master: Tensor, written: Tensor) -> float:
    """Return the share of an update that the rounded weights hold."""
    update, seen = (t.double() - before.double() for t in (master, written))
    return float((update * seen).sum() / (update * update).sum())


@pytest.mark.parametrize("size", [1 << 28])
def test_thresholds_cost_little(size: int) -> None:
    """At most 3 % more time for an update that is bound by memory."""
    seconds = {}
    for kind in ("nearest", "dithered"):
        model = weights([(size,)], torch.bfloat16)
        optimizer = optimizer_of(model, 1e-6, rounding=Rounding(kind), **NUMBERS)
        backward(model, 0)
        optimizer.step(1.0)
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            optimizer.step(1.0)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        seconds[kind] = sorted(times)[10]
        del model, optimizer
    print(f"update of {size >> 20}M weights: {seconds} ms")
    assert seconds["dithered"] < 1.03 * seconds["nearest"]


def moments_of(optimizer: Optimizer, name: str) -> tuple[Tensor, Tensor]:
    codes = {
        kind.removeprefix(f"{name}."): t.flatten()
        for kind, t in optimizer.moments().items()
        if name in kind
    }
    first = decode(codes["exp_avg"], codes["exp_avg_base"], signed=True)
    return first, decode(codes["exp_avg_sq"], codes["exp_avg_sq_base"])


def test_lean_rounds_to_a_neighbour_and_right_on_average() -> None:
    """The first update: exp_avg is 0.1 g, exp_avg_sq 0.001 g^2, and every weight moves by the rate."""
    model = weights(SHAPES, torch.bfloat16)
    before = {name: weight.detach().double().clone() for name, weight in model.items()}
    optimizer = optimizer_of(model, 1e-4, lean=True)
    backward(model, 0)
    gradients = {
        name: weight.grad.detach().flatten()
        for name, weight in model.items()
        if weight.grad is not None
    }
    update(optimizer)
    for name, gradient in gradients.items():
        g = gradient.float()
        near = (
            g.abs() > g.abs().max() * 2.0**-14
        )  # further below the largest of its block a moment is 0, or a floor
        for moment, true in zip(moments_of(optimizer, name), (0.1 * g, 0.001 * g * g), strict=True):
            assert ((moment - true).abs() <= 0.126 * true.abs())[near].all()
            if len(g) > 1000:
                assert float(moment.abs().mean() / true.abs().mean()) == pytest.approx(
                    1, abs=4 / len(g) ** 0.5
                )
        if len(g) > 60_000:
            moved = (model[name].detach().double() - before[name]).flatten() * -g.sign().double()
            assert float(moved.mean()) == pytest.approx(1e-4, rel=0.03)


def test_lean_at_a_small_rate_moves_and_a_second_moment_follows() -> None:
    model = nn.ParameterDict(
        {"w": nn.Parameter(torch.full((256, 1024), 0.02, device="cuda", dtype=torch.bfloat16))}
    )
    optimizer = optimizer_of(model, 5e-7, lean=True, seed=3)
    start = float(model["w"].detach().double().mean())
    for step in range(400):
        (model["w"] * (2.0 if step else 1.0)).sum().backward()
        update(optimizer)
    assert start - float(model["w"].detach().double().mean()) == pytest.approx(2e-4, rel=0.05)
    first, second = moments_of(optimizer, "w")
    true = 0.999**399 * 0.001 + (1 - 0.999**399) * 4
    assert float(first.mean()) == pytest.approx(2.0, rel=0.01)
    assert float(second.mean()) == pytest.approx(true, rel=0.01)


def test_lean_noise_follows_seed_and_update_alone() -> None:
    runs = []
    for seed in (1, 1, 2):
        model = weights(SHAPES, torch.bfloat16)
        optimizer = optimizer_of(model, 1e-4, lean=True, seed=seed)
        for step in range(2):
            backward(model, step)
            update(optimizer)
        runs.append({**optimizer.masters, **optimizer.moments()})
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])
    assert not torch.equal(runs[0]["w1"], runs[2]["w1"])


def half_a_billion() -> list[tuple[int, ...]]:
    """The shapes of Qwen2.5 0.5B: 290 parameters, most of them small."""
    layer = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]
    vectors = [(896,), (128,), (128,), (896,), (896,)]
    return [(151936, 896), (896,), *(shape for _ in range(24) for shape in (*layer, *vectors))]


@pytest.mark.parametrize(
    ("lean", "bytes_each", "slowest"), [(False, 12.1, 20.0), (True, 4.2, 20.0)]
)
def test_memory_and_time(lean: bool, bytes_each: float, slowest: float) -> None:
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    model = weights(half_a_billion(), torch.bfloat16)
    optimizer = optimizer_of(model, 1e-6, lean=lean)
    count = sum(weight.numel() for weight in model.values())
    each = (torch.cuda.memory_allocated() - empty) / count
    backward(model, 0)
    times = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        optimizer.step(1.0)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    print(
        f"lean {lean}: {count / 1e6:.0f}M weights, {each:.3f} bytes each, an update {min(times[1:]):.2f} ms"
    )
    assert each <= bytes_each
    assert min(times[1:]) < slowest
