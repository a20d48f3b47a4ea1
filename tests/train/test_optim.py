"""The optimizer: schedules as Hugging Face has them, AdamW as torch has it, masters that lose no update, lean state."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rather.config.schema import TrainingArgs
from rather.errors import ConfigError
from rather.optim import adamw
from rather.optim.adamw import decode, encode
from rather.optim.optimizer import LossScale, Optimizer, schedule

TOTAL, PEAK = 37, 3e-4


def args(**changes: Any) -> TrainingArgs:
    return TrainingArgs(**{"learning_rate": PEAK, **changes})


def theirs(name: str, warmup: int, numbers: dict[str, float]) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, TOTAL, numbers)
    rates = []
    for _ in range(TOTAL):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.5}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 12}),
    ],
)
def test_schedules_equal_those_of_transformers(
    name: Any, numbers: dict[str, float], warmup: int
) -> None:
    rate = schedule(
        args(lr_scheduler_type=name, lr_scheduler_kwargs=numbers, warmup_steps=warmup), TOTAL
    )
    assert [rate(updates) for updates in range(TOTAL)] == pytest.approx(
        theirs(name, warmup, numbers), rel=1e-12
    )


KIND, KEYS = "lr_scheduler_type", "lr_scheduler_kwargs"
FLOOR = {"num_decay_steps": 2, "min_lr_rate": 0.2}
# settings, steps of the run, rates of its first updates as parts of the peak
RATES: list[tuple[dict[str, Any], int, list[float]]] = [
    ({KIND: "constant"}, TOTAL, [1]),
    ({KIND: "constant", "warmup_steps": 4}, TOTAL, [0, 0.25, 0.5, 0.75, 1, 1]),
    # The last tenth of the 40 steps after the warm-up is linear.
    ({KIND: "wsd", "warmup_steps": 2}, 42, [0, 0.5, *[1] * 37, 0.75, 0.5, 0.25]),
    ({KIND: "wsd", KEYS: FLOOR}, 6, [1, 1, 1, 1, 1, 0.6, 0.2]),
    ({KEYS: {"min_lr": PEAK / 2}}, 4, [1, 0.875, 0.75, 0.625, 0.5]),
    ({"warmup_ratio": 0.1}, TOTAL, [0, 0.25, 0.5, 0.75, 1]),  # 3.7 steps are 4
    ({"warmup_ratio": 0.5, "warmup_steps": 2}, TOTAL, [0, 0.5, 1]),
]


@pytest.mark.parametrize(("changes", "total", "rates"), RATES)
def test_rates_by_hand(changes: dict[str, Any], total: int, rates: list[float]) -> None:
    rate = schedule(args(**changes), total)
    assert [rate(n) / PEAK for n in range(len(rates))] == pytest.approx(rates)


def test_past_the_horizon_the_rate_stays_down() -> None:
    for name in ("linear", "cosine", "wsd"):
        rate = schedule(args(lr_scheduler_type=name), 10)
        assert rate(10) == rate(25) == 0


# --- updates ---


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter((torch.randn(6, 4) * spread).to(dtype))
        self.vector = nn.Parameter((torch.randn(4) * spread).to(dtype))

    def backward(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            (parameter * gradient).sum().backward()


OPTIONS = {"lean", "seed", "exact"}


def optimizer_of(
    model: nn.Module, *, rate: float = 1e-2, max_grad_norm: float = 0.0, **changes: Any
) -> Optimizer:
    options = {name: changes.pop(name) for name in OPTIONS & changes.keys()}
    return Optimizer(
        model.named_parameters(),
        args(**changes),
        schedule=lambda _: rate,
        max_grad_norm=max_grad_norm,
        **options,
    )


def gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 4), (4,))]


def update(optimizer: Optimizer) -> None:
    optimizer.step(float(optimizer.grad_norm()))
    optimizer.zero_grad()


def torch_adamw(model: Toy, rate: float, **options: Any) -> torch.optim.AdamW:
    """AdamW with NUMBERS."""
    groups = [
        {"params": [model.matrix], "weight_decay": 0.1},
        {"params": [model.vector], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.8, 0.95), eps=1e-6, **options)


NUMBERS = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_float32_is_torch_adamw(max_grad_norm: float) -> None:
    ours, other = Toy(), Toy()
    optimizer = optimizer_of(ours, max_grad_norm=max_grad_norm, **NUMBERS)
    adamw = torch_adamw(other, 1e-2)
    for step in range(6):
        ours.backward(gradients(step))
        other.backward(gradients(step))
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), max_grad_norm or float("inf"))
        assert float(optimizer.grad_norm()) == pytest.approx(
            float(norm), rel=1e-6
        )  # before clipping
        update(optimizer)
        adamw.step()
        adamw.zero_grad()
    assert optimizer.updates == 6
    for one, another in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, another, rtol=1e-6, atol=1e-7)


def test_frozen_weights_are_left_alone() -> None:
    model = Toy()
    model.matrix.requires_grad_(False)
    optimizer = optimizer_of(model, weight_decay=0.5)
    before = model.matrix.clone()
    (model.vector * 2).sum().backward()
    update(optimizer)
    assert list(optimizer.masters) == ["vector"]
    assert torch.equal(model.matrix, before)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("rate", [5e-7, 1e-5, 1e-3])
def test_split_masters_have_the_bits_of_float32_training(
    rate: float, max_grad_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 16)  # two pieces of the matrix
    ours, wide = Toy(torch.bfloat16, 0.02), Toy(torch.bfloat16, 0.02).float()
    single = Toy(torch.bfloat16, 0.02).float()
    optimizer = optimizer_of(ours, rate=rate, max_grad_norm=max_grad_norm, **NUMBERS)
    exact = optimizer_of(wide, rate=rate, max_grad_norm=max_grad_norm, **NUMBERS)
    plain = torch_adamw(single, rate, foreach=False, fused=False)
    for step in range(50):
        for model in (ours, wide, single):
            model.backward(gradients(step, torch.bfloat16))
        torch.nn.utils.clip_grad_norm_(single.parameters(), max_grad_norm or float("inf"))
        for each in (optimizer, exact):
            update(each)
        plain.step()
        plain.zero_grad()
    for name, parameter in single.named_parameters():
        assert torch.equal(optimizer.masters[name], exact.masters[name])
        assert torch.allclose(optimizer.masters[name], parameter, rtol=1e-6, atol=50 * rate * 1e-6)
        assert torch.equal(ours.get_parameter(name), exact.masters[name].bfloat16())


def any_floats(count: int) -> Tensor:
    """Every sign, exponent and mantissa short of the largest, halves between bfloat16 numbers among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F7F0000, (count,), generator=generator, dtype=torch.int32)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    return torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0) * bits.view(torch.float32)


def test_a_start_does_not_move_the_weights_that_the_reference_has() -> None:
    """Halves are rounded to even by whoever rounds a model: the policy keeps that, its master gives in."""
    values = any_floats(600).view(100, 6)
    model = nn.ParameterDict({"w": nn.Parameter(values.bfloat16())})
    optimizer = optimizer_of(model, exact={"w": values})
    assert torch.equal(model["w"], values.bfloat16())
    off = (optimizer.masters["w"].view(torch.int32) - values.view(torch.int32)).abs()
    assert off.max() == 1
    halves = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert not off[~halves].any()
    before = optimizer.masters["w"].clone()
    optimizer.load({"w": before}, {}, 0)
    assert torch.equal(optimizer.masters["w"], before)
    assert torch.equal(model["w"], values.bfloat16())


@pytest.mark.parametrize("lean", [False, True])
def test_narrow_gradients_stay_in_bfloat16(lean: bool) -> None:
    model = Toy(torch.bfloat16)
    optimizer = optimizer_of(model, lean=lean)
    assert optimizer.narrow_gradients() != lean  # lean sums in bfloat16 from the start
    for _ in range(2):
        model.backward(gradients(0, torch.bfloat16))
    assert {g.dtype for g in optimizer.gradients()} == {torch.bfloat16}
    doubled = torch.cat([2 * g.flatten().double() for g in gradients(0, torch.bfloat16)])
    assert float(optimizer.grad_norm()) == pytest.approx(float(doubled.norm()), rel=1e-6)
    before = model.matrix.detach().clone()
    update(optimizer)
    assert (model.matrix != before).any()
    assert optimizer.gradients() == []


def test_bfloat16_gradients_are_added_up_in_float32() -> None:
    model = Toy(torch.bfloat16)
    optimizer = optimizer_of(model)
    model.backward([torch.ones(6, 4), torch.ones(4)])
    for _ in range(256):
        model.backward([torch.full((6, 4), 2.0**-9), torch.full((4,), 2.0**-9)])
    assert [g.unique().tolist() for g in optimizer.gradients()] == [[1.5], [1.5]]
    assert {g.dtype for g in optimizer.gradients()} == {torch.float32}
    assert model.matrix.grad is None


FORMS = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
]


@pytest.mark.parametrize(("dtype", "lean"), FORMS)
def test_a_loaded_optimizer_continues_with_the_same_bits(dtype: torch.dtype, lean: bool) -> None:
    """Also for a weight that missed an update: its bias correction counts its own."""
    model = Toy(dtype)
    optimizer = optimizer_of(model, lean=lean, **NUMBERS)
    for step in range(3):
        if step == 1:
            model.matrix.sum().backward()
        else:
            model.backward(gradients(step))
        update(optimizer)
    saved = {name: p.detach().clone() for name, p in optimizer.masters.items()}
    moments = {name: t.clone() for name, t in optimizer.moments().items()}
    fresh = Toy(dtype)
    other = optimizer_of(fresh, lean=lean, **NUMBERS)
    assert moments["vector.step"] == 2
    assert "matrix.step" not in moments
    other.load(saved, moments, optimizer.updates)
    for step in range(3, 6):
        for each, its in ((model, optimizer), (fresh, other)):
            each.backward(gradients(step))
            update(its)
    assert other.updates == 6
    for name, master in optimizer.masters.items():
        assert torch.equal(other.masters[name], master)
        assert torch.equal(other.parameters[name], optimizer.parameters[name])


def test_a_weight_that_never_got_a_gradient_has_no_moments() -> None:
    """As the image tower of a model that is trained on text: nothing is saved for it, and nothing is missed."""
    model, fresh = Toy(), Toy()
    optimizer, other = optimizer_of(model), optimizer_of(fresh)
    model.vector.sum().backward()
    update(optimizer)
    assert optimizer.moments().keys() == {"vector.exp_avg", "vector.exp_avg_sq"}
    moments = {name: t.clone() for name, t in optimizer.moments().items()}
    other.load({name: p.detach() for name, p in optimizer.masters.items()}, moments, 1)
    for each, its in ((model, optimizer), (fresh, other)):
        each.vector.sum().backward()
        update(its)
    assert torch.equal(fresh.vector, model.vector)
    assert torch.equal(fresh.matrix, model.matrix)


def test_loss_scale_grows_after_patience() -> None:
    scale = LossScale(value=8.0, patience=3)
    for _ in range(2):
        scale.succeeded()
    assert scale.value == 8
    scale.overflowed()
    assert (scale.value, scale.clean) == (4, 0)
    for _ in range(3):
        scale.succeeded()
    assert (scale.value, scale.clean) == (8, 0)


def test_only_float16_has_a_loss_scale() -> None:
    scales = [
        optimizer_of(Toy(dtype)).scale for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert scales == [1, 1, 2**16]


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_the_loss_scale_is_taken_out_again(max_grad_norm: float) -> None:
    model, plain = Toy(torch.float16), Toy(torch.float16)
    optimizer, other = (optimizer_of(toy, max_grad_norm=max_grad_norm) for toy in (model, plain))
    assert optimizer.loss_scale
    assert other.loss_scale
    optimizer.loss_scale.value, other.loss_scale.value = 16.0, 1.0
    given = gradients(1, torch.float16)
    model.backward([16 * g for g in given])
    plain.backward(given)
    assert float(optimizer.grad_norm()) == pytest.approx(float(other.grad_norm()), rel=1e-6)
    for its in (optimizer, other):
        update(its)
    assert optimizer.moments().keys() == other.moments().keys()
    for (
        name,
        moment,
    ) in optimizer.moments().items():  # AdamW's first step alone would hide the scale
        assert torch.allclose(moment, other.moments()[name], rtol=1e-5)


# --- lean ---


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 1 << 20, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )


def coded(values: Tensor, noise: Tensor, *, signed: bool) -> Tensor:
    """Through the bytes and back."""
    codes = torch.zeros_like(values, dtype=torch.uint8)
    bases = torch.zeros(-(-len(values) // adamw.BLOCK), dtype=torch.int16)
    encode(values, noise, codes, bases, signed=signed)
    return decode(codes, bases, signed=signed)


@pytest.mark.parametrize(("signed", "octaves"), [(True, 15.5), (False, 31.5)])
def test_lean_moments_are_right_to_an_eighth_and_on_average(signed: bool, octaves: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.exp2(-octaves * torch.rand(1000, generator=generator)) * 1e-6
    values[::7] = 0
    if signed:
        values[::2] *= -1
    rounded = torch.stack([coded(values, noise(1000, seed), signed=signed) for seed in range(400)])
    inside = values != 0
    assert ((rounded - values)[:, inside].abs() <= values[inside].abs() / 8).all()
    assert torch.allclose(rounded.mean(0)[inside], values[inside], rtol=0.02)
    if signed:
        assert not rounded[:, ~inside].any()
    assert not coded(torch.zeros(300), noise(300), signed=signed).any()


def test_lean_moments_far_below_the_largest() -> None:
    """A first moment becomes 0, a second stays positive: the update is small, not huge."""
    values = torch.full((256,), 2.0**-40)
    values[0] = 1.0
    assert coded(values, noise(256), signed=True)[1:].unique().tolist() == [0]
    (smallest,) = coded(values, noise(256), signed=False)[1:].unique().tolist()
    assert 2.0**-33 < smallest < 2.0**-31


def test_a_slow_second_moment_needs_rounding_at_random() -> None:
    """It moves by 0.1 % a step, a byte by 6 to 12 %: rounded to the nearest it would stay where it is."""
    exact, nearest, random = (torch.full((2048,), 1e-8) for _ in range(3))
    half = torch.full((2048,), 1 << 19, dtype=torch.int32)
    for step in range(1000):
        exact = 0.999 * exact + 0.001 * 4e-8
        nearest = coded(0.999 * nearest + 0.001 * 4e-8, half, signed=False)
        random = coded(0.999 * random + 0.001 * 4e-8, noise(2048, step), signed=False)
    assert nearest.max() < 1.1e-8
    assert float(random.mean()) == pytest.approx(float(exact.mean()), rel=0.02)
    assert random.std() < 0.25 * random.mean()


def test_lean_weights_move_by_the_right_mean() -> None:
    """400 updates of 5e-7, each far below half the spacing of bfloat16 numbers near 0.02."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((64, 64), 0.02, dtype=torch.bfloat16))})
    optimizer = optimizer_of(model, rate=5e-7, lean=True, seed=3)
    start = float(model["w"].detach().double().mean())
    for _ in range(400):
        model["w"].sum().backward()
        update(optimizer)
    assert float(model["w"].detach().double().mean()) == pytest.approx(start - 2e-4, abs=1e-5)


def regression(*, lean: bool, steps: int = 300, seed: int = 0) -> tuple[float, Optimizer]:
    """Mean squared error at the end of fitting a linear map, from about 1, on batches drawn anew."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(48, 32, generator=generator) / 48**0.5
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(48, 32, dtype=torch.bfloat16))})
    optimizer = optimizer_of(model, rate=3e-3, max_grad_norm=1.0, lean=lean, seed=seed)
    for _ in range(steps):
        x = torch.randn(64, 48, generator=generator)
        (x @ model["w"].float() - x @ truth).square().mean().backward()
        update(optimizer)
    return float((model["w"].detach().float() - truth).square().sum() / 32), optimizer


def test_lean_learns_as_exact_does() -> None:
    exact, _ = regression(lean=False)
    lean, optimizer = regression(lean=True)
    assert exact < 1e-3
    assert lean < 2e-3
    assert sum(t.nbytes for t in optimizer.moments().values()) < 2.1 * 48 * 32


def test_lean_noise_follows_the_seed_alone() -> None:
    one, same, other = (
        {
            name: m.clone()
            for name, m in regression(lean=True, steps=5, seed=seed)[1].masters.items()
        }
        for seed in (1, 1, 2)
    )
    assert torch.equal(one["w"], same["w"])
    assert not torch.equal(one["w"], other["w"])


@pytest.mark.parametrize(("then", "now"), [("lean", "exact"), ("exact", "lean")])
def test_a_checkpoint_of_another_precision_is_refused(then: str, now: str) -> None:
    model, fresh = Toy(torch.bfloat16), Toy(torch.bfloat16)
    optimizer, other = (
        optimizer_of(model, lean=then == "lean"),
        optimizer_of(fresh, lean=now == "lean"),
    )
    model.backward(gradients(0))
    update(optimizer)
    with pytest.raises(
        ConfigError, match=f"precision: {now}, but .* written with {then}; set precision={then}"
    ):
        other.load(optimizer.masters, optimizer.moments(), 1)
    assert torch.equal(fresh.matrix, Toy(torch.bfloat16).matrix)


def test_a_deleted_optimizer_frees_its_memory() -> None:
    """Hooks hold no parameter: the garbage collector cannot look into them."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    args = TrainingArgs()
    optimizer = Optimizer([("w", parameter)], args, schedule=lambda _: 0.1, max_grad_norm=1.0)
    gone = weakref.ref(parameter)
    del optimizer, parameter
    gc.collect()
    assert gone() is None
