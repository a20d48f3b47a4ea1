"""Compare one rank's part of a divided model with the whole model: columns and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.collectives import all_reduce_
from rather.model.layers import arrange_layers
from rather.model.policy import PolicyModel, pair_columns
from rather.parallel.context import spread_tokens
from rather.parallel.mesh import Mesh
from rather.parallel.tensor import part, split_model
from tests.model.test_families import VOCAB, tiny
from tests.padded import random_pairs

WANTED = ("shared", "squares")


def worst_difference(
    family: str,
    axes: dict[str, int],
    *,
    sequence_parallel: bool = False,
    pairs: list[TokenPair] | None = None,
    budget: int = 120,
    arranged: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> float:
    """Relative to the largest number of each tensor, over columns and gradients."""
    mesh = Mesh.build(**axes)
    batches = pack(
        pairs or random_pairs(5, VOCAB), budget, ranks=2
    )  # the last may be one of fillers alone
    plain, divided = (
        PolicyModel(tiny(family, torch.float32, IMPLEMENTATION, **model or {})) for _ in range(2)
    )
    split_model(divided, mesh, sequence_parallel=sequence_parallel)
    spread_tokens(divided, mesh)
    arrange_layers(divided, **arranged or {})
    want, got = columns_and_gradients(plain, batches), columns_and_gradients(divided, batches)
    if group := mesh.group("cp"):
        all_reduce_([got[name] for name in got if name.startswith("causal_lm")], group)
    if divided.tp_partial and (group := mesh.group("tp")):
        all_reduce_([got[name] for name in sorted(divided.tp_partial)], group)
    for name, dim in divided.tp_dims.items():
        own = part(divided.tp_sizes[name], mesh.rank("tp"), mesh.size("tp"))
        want[name] = want[name].narrow(dim, *own)
    assert want.keys() == got.keys()
    return max(_difference(want[name], got[name]) for name in want)


def columns_and_gradients(policy: PolicyModel, batches: list[PairBatch]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        columns = pair_columns(policy, batch, WANTED)
        found |= {f"{name} {number}": column.detach().clone() for name, column in columns.items()}
        sums, shared = columns["sum"], columns["shared"]
        (sums[:, 0] - sums[:, 1] + shared[:, 0] * 0.5).tanh().sum().backward()
    found |= {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return found


def _difference(want: Tensor, got: Tensor) -> float:
    assert want.shape == got.shape
    return (
        float((want - got).abs().max() / want.abs().max().clamp(min=1e-8)) if want.numel() else 0.0
    )
