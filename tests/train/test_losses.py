"""The losses: values and gradients by formulas written independently, edges, and the schema in the signature."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from rather.batch import PairLogps
from rather.errors import ConfigError
from rather.losses import LOSSES, configure, ipo, schema, sigmoid

MARGINS = [-30.0, -2.5, -1e-3, 0.0, 1e-3, 0.7, 4.0, 30.0]


def logps(margins: list[float], *, length: tuple[float, float] = (3.0, 5.0)) -> PairLogps:
    """Pairs whose log-ratio differences are `margins`; the numbers around them are arbitrary."""
    torch.manual_seed(0)
    reference = -10 * torch.rand(len(margins), 2, dtype=torch.float64)
    policy = reference + torch.randn(len(margins), 1, dtype=torch.float64)
    policy[:, 0] += torch.tensor(margins, dtype=torch.float64)
    return PairLogps(policy.requires_grad_(), reference, torch.tensor([length]).double().expand(len(margins), 2))


def gradient(losses: Tensor, x: PairLogps) -> Tensor:
    return torch.autograd.grad(losses.sum(), x.policy)[0]


@pytest.mark.parametrize("beta", [0.05, 0.1, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
def test_sigmoid(beta: float, smoothing: float) -> None:
    """-(1-e) ln s(bm) - e ln s(-bm), whose slope in m is -b ((1-e) s(-bm) - e s(bm))."""
    x = logps(MARGINS)
    losses = sigmoid(x, beta=beta, label_smoothing=smoothing)
    slopes = gradient(losses, x)
    for margin, loss, (chosen, rejected) in zip(MARGINS, losses.tolist(), slopes.tolist(), strict=True):
        z = beta * margin
        right, wrong = 1 / (1 + math.exp(-z)), 1 / (1 + math.exp(z))
        want = (1 - smoothing) * math.log1p(math.exp(-z)) + smoothing * math.log1p(math.exp(z))
        slope = -beta * ((1 - smoothing) * wrong - smoothing * right)
        assert loss == pytest.approx(want, rel=1e-12)
        assert chosen == pytest.approx(slope, rel=1e-9, abs=1e-15)
        assert rejected == pytest.approx(-slope, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_ipo(beta: float) -> None:
    x = logps(MARGINS)
    losses = ipo(x, beta=beta)
    slopes = gradient(losses, x)
    assert x.reference is not None
    ratios = (x.policy - x.reference).tolist()
    for (chosen, rejected), loss, slope in zip(ratios, losses.tolist(), slopes.tolist(), strict=True):
        distance = chosen / 3 - rejected / 5 - 1 / (2 * beta)
        assert loss == pytest.approx(distance**2, rel=1e-12)
        assert slope == pytest.approx([2 * distance / 3, -2 * distance / 5], rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_ln_2_where_policy_and_reference_agree(smoothing: float) -> None:
    assert sigmoid(logps([0.0]), beta=0.3, label_smoothing=smoothing).item() == pytest.approx(math.log(2), rel=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_huge_margins_stay_numbers(name: str) -> None:
    x = logps([-1e4, 1e4])
    losses = configure(name, {"beta": 1.0})(x)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient(losses, x)).all()
    if name == "sigmoid":
        assert losses.tolist() == pytest.approx([1e4, 0.0])


def test_one_loss_per_pair() -> None:
    """Each pair's loss is its own: what stands beside it does not matter."""
    for name in LOSSES:
        whole = configure(name, {})(logps(MARGINS))
        x = logps(MARGINS)
        assert x.reference is not None
        for i in range(len(MARGINS)):
            alone = PairLogps(x.policy[i : i + 1], x.reference[i : i + 1], x.length[i : i + 1])
            assert configure(name, {})(alone).item() == whole[i].item()


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in LOSSES for number in schema(name)])
def test_every_number_of_every_loss_has_an_effect(name: str, number: str) -> None:
    x = logps([0.7, -2.0])
    default = configure(name, {})(x)
    assert torch.equal(configure(name, {number: schema(name)[number]})(x), default)
    assert not torch.allclose(configure(name, {number: schema(name)[number] + 0.17})(x), default)


def test_an_unknown_loss_is_met_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=re.escape("pref_loss: unknown loss 'sigmoed'; did you mean 'sigmoid'?")):
        configure("sigmoed", {})
    with pytest.raises(ConfigError, match=r"unknown loss 'qqq'; the losses are ipo, sigmoid\."):
        configure("qqq", {})


def test_a_number_that_the_loss_does_not_have() -> None:
    with pytest.raises(ConfigError) as caught:
        configure("ipo", {"beta": 0.2, "label_smoothing": 0.1, "gamma": 1.0})
    assert caught.value.problems == [
        "label_smoothing: loss 'ipo' takes beta; it has no label_smoothing. Remove it.",
        "gamma: loss 'ipo' takes beta; it has no gamma. Remove it.",
    ]


def test_neutral_values_pass_for_every_loss() -> None:
    x = logps(MARGINS)
    for name in LOSSES:
        neutral = configure(name, {"beta": None, "label_smoothing": 0.0, "gamma": 0.0})
        assert torch.equal(neutral(x), configure(name, {})(x))
