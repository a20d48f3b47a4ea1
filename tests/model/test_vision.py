"""Pairs with images: packed equals the model's own padded forward, for each family."""

from __future__ import annotations

import pytest
import torch

from rather.data.pack import pack
from rather.model.policy import PolicyModel, pair_columns
from tests.model.images import SEEING, image_pairs, make_seeing, padded_image_logps


def gradients(policy: PolicyModel) -> dict[str, torch.Tensor]:
    named = policy.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    policy.zero_grad()
    return found


def packed_logps(policy: PolicyModel, pairs: list, budget: int) -> torch.Tensor:
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for batch in pack(pairs, budget):
        sums = sums.index_add(0, batch.pair_P, pair_columns(policy, batch)["sum"])
    return sums


@pytest.mark.parametrize("family", SEEING)
def test_packed_equals_padded(family: str) -> None:
    policy, maker = make_seeing(family)
    pairs = image_pairs(family, 6)
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
    expected = padded_image_logps(policy, pairs).double()
    (expected * weights).sum().backward()
    expected_gradients = gradients(policy)
    assert any("visual" in n or "vision" in n for n in expected_gradients)
    for budget in (10**6, 1):
        maker.made.clear()
        packed = packed_logps(policy, pairs, budget)
        assert len(maker.made) <= 6  # not one for each of the 12 answers
        (packed * weights).sum().backward()
        computed = gradients(policy)
        lengths = torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
        assert float(((packed - expected).abs() / lengths).detach().max()) < 1e-5
        assert computed.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            worst = float((computed[name] - gradient).abs().max())
            assert worst < 1e-4 * (1e-2 + float(gradient.abs().max())), name
